"""Operators from creator functions, for the oldest scripts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from raysgd._internal.arguments import check_int, checked_dict
from raysgd.loop.operator_base import class_from_creators, created_loaders
from raysgd.tf.operator import TrainingOperator

_KEYS = {
    "fit_config": ("epochs", "steps_per_epoch", "class_weight", "verbose"),
    "evaluate_config": ("steps", "verbose"),
}


def fit_plan(config: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the numbers of epochs and steps in ``fit_config`` and ``evaluate_config``."""
    plan: dict[str, int | None] = {}
    for name, known in _KEYS.items():
        settings = checked_dict("config", name, config.get(name))
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


class KerasCreatorOperator(TrainingOperator):
    """An operator whose model and data come from creator functions."""

    _model_creator: Callable[..., Any]
    _data_creator: Callable[..., Any] | None = None

    def setup(self, config: dict[str, Any]) -> None:
        creators = type(self)
        fit = config.get("fit_config") or {}
        self.model, self.optimizer, *_ = self.register(
            creators._model_creator(config), class_weight=fit.get("class_weight")
        )
        if creators._data_creator is not None:
            self.register_data(**created_loaders(creators._data_creator(config)))


def creator_operator(model_creator: Any, data_creator: Any) -> type[KerasCreatorOperator]:
    creators = {"model_creator": model_creator, "data_creator": data_creator}
    made: type[KerasCreatorOperator] = class_from_creators(
        "TFTrainer", (KerasCreatorOperator,), creators, required=("model_creator",)
    )
    return made


def with_old_names(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a validation with the names of older scripts, including ``loss``."""
    renamed = {
        f"validation_{name.removeprefix('val_')}" if name.startswith("val_") else name: value
        for name, value in metrics.items()
    }
    if "validation_loss" in renamed:
        renamed["loss"] = renamed["validation_loss"]
    return renamed
