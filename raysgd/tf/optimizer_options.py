"""Learning rates that a trial's config changes in a loaded state."""

from __future__ import annotations

from typing import Any


def inspect(operator: Any) -> tuple[bool, list[float | None]]:
    """Return whether there is validation data, and the initial learning rates.

    Runs on a worker, after ``setup``. The rate of a schedule is None.
    """
    train_state = operator._train_state
    rates = map(_rate, train_state.optimizers)
    return train_state.data.has("validation"), [r if r is None else float(r) for r in rates]


def change(then: list[float | None], now: list[float | None], operator: Any) -> None:
    """Multiply each learning rate by the ratio of initial rates, now / then."""
    for optimizer, old, new in zip(operator._train_state.optimizers, then, now, strict=True):
        if old is not None and new is not None and old != new:
            rate = _rate(optimizer)
            rate.assign(new * (float(rate) / old if old else 1.0))


def _rate(optimizer: Any) -> Any:
    rate = (getattr(optimizer, "inner_optimizer", None) or optimizer).learning_rate
    return rate if hasattr(rate, "assign") else None  # a schedule returns a tensor
