"""How a trainer reacts to workers that are lost or come back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from raysgd._internal.arguments import (
    check_choice,
    check_flags,
    check_int,
    check_number,
    set_fields,
)

__all__ = ["ElasticConfig"]


@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """What to do about losses; the defaults suit most runs.

    Raises:
        TypeError: if a value has the wrong type.
        ValueError: if a value is out of its range.
    """

    min_workers: int | None = None
    """The fewest workers to train with; None: what the trainer's ``min_workers`` says."""
    max_attempts: int = 10
    """How often to try for enough workers before giving up, and how many replacements may fail in a
    row before no more are tried."""
    initial_s: float = 1.0
    """Seconds before the second try; each further wait is `factor` times longer."""
    factor: float = 2.0
    max_s: float = 60.0
    """The longest wait, in seconds."""
    jitter: float = 0.1
    """Share of a wait by which it varies at random, so that trainers do not try in step."""
    resize_cooldown_s: float = 10.0
    """Seconds between two changes of size for room that has appeared. A lost worker is replaced
    as soon as its successor is ready."""
    hang_timeout_s: float | None = None
    """Seconds without a finished batch after which stuck workers are killed; None: never."""
    driver_grace_s: float = 60.0
    """Seconds that driver and workers wait for each other if the driver reaches no worker. A worker
    that does not reach the driver again in this time ends."""
    in_place: bool = True
    """Whether survivors go on in their processes; otherwise all restart from the snapshot."""
    grow: bool = True
    """Whether lost workers are replaced, and missing ones added when there is room."""
    snapshot_every: Literal["epoch"] | int | None = "epoch"
    """How often the driver gets a copy of the state, for the case that all workers are lost: at the
    start of each epoch, after so many steps, or never."""

    global_batch: Literal["keep", "scale"] = "keep"
    """What a step trains on where workers are missing: "keep": what the full group would, so that
    an epoch has as many steps and the same result; "scale": a batch of each worker there is."""

    def __post_init__(self) -> None:
        where = "ElasticConfig"
        if self.min_workers is not None:
            set_fields(self, min_workers=check_int(where, "min_workers", self.min_workers, 1))
        set_fields(self, max_attempts=check_int(where, "max_attempts", self.max_attempts, 1))
        for name in ("initial_s", "max_s", "resize_cooldown_s", "driver_grace_s"):
            check_number(where, name, getattr(self, name))
        check_number(where, "factor", self.factor, lowest=1.0)
        check_number(where, "jitter", self.jitter, highest=1.0)
        if self.hang_timeout_s is not None:
            check_number(where, "hang_timeout_s", self.hang_timeout_s)
        if self.hang_timeout_s == 0:
            raise ValueError("ElasticConfig(hang_timeout_s=0): must be above 0, or None.")
        check_flags(where, in_place=self.in_place, grow=self.grow)
        check_choice(where, "global_batch", self.global_batch, ("keep", "scale"))
        every = self.snapshot_every
        if isinstance(every, bool) or not isinstance(every, int | str | None):
            raise TypeError(
                f'ElasticConfig(snapshot_every={every!r}): must be "epoch", an int, or None.'
            )
        if every not in ("epoch", None) and (isinstance(every, str) or every < 1):
            raise ValueError(
                f'ElasticConfig(snapshot_every={every!r}): must be "epoch", a number of steps, '
                "or None."
            )


def checked_elastic(trainer: str, elastic: Any, num_workers: int) -> ElasticConfig:
    """Return the ElasticConfig, the default one for None."""
    if elastic is None:
        return ElasticConfig()
    if not isinstance(elastic, ElasticConfig):
        raise TypeError(f"{trainer}(elastic=...) takes an ElasticConfig, not {elastic!r}.")
    if elastic.min_workers is not None and elastic.min_workers > num_workers:
        raise ValueError(
            f"ElasticConfig(min_workers={elastic.min_workers}), {trainer}(num_workers="
            f"{num_workers}): min_workers must be between 1 and num_workers."
        )
    return elastic
