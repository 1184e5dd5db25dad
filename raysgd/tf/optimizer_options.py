"""Learning rates that a trial's config changes in a loaded state."""

from __future__ import annotations

from typing import Any


def initial_options(operator: Any) -> list[float | None]:
    """Return the learning rates after ``setup``; None for a schedule. Runs on a worker."""
    rates = map(_rate, operator._train_state.optimizers)
    return [rate if rate is None else float(rate) for rate in rates]


def rescale_options(then: list[float | None], now: list[float | None], operator: Any) -> None:
    """Multiply each learning rate by the ratio of initial rates, now / then."""
    for optimizer, old, new in zip(operator._train_state.optimizers, then, now, strict=True):
        if old is not None and new is not None and old != new:
            rate = _rate(optimizer)
            rate.assign(new * (float(rate) / old if old else 1.0))


def _rate(optimizer: Any) -> Any:
    rate = (getattr(optimizer, "inner_optimizer", None) or optimizer).learning_rate
    return rate if hasattr(rate, "assign") else None  # a schedule returns a tensor
