"""Learning rates that a trial's config changes in a saved state."""

from __future__ import annotations

from typing import Any

import numpy as np


def inspect(operator: Any) -> tuple[bool, list[float | None]]:
    """Return whether there is validation data, and the initial learning rates.

    Runs on a worker, after ``setup``. The rate of a schedule is None.
    """
    train_state = operator._train_state
    return train_state.data.has("validation"), [
        _rate(optimizer) for optimizer in train_state.optimizers
    ]


def with_options(
    state: dict[str, Any], then: list[float | None], now: list[float | None]
) -> dict[str, Any]:
    """Multiply each learning rate of a state in place by the ratio of initial rates, now / then."""
    for optimizer, old, new in zip(state["optimizers"], then, now, strict=True):
        if old is None or new is None or old == new:
            continue
        for name, value in optimizer.items():
            if "learning_rate" in name and np.ndim(value) == 0:
                ratio = float(value) / old if old else 1.0
                optimizer[name] = np.asarray(new * ratio, np.asarray(value).dtype)
    return state


def _rate(optimizer: Any) -> float | None:
    inner = getattr(optimizer, "inner_optimizer", None) or optimizer
    rate: Any = inner._learning_rate
    return float(rate) if hasattr(rate, "numpy") else None
