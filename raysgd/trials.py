"""Trainers and training functions as trials of Ray Tune: the results of ``as_trainable``."""

import copy
import json
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle
import numpy as np

from raysgd._internal.arguments import plain_int
from raysgd._internal.nested import try_copy
from raysgd.checkpoint.file import read_pickle, write_pickle
from raysgd.checkpoint.manifest import Manifest
from raysgd.cluster.ray_session import check_runtime_env
from raysgd.loop.operator_base import has_validation_loader

try:
    from ray.tune import PlacementGroupFactory, Trainable
    from ray.tune.result import DONE, RESULT_DUPLICATE, SHOULD_CHECKPOINT
except ImportError as error:
    raise RuntimeError(
        f'as_trainable() needs Ray Tune: pip install "raysgd[tune]" ({error})'
    ) from error

_STATE = "trainer.checkpoint"
_HYPERPARAMETERS = "optimizer_options.json"
_FUNCTION_STATE = "checkpoint"
"""Files in the checkpoint of a trial."""

TuneStep = Callable[[Any, dict[str, Any]], dict[str, Any]]


class BaseTrainable(Trainable):
    """A trial that trains with ``self.trainer``. `trainable_class` sets the class of the trainer.

    A trial is a Tune actor that reserves nothing and contains the trainer. Each worker has a bundle
    of the trial's placement group. With ``use_local=True`` the actor is worker 0.

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
        self._initial_hyperparameters = apply(lambda op: op._initial_hyperparameters())[0]

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
        saved = Path(checkpoint_dir) / _HYPERPARAMETERS
        saved.write_text(json.dumps(self._initial_hyperparameters))

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Load the output of `save_checkpoint`, perhaps in a trial with another config."""
        self.trainer.load(Path(checkpoint) / _STATE)
        saved = Path(checkpoint) / _HYPERPARAMETERS
        now = self._initial_hyperparameters
        then = json.loads(saved.read_text()) if saved.exists() else now
        if then != now:
            self.trainer.apply_all_operators(lambda op: op._rescale_hyperparameters(then, now))

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


class FunctionTrainable(Trainable):
    """A trial that runs a training function.

    A trial is a Tune actor in the first bundle of its placement group. The function's workers are
    in the other bundles. Each report of worker 0 is one step of the trial. If a checkpoint came
    with the report or before it, the step asks Tune to save it. If a checkpoint came after the last
    report, a final step repeats that report and asks Tune to save the checkpoint.
    """

    trial_trainer: Callable[[Mapping[str, Any]], Any]
    """Returns the trainer for the config of a trial. A subclass sets it."""

    # ---- methods that Tune calls

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> PlacementGroupFactory:
        """Return the resources of a trial: its workers, and one CPU for its own process."""
        check_runtime_env("env_vars")
        workers = cls.trial_trainer(config).create_executor().options
        bundles: list[dict[str, float]] = [{"CPU": 1}, *([workers.bundle] * workers.num_workers)]
        return PlacementGroupFactory(bundles, strategy=workers.placement_strategy)

    def setup(self, config: dict[str, Any]) -> None:
        """Start the workers. The first `step` starts the function, because Tune may load first."""
        self._trainer = self.trial_trainer(config)
        self._trainer.setup()
        self._last_report: dict[str, Any] = {}
        self._executor = self._trainer.create_executor()
        self._executor.start()
        self._reports: Generator[list[dict[str, Any]]] | None = None

    def step(self) -> dict[str, Any]:
        """Wait for the next reports, and return the report of worker 0."""
        if self._reports is None:
            checkpoints, state = self._executor.checkpoints, self._executor.latest_checkpoint
            start: dict[str, Any] = {} if state is None else {"checkpoint": state}
            start |= {"iteration": checkpoints.iteration, "name": self.trial_name or ""}
            self._reports = self._trainer.reports(self._executor, Path(self.logdir or ""), **start)
        number = self._executor.latest_checkpoint_id
        results = next(self._reports, None)
        saved = {SHOULD_CHECKPOINT: True} if number != self._executor.latest_checkpoint_id else {}
        if results is None:
            # Tune ignores the checkpoint of a result that is marked as a duplicate. Without any
            # report, there is no result to duplicate.
            if saved or not (self._last_report or self._executor.checkpoints.iteration):
                return {**self._last_report, DONE: True, **saved}
            return {RESULT_DUPLICATE: True, DONE: True}
        self._last_report = results[0]
        return {**self._last_report, **saved}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        checkpoints, path = self._executor.checkpoints, Path(checkpoint_dir, _FUNCTION_STATE)
        blob = checkpoints.newest_blob or cloudpickle.dumps(None)
        write_pickle(blob, path, Manifest(global_step=checkpoints.iteration))

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Make the next step start the function from the output of `save_checkpoint`."""
        if self._reports is not None:  # the trial takes over the state of another
            self.reset_config(self.config)
        checkpoints = self._executor.checkpoints
        checkpoints.newest_blob, manifest = read_pickle(Path(checkpoint, _FUNCTION_STATE))
        checkpoints.iteration = 0 if manifest is None else manifest.global_step

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.cleanup()
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        try:
            if self._reports is not None:
                self._reports.close()
        finally:
            self._executor.shutdown(graceful_termination=False)
