"""The arguments of ``trainer.fit()``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raysgd._internal.arguments import check_dict, check_int, set_fields


@dataclass(frozen=True)
class FitOptions:
    """See :meth:`raysgd.TorchTrainer.fit`. The defaults mean that no ``fit()`` runs."""

    num_epochs: Any = None
    validate_every: int | None = None
    max_retries: int = 0
    info: dict[str, Any] | None = None
    log_every: int | None = None
    max_steps: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_epochs", "validate_every", "max_steps", "log_every"):
            if (value := getattr(self, name)) is not None:
                set_fields(self, **{name: check_int("fit", name, value, 1)})
        set_fields(self, max_retries=check_int("fit", "max_retries", self.max_retries, 0))
        check_dict("fit", "info", self.info)
