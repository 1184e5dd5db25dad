"""Training functions as trials of Ray Tune.

A trial is a Tune actor in the first bundle of its placement group. The function's workers are in
the other bundles. Each report of worker 0 is one step of the trial. If a checkpoint came with the
report or before it, the step asks Tune to save it. If a checkpoint came after the last report, a
final step repeats that report and asks Tune to save the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
from ray.tune import PlacementGroupFactory, Trainable
from ray.tune.result import DONE, RESULT_DUPLICATE, SHOULD_CHECKPOINT

from raysgd.checkpoint.file import read_pickle, write_pickle
from raysgd.checkpoint.manifest import Manifest
from raysgd.cluster.ray_session import check_runtime_env
from raysgd.trials import CHECKPOINT


class FunctionTrainable(Trainable):
    """A trial that runs a training function."""

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
        self._start_workers()

    def _start_workers(self) -> None:
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
        checkpoints, path = self._executor.checkpoints, Path(checkpoint_dir, CHECKPOINT)
        blob = checkpoints.newest_blob or cloudpickle.dumps(None)
        write_pickle(blob, path, Manifest(global_step=checkpoints.iteration))

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Make the next step start the function from the output of `save_checkpoint`."""
        if self._reports is not None:  # the trial takes over the state of another
            self.cleanup()
            self._start_workers()
        checkpoints = self._executor.checkpoints
        checkpoints.newest_blob, manifest = read_pickle(Path(checkpoint, CHECKPOINT))
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
