"""Trainers as trials of Ray Tune: the result of ``TorchTrainer.as_trainable``.

A trial is a Tune actor that reserves nothing and contains the trainer. Each worker has a bundle of
the trial's placement group. With ``use_local=True`` the actor is worker 0.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from raysgd._internal.arguments import plain_int
from raysgd._internal.nested import try_copy
from raysgd.cluster.ray_session import check_runtime_env
from raysgd.loop.operator_base import has_validation_loader

try:
    from ray.tune import PlacementGroupFactory, Trainable
except ImportError as error:
    raise RuntimeError(
        f'as_trainable() needs Ray Tune: pip install "raysgd[tune]" ({error})'
    ) from error

_STATE = "trainer.checkpoint"
_OPTIONS = "optimizer_options.json"

TuneStep = Callable[[Any, dict[str, Any]], dict[str, Any]]


class BaseTrainable(Trainable):
    """A trial that trains with ``self.trainer``. `trainable_class` sets the class of the trainer.

    Older scripts derive from ``BaseTorchTrainable`` or ``TFTrainable``, and override
    ``_create_trainer(config)`` and, for a trainer with workers, ``default_resource_request``.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "num_workers": 1,
        "num_cpus_per_worker": 1,
        "use_gpu": "auto",
    }
    """The arguments of the trainer that the config of a trial may set, and their defaults."""
    trainer_cls: ClassVar[Any]
    """The class of the trainer."""
    trainer_kwargs: ClassVar[Mapping[str, Any]]
    override_tune_step: ClassVar[TuneStep | None] = None
    trainer: Any
    """The trainer of this trial."""

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> PlacementGroupFactory | None:
        """Return the resources of a trial: a bundle for each worker, and none for its actor."""
        check_runtime_env("env_vars")
        if cls._create_trainer is not BaseTrainable._create_trainer:
            return super().default_resource_request(config)
        arguments = cls.trainer_arguments(config)
        names = ("num_workers", "num_cpus_per_worker", "resources_per_worker", "use_gpu")
        given = {name: arguments[name] for name in names if name in arguments}
        options = cls.trainer_cls._options_cls(**given)
        bundles = [options.resolve().group_options(0).bundle] * options.num_workers
        if not arguments.get("use_local", False):
            bundles.insert(0, {})
        return PlacementGroupFactory(bundles, strategy="PACK")

    def setup(self, config: dict[str, Any]) -> None:
        self.trainer = self._create_trainer(config)
        apply = self.trainer.apply_all_operators
        self._has_validation = apply(has_validation_loader)[0]
        self._initial_options = apply(self.trainer._optimizer_options.initial_options)[0]

    def _create_trainer(self, config: dict[str, Any]) -> Any:
        arguments = self.trainer_arguments(config)
        if "callbacks" in arguments:  # the next trial needs new callbacks
            arguments["callbacks"] = try_copy(arguments["callbacks"])
        if arguments["use_gpu"] == "auto" and self.trial_resources is not None:
            # The cluster may have gained GPUs since Tune reserved the resources.
            arguments["use_gpu"] = any("GPU" in b for b in self.trial_resources.bundles)
        return type(self).trainer_cls(**arguments)

    def step(self) -> dict[str, Any]:
        """Call ``override_tune_step``. Without one, train for an epoch and validate if possible.

        ``num_samples`` and ``batch_count`` are those of the validation.
        """
        if (override := type(self).override_tune_step) is not None:
            return override(self.trainer, {"iteration": self.training_iteration})
        return {**self.trainer.train(), **(self.trainer.validate() if self._has_validation else {})}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        self.trainer.save(Path(checkpoint_dir) / _STATE)
        (Path(checkpoint_dir) / _OPTIONS).write_text(json.dumps(self._initial_options))

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Load the output of `save_checkpoint`, perhaps in a trial with another config."""
        self.trainer.load(Path(checkpoint) / _STATE)
        saved = Path(checkpoint) / _OPTIONS
        initial, rescale = self._initial_options, self.trainer._optimizer_options.rescale_options
        loaded = json.loads(saved.read_text()) if saved.exists() else initial
        if loaded != initial:
            self.trainer.apply_all_operators(functools.partial(rescale, loaded, initial))

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.cleanup()
        self.setup(copy.deepcopy(new_config))
        return True

    def cleanup(self) -> None:
        self.trainer.shutdown()

    @classmethod
    def trainer_arguments(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        if not hasattr(cls, "trainer_kwargs"):
            raise TypeError(
                f"{cls.__name__} has no trainer. Pass the result of TorchTrainer.as_trainable(...) "
                "to Tune, or override _create_trainer(self, config)."
            )
        kwargs = cls.trainer_kwargs
        arguments = {name: kwargs.get(name, default) for name, default in cls.defaults.items()}
        for name in cls.defaults.keys() & config.keys():
            value = config[name]
            arguments[name] = plain_int(value.item() if isinstance(value, np.generic) else value)
        return {**kwargs, **arguments, "config": {**(kwargs.get("config") or {}), **config}}


BaseTorchTrainable = BaseTrainable


def trainable_class(
    trainer_cls: type[Any],
    override_tune_step: TuneStep | None,
    trainer_kwargs: Mapping[str, Any],
) -> type[BaseTrainable]:
    """Create the class of the trials of a trainer, the result of its ``as_trainable``."""
    # Tune names folders and trials after the class, and Tuner.restore looks it up by name.
    name = trainer_cls.__name__.removesuffix("Trainer") + "Trainable"
    attributes = {
        "trainer_cls": trainer_cls,
        "trainer_kwargs": dict(trainer_kwargs),
        "override_tune_step": override_tune_step and staticmethod(override_tune_step),
    }
    return type(name, (BaseTrainable,), attributes)
