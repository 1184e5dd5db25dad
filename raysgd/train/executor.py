"""Runs a training function on a group of workers, through losses: the driver's side.

The one loop that runs, loses and restarts is the Controller's. Here is what a training function
adds to it: turns that all workers have to take together, and checkpoints to restart from.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import uuid
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from raysgd.cluster import tasks
from raysgd.cluster import worker_group as core
from raysgd.cluster.call import Call
from raysgd.cluster.controller import Controller
from raysgd.cluster.states import Ready
from raysgd.elastic.config import ElasticConfig
from raysgd.elastic.events import Event
from raysgd.errors import WorkerLostError
from raysgd.train import session
from raysgd.train.arguments import checked_size, pickled_function
from raysgd.train.backend import Backend, BackendConfig, backend_class
from raysgd.train.checkpoint import CheckpointStrategy
from raysgd.train.datasets import Datasets
from raysgd.train.errors import InactiveWorkerGroupError, TrainBackendError, TrainingWorkerError
from raysgd.train.report_queue import Turn
from raysgd.train.run_checkpoints import RunCheckpoints, packed_checkpoint
from raysgd.train.runner import FunctionRunner, Plan
from raysgd.train.worker_group import WorkerGroup, group_options

__all__ = ["BackendExecutor"]

logger = logging.getLogger(__name__)

_SAID = {
    "report": "reported",
    "checkpoint": "saved a checkpoint",
    "end": "returned from the function",
}


class BackendExecutor:
    """Starts workers and a backend, and runs training functions on them.

    Args:
        backend_config: which backend.
        num_workers: how many workers, or ``(min, max)``: as many of them as there is room for.
        num_cpus_per_worker: CPUs that each reserves.
        num_gpus_per_worker: GPUs that each reserves.
        additional_resources_per_worker: further Ray resources of each.
        max_retries: how often workers may be lost in one run before it fails; -1: without end.
        elastic: how to wait for room; its ``in_place`` and ``snapshot_every`` have no meaning here.
        placement_strategy: how Ray places the workers; None for what the environment says.

    Raises:
        TypeError: if `elastic` is no ElasticConfig.
        ValueError: if a number is out of its range, or `elastic` says how many workers there are.
    """

    def __init__(
        self,
        backend_config: BackendConfig,
        num_workers: int | tuple[int, int] = 1,
        num_cpus_per_worker: float = 1,
        num_gpus_per_worker: float = 0,
        additional_resources_per_worker: Mapping[str, float] | None = None,
        max_retries: int = 3,
        *,
        elastic: ElasticConfig | None = None,
        placement_strategy: str | None = None,
    ) -> None:
        fewest, most = checked_size(num_workers)
        if isinstance(max_retries, bool) or not isinstance(max_retries, int) or max_retries < -1:
            raise ValueError(
                f"max_retries={max_retries!r}: must be an int of at least 0, or -1 for no end."
            )
        self._options = group_options(
            most, fewest, num_cpus_per_worker, num_gpus_per_worker, additional_resources_per_worker
        )
        if placement_strategy is not None and self._options.strategy == "PACK":
            self._options = dataclasses.replace(self._options, strategy=placement_strategy)
        self._backend_config = backend_config
        self._backend_cls = backend_class(backend_config)
        self._backend: Backend = self._backend_cls()
        self._max_losses = math.inf if max_retries < 0 else max_retries
        self._max_retries = max_retries
        if not isinstance(elastic, ElasticConfig | None):
            raise TypeError(f"elastic={elastic!r}: must be an ElasticConfig.")
        elastic = elastic or ElasticConfig()
        if elastic.min_workers is not None:
            raise ValueError(
                f"ElasticConfig(min_workers={elastic.min_workers}) is for operators. Pass "
                f"num_workers=({elastic.min_workers}, {most}), the fewest and the most."
            )
        # the run's newest checkpoint is its snapshot
        self._elastic = dataclasses.replace(elastic, in_place=False, snapshot_every="epoch")
        self._controller: Controller | None = None
        self._group: core.WorkerGroup | None = None
        self._datasets = Datasets(None)
        self._checkpoints = RunCheckpoints()
        self._plan: Plan | None = None
        self._values: list[Any] | None = None
        self._paused = False
        self._num_losses = 0
        self._first_event = 0
        self._finalizer: Any = None

    # ---- life

    def start(self, initialization_hook: Callable[[], None] | None = None) -> None:
        """Start the workers and the backend.

        Args:
            initialization_hook: called on every worker before anything else.

        Raises:
            RuntimeError: if they are started already.
            InsufficientResourcesError: if there is no room for them within the start timeout.
            BaseException: what the hook or the backend raised.
        """
        if self.is_started:
            raise RuntimeError("The workers are started already; call shutdown() first.")
        self._group = core.WorkerGroup(self._options)
        own = self._backend_cls
        encodes = own.encode_data is not Backend.encode_data
        runner = FunctionRunner(
            own.share_cuda_visible_devices, own.encode_data if encodes else None
        )
        controller = Controller(
            self._group,
            runner,
            self._backend_config.transport(use_gpu=self._options.num_gpus > 0),
            initialization_hook,
            self._backend_config.timeout,
            self._elastic,
            can_join=False,
        )
        controller.on_start = _telling(weakref.ref(self))
        self._controller = controller
        # also when the executor is dropped without shutdown(), or the driver's script ends
        self._finalizer = weakref.finalize(self, controller.shutdown, force=True)
        try:
            controller.start()
        except BaseException:
            if self._controller is controller:
                self._forget()
            raise

    def _prepare_workers(self) -> None:
        """Set up the backend and hand out the data, on workers that have just started."""
        self._backend.on_start(self.worker_group, self._backend_config)
        self._share_data()

    def shutdown(self, graceful_termination: bool = True, patience_s: float = 5) -> None:
        """End the workers; `start` starts others.

        Args:
            graceful_termination: whether to let backend and workers clean up.
            patience_s: how long they may be busy before that, in seconds: with a method of a class
                of `to_worker_group`, say. Those that still are then are killed.
        """
        controller, gently = self._controller, False
        if controller is None:
            return
        try:
            # what a backend calls on the workers has no bound, and would wait for their work
            gently = graceful_termination and self._is_idle(controller, patience_s)
            if gently:
                self._backend.on_shutdown(self.worker_group, self._backend_config)
        except Exception:
            logger.warning("The backend could not be shut down.", exc_info=True)
        finally:
            controller.shutdown(force=not gently)
            self._forget()

    def _is_idle(self, controller: Controller, patience_s: float) -> bool:
        if self._plan is not None or not isinstance(controller.state, Ready):
            return False
        if tasks.are_idle(controller.members, patience_s):
            return True
        logger.warning("Workers are still busy after %g s, and are killed.", patience_s)
        return False

    def _forget(self) -> None:
        self._controller = self._group = self._plan = None
        self._finalizer.detach()

    @property
    def is_started(self) -> bool:
        """Whether there are workers."""
        return self._controller is not None

    @property
    def is_training(self) -> bool:
        """Whether a function is being trained."""
        return self._plan is not None

    @property
    def worker_group(self) -> WorkerGroup:
        """The workers.

        Raises:
            InactiveWorkerGroupError: if they are not started.
        """
        self._supervised("worker_group")
        assert self._group is not None
        return WorkerGroup.over(self._group)

    @property
    def events(self) -> list[Event]:
        """What happened to the workers since `start`: losses, restarts, growth; oldest first."""
        return [] if self._controller is None else list(self._controller.events)

    # ---- training

    def start_training(
        self,
        train_func: Callable[[], Any],
        run_dir: Path | str | None = None,
        dataset: Any = None,
        checkpoint: Any = None,
        checkpoint_strategy: CheckpointStrategy | None = None,
        latest_checkpoint_id: int | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        experiment: Mapping[str, str] | None = None,
        iteration: int = 0,
    ) -> RunCheckpoints:
        """Start a training function on every worker.

        Args:
            train_func: a function of no arguments.
            run_dir: folder of the run, where checkpoints go; None: none are written.
            dataset: a Ray Dataset, or a dict of them by name; or `Datasets`.
            checkpoint: what to start from: a dict, a Checkpoint, or the path of one.
            checkpoint_strategy: which checkpoints stay on disk.
            latest_checkpoint_id: number of the last checkpoint so far; 0 by default.
            metadata: for ``get_context().get_metadata()``.
            experiment: names for ``get_context()``.
            iteration: reports that were made before.

        Raises:
            InactiveWorkerGroupError: if the workers are not started.
            TrainBackendError: if a function is being trained.
            TrainingWorkerError: if workers are lost more often than ``max_retries``.
        """
        controller = self._supervised("start_training")
        if self._plan is not None:
            raise TrainBackendError(
                "start_training() was called while a function is being trained: call "
                "finish_training() first."
            )
        decodes = self._backend_cls.decode_data is not Backend.decode_data
        checkpoints = RunCheckpoints(
            None if run_dir is None else Path(run_dir) / "checkpoints",
            checkpoint_strategy,
            latest_checkpoint_id or 0,
            self._backend_cls.decode_data if decodes else None,
        )
        checkpoints.blob = packed_checkpoint(checkpoint)
        plan = Plan(
            uuid.uuid4().hex,
            pickled_function(train_func),
            checkpoints.blob,
            iteration,
            dict(metadata or {}),
            dict(experiment or {}),
        )
        datasets = dataset if isinstance(dataset, Datasets) else Datasets(dataset)
        # from here on there is a run: whatever fails must end it
        self._checkpoints, self._datasets, self._plan = checkpoints, datasets, plan
        self._values, self._paused, self._num_losses = None, False, 0
        self._first_event = len(controller.events)
        controller.snapshots.set({"plan": self._plan})
        self._guarded(self._mend)
        self._first_event = len(controller.events)
        self._guarded(self._share_data_once)
        self._call("begin", {"plan": self._plan})
        return self._checkpoints

    def fetch_next_result(self) -> list[dict[str, Any]] | None:
        """Wait until every worker has reported, and return what they did, by rank.

        Checkpoints that are saved on the way are kept. Workers that are lost meanwhile are
        replaced, and the function runs again from the newest checkpoint.

        Returns:
            None when the function has returned on all workers.

        Raises:
            TrainBackendError: if no function is being trained.
            TrainingWorkerError: if workers are lost more often than ``max_retries``.
            RuntimeError: if the workers do not report and save in step.
            BaseException: what the function raised.
        """
        self._check_training("fetch_next_result")
        while self._values is None:
            turns = self._call("next")
            if len({turn.kind for turn in turns}) > 1:
                self._fail()
                raise RuntimeError(_uneven(turns))
            if turns[0].kind == "end":
                self._values = [turn.value for turn in turns]
                return None
            if any(turn.has_checkpoint for turn in turns):
                kept: bool = self._guarded(lambda: self._keep(turns))  # noqa: B023  called at once
                if not kept:
                    continue
            if turns[0].kind == "report" and not self._paused:
                decoded: list[dict[str, Any]] = self._guarded(lambda: self._decoded(turns))  # noqa: B023
                return decoded
        return None

    def pause_reporting(self) -> None:
        """Leave out reports from now on; checkpoints are still kept.

        Raises:
            TrainBackendError: if no function is being trained.
        """
        self._check_training("pause_reporting")
        self._paused = True

    def finish_training(self) -> list[Any]:
        """Wait for the end of the function and return what it returned, by rank.

        Reports that are left are passed over. The workers can train another function then.

        Raises:
            TrainBackendError: if no function is being trained.
            BaseException: as `fetch_next_result`.
        """
        self._check_training("finish_training")
        self.pause_reporting()
        while self.fetch_next_result() is not None:
            pass
        values, self._values, self._plan = self._values, None, None
        self._checkpoints.disk.finish()
        assert values is not None
        return values

    def abort(self) -> None:
        """End the run, if there is one; the workers can train another function."""
        if self._plan is not None:
            self._fail()

    def run(self, train_func: Callable[[], Any]) -> list[Any]:
        """Call a function on every worker, without reports, and return what it returned.

        Raises:
            InactiveWorkerGroupError: if the workers are not started.
            TrainingWorkerError: if a worker is lost; it is not called again.
            BaseException: what the function raised.
        """
        self._supervised("run")
        try:
            if self._plan is None:
                self._mend()
            return self.worker_group.execute(train_func)
        except WorkerLostError as error:
            raise TrainingWorkerError(
                f"A worker was lost in run(), which is not repeated: {error}",
                error.rank,
                error.node_id,
                error.cause,
            ) from error
        except BaseException:
            if self._plan is None and self._controller is not None:
                self._controller.stop("end_run")  # others may wait for the one that failed
            raise

    # ---- checkpoints

    @property
    def latest_checkpoint(self) -> dict[str, Any] | None:
        """The newest checkpoint of the newest run; None where there is none."""
        return self._checkpoints.latest

    @property
    def latest_checkpoint_id(self) -> int:
        """Number of the newest checkpoint."""
        return self._checkpoints.number

    @property
    def latest_checkpoint_dir(self) -> Path | None:
        """Folder of the newest run's checkpoints; None before a run."""
        return self._checkpoints.folder

    @property
    def latest_checkpoint_path(self) -> Path | None:
        """Path of the newest checkpoint on disk; None where there is none."""
        return self._checkpoints.latest_path

    @property
    def best_checkpoint_path(self) -> Path | None:
        """Path of the best checkpoint on disk; None where there is none."""
        return self._checkpoints.best_path

    # ---- helpers

    def _keep(self, turns: list[Turn]) -> bool:
        """Keep the checkpoint of the lowest rank that has one; restart with more if there is room.

        The function is held at its checkpoint meanwhile, so that a restart costs no step of it.

        Returns:
            False where the checkpoint was lost with its worker: the turn will be taken again, by
            the function that starts anew from the checkpoint before.
        """
        controller = self._supervised("fetch_next_result")
        rank = next(rank for rank, turn in enumerate(turns) if turn.has_checkpoint)
        blob = turns[rank].checkpoint
        if blob is None and (blob := self._fetched_checkpoint(rank)) is None:
            return False
        self._checkpoints.keep(turns[rank], blob, len(turns))
        assert self._plan is not None
        self._plan = dataclasses.replace(
            self._plan, checkpoint=self._checkpoints.blob, iteration=turns[rank].iteration
        )
        controller.snapshots.set({"plan": self._plan})
        controller.grow()
        return True

    def _fetched_checkpoint(self, rank: int) -> bytes | None:
        """Return the checkpoint that a worker has handed over; None if it was lost with that."""
        controller = self._supervised("fetch_next_result")
        # no loss is allowed here: the call would be made again, on a worker that has none
        call = Call(method="checkpoint", rank=rank)
        try:
            blob: bytes | None = controller.run(call)[0].value()
        except WorkerLostError:
            self._num_losses += call.num_losses
            if not call.num_losses or self._num_losses > self._max_losses:
                raise
            return None
        return blob

    def _mend(self) -> None:
        """Replace workers that died, and wait for those that are busy with what failed before.

        What was lost between two runs costs neither of them a retry.
        """
        call = Call(method="end_run", max_losses=self._elastic.max_attempts)
        self._supervised("run").run(call)

    def _share_data_once(self) -> None:
        """Hand out the data. If a worker is lost the next call finds that, and starts all anew."""
        try:
            self._share_data()
        except WorkerLostError as error:
            assert self._group is not None
            self._group.members[error.rank].kill_process()  # Ray may have lost sight of it alone

    def _share_data(self) -> None:
        group = self._group
        assert group is not None
        members: list[Any] = group.members
        if not self._datasets:
            shares: list[Any] = [None] * len(members)
        else:
            shares = self._datasets.shared_out([member.actor for member in members])
        references = [
            member.execute(session.receive_shards, share)
            for member, share in zip(members, shares, strict=True)
        ]
        tasks.results(members, references)

    def _call(self, method: str, arguments: dict[str, Any] | None = None) -> list[Any]:
        controller = self._supervised(method)
        call = Call(method=method, arguments=arguments or {}, max_losses=self._max_losses)
        call.num_losses = self._num_losses  # of the whole function; their causes are in the events

        def run() -> list[Any]:
            try:
                return controller.run(call)
            finally:
                self._num_losses = call.num_losses

        return [outcome.value() for outcome in self._guarded(run)]

    def _guarded(self, function: Callable[[], Any]) -> Any:
        """Call a function; where it fails the run is over."""
        try:
            return function()
        except WorkerLostError as error:
            self._fail()
            raise self._lost(error) from error
        except BaseException:
            self._fail()
            raise

    def _fail(self) -> None:
        """End the run; the workers can train another function, with or without a restart."""
        self._plan = self._values = None
        if self._controller is not None:
            self._controller.stop("end_run")

    def _lost(self, error: WorkerLostError) -> TrainingWorkerError:
        causes = [
            f"worker {', '.join(map(str, event.ranks))} on node "
            f"{', '.join(node[:8] for node in event.nodes)}: {event.cause}"
            for event in self.events[self._first_event :]
            if event.kind == "lost"
        ]
        what = str(error).splitlines()[0]
        return TrainingWorkerError(
            "\n".join(
                [
                    f"The training function lost workers {self._num_losses} times, and "
                    f"max_retries={self._max_retries} (max_failures in fit()). {what}",
                    *causes,
                ]
            ),
            error.rank,
            error.node_id,
            error.cause,
        )

    def _decoded(self, turns: list[Turn]) -> list[dict[str, Any]]:
        return [self._backend_cls.decode_data(dict(turn.metrics or {})) for turn in turns]

    def _supervised(self, method: str) -> Controller:
        if self._controller is None:
            raise InactiveWorkerGroupError(
                f"{method}: the workers are not started, or shut down. Call start() first."
            )
        return self._controller

    def _check_training(self, method: str) -> None:
        self._supervised(method)
        if self._plan is None:
            raise TrainBackendError(
                f"{method}() was called while no function is being trained: call "
                "start_training() first."
            )


def _telling(executor: weakref.ref[BackendExecutor]) -> Callable[[], None]:
    """Return a function that prepares workers and does not keep the executor alive."""

    def tell() -> None:
        alive = executor()
        if alive is not None:
            alive._prepare_workers()

    return tell


def _uneven(turns: list[Turn]) -> str:
    said = "; ".join(f"worker {rank} {_SAID[turn.kind]}" for rank, turn in enumerate(turns))
    return (
        f"The workers do not go in step: {said}. Every worker must call report() and "
        "save_checkpoint() equally often and in the same order, also where only the results of "
        "one are used."
    )
