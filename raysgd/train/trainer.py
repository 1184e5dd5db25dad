"""The trainer of Ray 1.7 to 1.13, with the methods start, run, and shutdown."""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from raysgd._internal.forwarding import forward_to
from raysgd._internal.tracebacks import fold_tracebacks
from raysgd.elastic.config import ElasticConfig
from raysgd.train.arguments import bind_config, make_folder, new_folder, run_folder
from raysgd.train.backend import BackendConfig, as_backend_config
from raysgd.train.callbacks.callback import TrainingCallback, TrainingCallbackList
from raysgd.train.checkpoint import CheckpointStrategy, load_checkpoint_from_path
from raysgd.train.configs import FailureConfig, RunConfig, ScalingConfig, executor_arguments
from raysgd.train.data_parallel_trainer import DataParallelTrainer, function_trainable
from raysgd.train.executor import BackendExecutor
from raysgd.train.worker_group import TrainWorkerGroup

__all__ = ["TrainWorkerGroup", "Trainer", "TrainingIterator"]


def _forward_to_executor(name: str) -> Any:
    """Return a property of the trainer: a property of its executor."""
    return forward_to(f"_executor.{name}", getattr(BackendExecutor, name).__doc__)


@fold_tracebacks
class Trainer:
    """Runs training functions on a group of workers.

    Runs on the driver::

        trainer = Trainer("torch", num_workers=2)
        trainer.start()
        results = trainer.run(train_func, config={"lr": 0.1})
        trainer.shutdown()

    If a worker or node is lost, all workers restart and run the function again.
    `raysgd.train.load_checkpoint` returns the newest checkpoint to continue from.

    Each run has a new folder in `logdir`: ``run_001``, ``run_002``, and so on.

    Args:
        backend: "torch", "tensorflow", "horovod", or a BackendConfig.
        num_workers: number of workers. With ``(min, max)``, as many workers start as fit, and fewer
            after a loss. If room becomes free, the run restarts with more at its next checkpoint.
        use_gpu: whether each worker reserves a GPU.
        resources_per_worker: resources of each worker; ``CPU`` and ``GPU`` replace the default of
            one each.
        logdir: folder for the runs; None for ``~/ray_results/train_<date>``. A relative path starts
            in ``~/ray_results``.
        max_retries: how often a run may lose workers; -1: no limit.
        elastic: how to wait for resources, see :class:`raysgd.ElasticConfig`.
    """

    def __init__(
        self,
        backend: str | BackendConfig,
        num_workers: int | tuple[int, int] = 1,
        use_gpu: bool = False,
        resources_per_worker: Mapping[str, float] | None = None,
        logdir: str | os.PathLike[str] | None = None,
        max_retries: int = 3,
        *,
        elastic: ElasticConfig | None = None,
    ) -> None:
        self._config = as_backend_config(backend)
        self._scaling = ScalingConfig(num_workers, use_gpu, resources_per_worker)
        self._failure = FailureConfig(max_retries, elastic)
        arguments = executor_arguments(self._scaling, self._failure)
        self._executor = BackendExecutor(self._config, **arguments)
        self.latest_run_dir: Path | None = None
        """Folder of the newest run; None before the first run."""
        self.logdir = run_folder("train", logdir)
        if logdir is None:
            self.logdir = make_folder(self.logdir)  # another trainer may use the same name
        else:
            self.logdir.mkdir(parents=True, exist_ok=True)

    # ---- lifecycle

    def start(self, initialization_hook: Callable[[], None] | None = None) -> None:
        """Start the workers and the backend. Each worker first calls the hook.

        Raise InsufficientResourcesError if the cluster has no room for the workers within 100 s
        (``TRAIN_PLACEMENT_GROUP_TIMEOUT_S``).
        """
        self._executor.start(initialization_hook)

    def shutdown(self) -> None:
        """Stop the workers and release their resources. You can call `start` again afterwards."""
        self._executor.shutdown()

    # ---- runs

    def run(
        self,
        train_func: Callable[..., Any],
        config: dict[str, Any] | None = None,
        callbacks: Sequence[TrainingCallback] | None = None,
        dataset: Any = None,
        checkpoint: Any = None,
        checkpoint_strategy: CheckpointStrategy | None = None,
    ) -> list[Any]:
        """Run a training function on every worker, and return its results by rank.

        Raise the exception of the function, with the worker's traceback as its cause. Raise
        RuntimeError if the trainer is not started, if workers are lost more often than
        `max_retries` allows, or if they do not report and save in step.

        Args:
            train_func: a function of no argument, or of the config.
            config: the config; None for an empty dict.
            callbacks: callbacks that receive the reports of the workers.
            dataset: a Ray Dataset, or a dict of Datasets by name. Each worker gets an equal shard
                (`raysgd.train.get_dataset_shard`).
            checkpoint: checkpoint to start from: a dict, or the path of a checkpoint.
            checkpoint_strategy: which checkpoints stay on disk; by default all.
        """
        callback_list = TrainingCallbackList(callbacks)
        reports = self.run_iterator(train_func, config, dataset, checkpoint, checkpoint_strategy)
        assert self.latest_run_dir is not None
        with self._executor.abort_on_error(), callback_list.run(self.latest_run_dir, config or {}):
            for each in reports:
                callback_list.handle(each)
        return reports.get_final_results() or []

    def run_iterator(
        self,
        train_func: Callable[..., Any],
        config: dict[str, Any] | None = None,
        dataset: Any = None,
        checkpoint: Any = None,
        checkpoint_strategy: CheckpointStrategy | None = None,
    ) -> TrainingIterator:
        """Return an iterator over the reports of the workers. Its first step starts the function.

        The arguments are the same as in `run`. The iterator raises errors of the run. The next run
        ends this run.
        """
        function = bind_config(train_func, config)
        if not self._executor.is_started:
            raise RuntimeError("The trainer is not started. Call start() first.")
        self._executor.abort()
        folder = new_folder(self.logdir, (f"run_{number:03d}" for number in itertools.count(1)))
        self.latest_run_dir = folder
        self._executor.start_training(function, folder, dataset, checkpoint, checkpoint_strategy)
        return TrainingIterator(self._executor)

    def to_worker_group(self, train_cls: type[Any], *args: Any, **kwargs: Any) -> TrainWorkerGroup:
        """Create an object of a class on every worker, with the backend set up.

        Return the objects by rank. ``workers[0].method.remote(...)`` returns a reference for
        ``ray.get``. The objects live until the trainer shuts down. This method starts the trainer
        if necessary.
        """
        if not self._executor.is_started:
            self._executor.start()
        return TrainWorkerGroup(self._executor, train_cls, args, kwargs)

    def to_tune_trainable(self, train_func: Callable[..., Any], dataset: Any = None) -> type[Any]:
        """Return a class of trials for Ray Tune. Each trial runs the function on its own workers.

        The reports of worker 0 are the results of a trial. The function gets the trial's config.
        The trainer must not be started.
        """
        if self._executor.is_started:
            raise RuntimeError(
                "to_tune_trainable() needs a trainer that is not started, because each trial "
                "starts its own workers. Call shutdown() first."
            )
        trainer = DataParallelTrainer(
            train_func,
            backend_config=self._config,
            scaling_config=self._scaling,
            run_config=RunConfig(failure_config=self._failure),
            dataset_config={"*": True},
        )
        trainer.datasets = dataset  # it may be a single dataset, without a name
        name = getattr(train_func, "__name__", "train_func")
        return function_trainable(name, trainer.with_config)

    # ---- results

    latest_checkpoint = _forward_to_executor("latest_checkpoint")
    latest_checkpoint_dir = _forward_to_executor("latest_checkpoint_dir")
    latest_checkpoint_path = _forward_to_executor("latest_checkpoint_path")

    def get_latest_checkpoint(self) -> Any:
        """Return ``latest_checkpoint``. Older name."""
        return self.latest_checkpoint

    best_checkpoint_path = _forward_to_executor("best_checkpoint_path")
    events = _forward_to_executor("events")
    load_checkpoint_from_path = staticmethod(load_checkpoint_from_path)

    @property
    def best_checkpoint(self) -> dict[str, Any] | None:
        """The best checkpoint of the newest run; None if no checkpoint is on disk."""
        path = self.best_checkpoint_path
        return None if path is None else self.load_checkpoint_from_path(path)


class TrainingIterator(Iterator[list[dict[str, Any]]]):
    """Yields the reports of all workers: a list of dicts, by rank."""

    def __init__(self, executor: BackendExecutor) -> None:
        self._executor = executor
        self._checkpoints = executor.checkpoints  # each run has its own
        self._results: list[Any] | None = None
        self._reports = self._generate()

    def _generate(self) -> Generator[list[dict[str, Any]]]:
        while not self._is_replaced() and (reports := self._executor.fetch_next_result()):
            yield reports
        if self._is_replaced():
            raise RuntimeError(
                "Another run of the trainer has ended this iterator. Finish an iterator before the "
                "next run, or call get_final_results(force=True)."
            )
        self._results = self._executor.finish_training()

    def _is_replaced(self) -> bool:
        return self._executor.checkpoints is not self._checkpoints

    def __next__(self) -> list[dict[str, Any]]:
        """Wait for the next reports. Raise the exception of the function if it fails."""
        return next(self._reports)

    def is_finished(self) -> bool:
        """Return whether the run has ended, with or without an error."""
        is_closed = inspect.getgeneratorstate(self._reports) == inspect.GEN_CLOSED
        return is_closed or self._is_replaced()

    def get_final_results(self, force: bool = False) -> list[Any] | None:
        """Return the results of the function by rank; None before the run has finished.

        `force` finishes the run now and skips further reports.
        """
        if force and not self.is_finished():
            self._reports.close()
            self._results = self._executor.finish_training()
        return self._results
