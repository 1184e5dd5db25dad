"""Models and data from creator functions, and their config and metrics, as in older scripts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysgd._internal.arguments import check_dict, check_int
from raysgd.loop.creators import Creators

_KEYS = {
    "fit_config": ("epochs", "steps_per_epoch", "class_weight", "verbose"),
    "evaluate_config": ("steps", "verbose"),
}


class KerasCreators(Creators):
    """The methods of an operator whose creators return a compiled model and data sets."""

    def setup(self, config: dict[str, Any]) -> None:
        weights = (config.get("fit_config") or {}).get("class_weight")
        self.model, self.optimizer, *_ = self.register(
            self._model_creator(config), class_weight=weights
        )
        self._create_data(config)


def number_of_workers(num_workers: int | None, num_replicas: int | None) -> int:
    """Return the number that an argument with two names asks for."""
    if num_workers is not None and num_replicas is not None and num_workers != num_replicas:
        raise ValueError(
            f"TFTrainer(num_workers={num_workers}, num_replicas={num_replicas}) got two values for "
            "one argument with two names. Pass only num_workers."
        )
    number = num_replicas if num_workers is None else num_workers
    return 1 if number is None else number


def fit_plan(config: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the numbers of epochs and steps in ``fit_config`` and ``evaluate_config``."""
    plan: dict[str, int | None] = {}
    for name, known in _KEYS.items():
        settings = check_dict("config", name, config.get(name))
        if unknown := [key for key in settings if key not in known]:
            raise ValueError(
                f"config[{name!r}] has unknown keys: {', '.join(map(repr, unknown))}. It can have "
                f"{', '.join(map(repr, known))}. Set the batch size in data_creator, and pass "
                "callbacks to TFTrainer(callbacks=...)."
            )
        for key in ("epochs", "steps_per_epoch", "steps"):
            if key in known:
                count = settings.get(key)
                plan[key] = None if count is None else check_int(name, key, count, lowest=1)
    return plan


def use_old_names(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a validation with the names of older scripts, including ``loss``."""
    renamed = {
        f"validation_{name.removeprefix('val_')}" if name.startswith("val_") else name: value
        for name, value in metrics.items()
    }
    if "validation_loss" in renamed:
        renamed["loss"] = renamed["validation_loss"]
    return renamed
