"""The arguments of ``fit()``, and the limits that follow from them."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from typing import Any

from raysgd._internal.arguments import (
    check_int,
    check_timeout,
    checked_dict,
    is_number,
    set_fields,
)


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """See :meth:`raysgd.TorchTrainer.fit`."""

    num_epochs: Any = None
    validate_every: int | None = 1
    max_retries: int = 3
    info: dict[str, Any] | None = None
    sanity_steps: int | None = 2
    log_every: int | None = None
    max_steps: int | None = None
    max_time_s: float | None = None
    limit_train_batches: float | None = None
    limit_val_batches: float | None = None
    overfit_batches: float | None = None
    fast_dev_run: bool = False

    def __post_init__(self) -> None:
        if self.num_epochs is None and (self.max_steps or self.max_time_s or self.fast_dev_run):
            set_fields(self, num_epochs=sys.maxsize)
        if self.num_epochs is None:
            raise TypeError(
                "fit(num_epochs=None): must be an int, unless max_steps or max_time_s is given."
            )
        numbers = {"num_epochs": 1, "max_retries": 0, "sanity_steps": 0}
        numbers |= {"validate_every": 1, "log_every": 1, "max_steps": 1}
        for name, lowest in numbers.items():
            if (value := getattr(self, name)) is not None:
                set_fields(self, **{name: check_int("fit", name, value, lowest)})
        checked_dict("fit", "info", self.info)
        limits = (self.limit_train_batches, self.limit_val_batches)
        if self.overfit_batches is not None and limits != (None, None):
            raise ValueError(
                "fit(): pass either overfit_batches, which limits training and validation, or "
                "limit_train_batches and limit_val_batches."
            )
        if self.max_time_s is not None:
            check_timeout("fit", self.max_time_s, "max_time_s")
        for name in ("limit_train_batches", "limit_val_batches", "overfit_batches"):
            _check_share(name, getattr(self, name))

    @property
    def train_batches(self) -> float | None:
        """Steps of an epoch, or a float for a fraction of them. None means all."""
        return self.limit_train_batches if self.overfit_batches is None else self.overfit_batches

    @property
    def val_batches(self) -> float | None:
        """Steps of a validation, or a float for a fraction of them. None means all."""
        return self.limit_val_batches if self.overfit_batches is None else self.overfit_batches


def _check_share(name: str, given: Any) -> None:
    if given is None:
        return
    is_count, is_share = isinstance(given, int) and given >= 1, isinstance(given, float)
    if not is_number(given) or not (is_count or (is_share and 0 < given <= 1)):
        raise ValueError(
            f"fit({name}={given!r}): must be a number of batches (an int from 1), or a fraction "
            "of all batches (a float up to 1.0)."
        )


class Limits:
    """The step and time limits of a ``fit()``. The time starts now."""

    def __init__(self, options: FitOptions) -> None:
        self.options = options
        self._began = time.monotonic()
        self._end = self._began + (options.max_time_s or math.inf)
        self._began_at: int | None = None

    def reached(self, global_step: int) -> str | None:
        """Return which limit is reached, or None."""
        options = self.options
        if options.max_steps is not None and global_step >= options.max_steps:
            return f"max_steps={options.max_steps} is reached"
        if time.monotonic() >= self._end:
            return f"max_time_s={options.max_time_s:g} is over"
        return None

    def next_look(self, global_step: int) -> int | None:
        """Return the step at which to check the time next. None without a time limit."""
        if self._end == math.inf:
            return None
        if self._began_at is None:
            self._began_at = global_step
        now, num_steps = time.monotonic(), global_step - self._began_at
        # Check again in one second, or at the end.
        steps = min(1.0, self._end - now) * num_steps / (now - self._began)
        return global_step + max(1, int(steps))
