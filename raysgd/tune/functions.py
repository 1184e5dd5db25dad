"""Training functions as trials of Ray Tune.

A trial is an actor of Tune's, in the first bundle of its placement group; the function's workers
are in the others. One step of the trial is one report of worker 0; where a checkpoint came with
it, or before it, Tune is asked to keep that.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from ray.tune import PlacementGroupFactory, Trainable
from ray.tune.result import DONE, RESULT_DUPLICATE, SHOULD_CHECKPOINT

from raysgd.checkpoint.manifest import Manifest
from raysgd.checkpoint.pickled import read_pickle, write_pickle
from raysgd.train.arguments import worker_resources
from raysgd.train.backend import BackendConfig, checked_config
from raysgd.train.checkpoint import Checkpoint
from raysgd.train.configs import FailureConfig, RunConfig, ScalingConfig, checked_scaling
from raysgd.train.data_parallel_trainer import DataParallelTrainer
from raysgd.train.run_checkpoints import packed_checkpoint

__all__ = ["FunctionTrainable", "function_trainable", "trainer_trainable"]

_STATE = "function.checkpoint"
_NOTHING = pickle.dumps(None)


class FunctionTrainable(Trainable):
    """A trial that runs a training function. `trainer_trainable` fills in which one."""

    trainer: ClassVar[DataParallelTrainer]

    @classmethod
    def trial_trainer(cls, config: Mapping[str, Any]) -> DataParallelTrainer:
        """Return the trainer with a trial's config."""
        trainer = cls.trainer.with_config(config.get("train_loop_config", {}))
        if (scaling := config.get("scaling_config")) is not None:
            trainer.scaling_config = checked_scaling(scaling)
        return trainer

    # ---- what Tune calls

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> PlacementGroupFactory:
        """Return the room of a trial: its workers, and a CPU for its own process."""
        scaling = cls.trial_trainer(config).scaling_config
        num_cpus, num_gpus, others = worker_resources(scaling.use_gpu, scaling.resources_per_worker)
        bundle = {"CPU": num_cpus, "GPU": num_gpus, **others}
        bundle = {name: amount for name, amount in bundle.items() if amount}
        most = scaling.num_workers
        most = most if isinstance(most, int) else most[1]
        return PlacementGroupFactory([{"CPU": 1}, *([bundle] * most)], strategy="PACK")

    def setup(self, config: dict[str, Any]) -> None:
        """Start the workers; the function starts with the first step, when it is loaded."""
        self._own = self.trial_trainer(config)
        self._own.setup()
        self._executor = self._own.executor()
        self._executor.start()
        self._checkpoints: Any = None
        self._saved = 0
        self._start: Any = None
        self._reported = 0

    def step(self) -> dict[str, Any]:
        """Wait for the next report, and return worker 0's."""
        if self._checkpoints is None:
            self._checkpoints = self._own.start_on(
                self._executor,
                None,
                iteration=self._reported,
                experiment={
                    "name": self.trial_name or "",
                    "trial_name": self.trial_name or "",
                    "trial_id": self.trial_id or "",
                    "dir": self.logdir or "",
                },
                checkpoint=self._start,
            )
            self._saved = self._checkpoints.number
        results = self._executor.fetch_next_result()
        is_new = self._checkpoints.number != self._saved
        self._saved = self._checkpoints.number
        if results is None:
            self._executor.finish_training()
            # it stands for the result before, of which there is none where nothing was reported
            last = {RESULT_DUPLICATE: True} if self._reported else {}
            return {**last, DONE: True, **({SHOULD_CHECKPOINT: True} if is_new else {})}
        self._reported += 1
        return {**results[0], **({SHOULD_CHECKPOINT: True} if is_new else {})}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Save the function's newest checkpoint."""
        blob = self._executor_blob()
        manifest = Manifest(global_step=self._reported)
        write_pickle(blob or _NOTHING, Path(checkpoint_dir) / _STATE, manifest)

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Start the function, in the next step, from what `save_checkpoint` wrote."""
        blob, manifest = read_pickle(Path(checkpoint) / _STATE)
        self._reported = 0 if manifest is None else manifest.global_step
        self._start = None if blob == _NOTHING else Checkpoint(blob=blob)
        if self._checkpoints is not None:  # a trial that takes over another's state
            self._restart_workers()

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Go on as another trial, with new workers in the same room."""
        self.cleanup()
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        """End the workers."""
        self._executor.shutdown(graceful_termination=False)

    def _executor_blob(self) -> bytes | None:
        if self._checkpoints is not None and self._checkpoints.blob is not None:
            blob: bytes = self._checkpoints.blob
            return blob
        return packed_checkpoint(self._start)

    def _restart_workers(self) -> None:
        self._executor.shutdown(graceful_termination=False)
        self._executor = self._own.executor()
        self._executor.start()
        self._checkpoints = None


def trainer_trainable(trainer: DataParallelTrainer) -> type[FunctionTrainable]:
    """Make a Trainable class for a trainer."""

    class TrainerTrainable(FunctionTrainable):
        pass

    TrainerTrainable.trainer = trainer
    # Tune names folders and trials after it, and finds it again by its name on Tuner.restore
    TrainerTrainable.__name__ = TrainerTrainable.__qualname__ = type(trainer).__name__
    return TrainerTrainable


def function_trainable(
    arguments: Mapping[str, Any], train_func: Callable[..., Any], dataset: Any
) -> type[FunctionTrainable]:
    """Make a Trainable class for ``Trainer(**arguments)`` and a function; the older API.

    All of a trial's config is the function's.
    """
    config: BackendConfig = checked_config(arguments["backend"])
    named = dataset if isinstance(dataset, Mapping) else {"": dataset}
    trainer = DataParallelTrainer(
        train_func,
        backend_config=config,
        scaling_config=ScalingConfig(
            num_workers=arguments["num_workers"],
            use_gpu=arguments["use_gpu"],
            resources_per_worker=arguments["resources_per_worker"] or None,
        ),
        run_config=RunConfig(
            failure_config=FailureConfig(arguments["max_retries"], arguments["elastic"])
        ),
        datasets=named if dataset is not None else None,
        dataset_config=dict.fromkeys(named, True),
    )
    if dataset is not None and not isinstance(dataset, Mapping):
        trainer.datasets = dataset

    class TrainFunctionTrainable(FunctionTrainable):
        @classmethod
        def trial_trainer(cls, config: Mapping[str, Any]) -> DataParallelTrainer:
            return cls.trainer.with_config(config)

    TrainFunctionTrainable.trainer = trainer
    name = getattr(train_func, "__name__", "train_func")
    TrainFunctionTrainable.__name__ = TrainFunctionTrainable.__qualname__ = name
    return TrainFunctionTrainable
