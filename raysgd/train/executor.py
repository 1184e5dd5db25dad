"""Runs a training function on a group of workers, through losses: the driver's side.

The one loop that runs, loses and restarts is the Controller's. Here is what a training function
adds to it: turns that all workers have to take together, and checkpoints to restart from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raysgd._internal.arguments import check_hook
from raysgd._internal.context import Request
from raysgd.cluster import function_calls as tasks
from raysgd.cluster import worker_group as core
from raysgd.elastic.call import Call
from raysgd.elastic.config import ElasticConfig
from raysgd.elastic.controller import Controller
from raysgd.elastic.events import Event
from raysgd.elastic.machine import Ready
from raysgd.errors import WorkerLostError
from raysgd.train import session
from raysgd.train.arguments import pickled_function, worker_resources
from raysgd.train.backend import Backend, BackendConfig, backend_class
from raysgd.train.checkpoint import CheckpointStrategy
from raysgd.train.constants import TRAIN_CHECKPOINT_SUBDIR
from raysgd.train.datasets import Datasets
from raysgd.train.errors import InactiveWorkerGroupError, TrainBackendError, TrainingWorkerError
from raysgd.train.report_queue import Turn
from raysgd.train.requests import BeginRequest, CheckpointRequest, EndRunRequest, NextRequest
from raysgd.train.run_checkpoints import RunCheckpoints, packed_checkpoint
from raysgd.train.runner import FunctionRunner
from raysgd.train.session import Plan
from raysgd.train.worker_group import WorkerGroup, group_options

__all__ = ["BackendExecutor", "executor_for"]

logger = logging.getLogger(__name__)

_SAID = {
    "report": "reported",
    "checkpoint": "saved a checkpoint",
    "end": "returned from the function",
}


@dataclass
class _Run:
    """A function that is being trained."""

    plan: Plan
    num_losses: int = 0
    """How often workers were lost in it."""
    causes: list[str] = field(default_factory=list)
    """What each of them was lost by."""
    paused: bool = False
    """Whether reports are left out."""
    values: list[Any] | None = None
    """What the function returned, by rank; None until it has."""


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
        label_selector: what the labels of their nodes have to be.

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
        label_selector: Any = None,
    ) -> None:
        if isinstance(max_retries, bool) or not isinstance(max_retries, int) or max_retries < -1:
            raise ValueError(
                f"max_retries={max_retries!r}: must be an int of at least 0, or -1 for no end."
            )
        self.options = group_options(
            num_workers,
            num_cpus_per_worker,
            num_gpus_per_worker,
            additional_resources_per_worker,
            placement_strategy,
            label_selector,
        )
        """What the workers reserve."""
        self._backend_config = backend_config
        self._backend: Backend = backend_class(backend_config)()
        self._max_losses = math.inf if max_retries < 0 else max_retries
        if not isinstance(elastic, ElasticConfig | None):
            raise TypeError(f"elastic={elastic!r}: must be an ElasticConfig.")
        elastic = elastic or ElasticConfig()
        if elastic.min_workers is not None:
            raise ValueError(
                f"ElasticConfig(min_workers={elastic.min_workers}) is for operators. Pass "
                f"num_workers=({elastic.min_workers}, {self.options.num_workers}), the fewest and "
                "the most."
            )
        # the run's newest checkpoint is its snapshot
        self._elastic = dataclasses.replace(elastic, in_place=False, snapshot_every="epoch")
        self._controller: Controller | None = None
        self._group: core.WorkerGroup | None = None
        self._datasets = Datasets(None)
        self._checkpoints = self._saved = RunCheckpoints()
        self._run: _Run | None = None
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
        check_hook("start", initialization_hook)
        self._group = core.WorkerGroup(self.options)
        controller = Controller(
            self._group,
            FunctionRunner(
                self._backend.share_cuda_visible_devices,
                self._overridden("encode_data"),
                self.options.num_workers if self._elastic.global_batch == "keep" else None,
            ),
            self._backend_config.transport(use_gpu=self.options.num_gpus > 0),
            initialization_hook,
            self._backend_config.timeout,
            self._elastic,
            can_join=False,
        )
        # a proxy, since what refers to the executor here would keep it from being collected
        prepare = BackendExecutor._prepare_workers
        controller.forming.on_start = functools.partial(prepare, weakref.proxy(self))
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
        controller.check_process()
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
        if self._run is not None or not isinstance(controller.state, Ready):
            return False
        if tasks.are_idle(controller.members, patience_s):
            return True
        logger.warning("Workers are still busy after %g s, and are killed.", patience_s)
        return False

    def _forget(self) -> None:
        self._run = self._controller = self._group = None
        self._finalizer.detach()

    @property
    def is_started(self) -> bool:
        """Whether there are workers."""
        return self._controller is not None

    @property
    def is_training(self) -> bool:
        """Whether a function is being trained."""
        return self._run is not None

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
        validation: Any = None,
        metadata: Mapping[str, Any] | None = None,
        experiment: Mapping[str, str] | None = None,
        iteration: int = 0,
        resume: bool = False,
    ) -> RunCheckpoints:
        """Start a training function on every worker.

        Args:
            train_func: a function of no arguments.
            run_dir: folder of the run, where checkpoints go; None: none are written.
            dataset: a Ray Dataset, or a dict of them by name; or `Datasets`.
            checkpoint: what to start from: a dict, a Checkpoint, or the path of one.
            checkpoint_strategy: which checkpoints stay on disk.
            latest_checkpoint_id: number of the last checkpoint so far; 0 by default.
            validation: how to validate checkpoints, a ValidationConfig; None for not.
            metadata: for ``get_context().get_metadata()``.
            experiment: names for ``get_context()``.
            iteration: reports that were made before.
            resume: whether to go on from the newest checkpoint in `run_dir`, where there is one.

        Raises:
            InactiveWorkerGroupError: if the workers are not started.
            TrainBackendError: if a function is being trained.
            TrainingWorkerError: if workers are lost more often than ``max_retries``.
        """
        controller = self._supervised("start_training")
        if self._run is not None:
            raise TrainBackendError(
                "start_training() was called while a function is being trained: call "
                "finish_training() first."
            )
        checkpoints = RunCheckpoints(
            None if run_dir is None else Path(run_dir) / TRAIN_CHECKPOINT_SUBDIR,
            checkpoint_strategy,
            latest_checkpoint_id or 0,
            self._overridden("decode_data"),
            validation,
        )
        if resume and (found := checkpoints.restore()) is not None:
            iteration = found.global_step
            self._saved = checkpoints
        else:
            checkpoints.blob = packed_checkpoint(checkpoint)
        plan = Plan(
            uuid.uuid4().hex,
            pickled_function(train_func),
            checkpoints.blob,
            iteration,
            dict(metadata or {}),
            dict(experiment or {}),
            checkpoints.reported(),
            validation is not None,
        )
        datasets = dataset if isinstance(dataset, Datasets) else Datasets(dataset)
        # from here on there is a run: whatever fails must end it
        self._checkpoints, self._datasets, self._run = checkpoints, datasets, _Run(plan)
        with self._ending_on_failure(self._run):
            controller.snapshots.set({"plan": plan})
            self._mend()
            self._share_data_once()
            self._call(BeginRequest(plan=plan))
        return checkpoints

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
        run = self._training("fetch_next_result")
        with self._ending_on_failure(run):
            while run.values is None:
                turns: list[Turn] = self._call(NextRequest(reported=self._checkpoints.news()))
                if len({turn.kind for turn in turns}) > 1:
                    raise RuntimeError(_uneven(turns))
                if turns[0].kind == "end":
                    run.values = [turn.value for turn in turns]
                elif self._is_kept(run, turns) and turns[0].kind == "report" and not run.paused:
                    decode = self._backend.decode_data
                    return [decode(turn.metrics) for turn in turns]
        return None

    def pause_reporting(self) -> None:
        """Leave out reports from now on; checkpoints are still kept.

        Raises:
            TrainBackendError: if no function is being trained.
        """
        self._training("pause_reporting").paused = True

    def finish_training(self) -> list[Any]:
        """Wait for the end of the function and return what it returned, by rank.

        Reports that are left are passed over. The workers can train another function then.

        Raises:
            TrainBackendError: if no function is being trained.
            BaseException: as `fetch_next_result`.
        """
        run = self._training("finish_training")
        run.paused = True
        while run.values is None:
            self.fetch_next_result()
        self._run = None
        self._checkpoints.finish()
        return run.values

    def abort(self) -> None:
        """End the run, if there is one; the workers can train another function."""
        if self._run is not None:
            self._run = None
            self._checkpoints.abort()
            self._supervised("abort").stop(EndRunRequest())

    def run(self, train_func: Callable[[], Any]) -> list[Any]:
        """Call a function on every worker, without reports, and return what it returned.

        Raises:
            InactiveWorkerGroupError: if the workers are not started.
            TrainingWorkerError: if a worker is lost; it is not called again.
            BaseException: what the function raised.
        """
        self._supervised("run")
        try:
            if self._run is None:
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
            if self._run is None and self._controller is not None:
                self._controller.stop(EndRunRequest())  # others may wait for the one that failed
            raise

    # ---- checkpoints

    @property
    def latest_checkpoint(self) -> dict[str, Any] | None:
        """The newest checkpoint, of the newest run that has saved one; None if none has."""
        return self._saved.latest

    @property
    def latest_checkpoint_id(self) -> int:
        """Number of the newest checkpoint."""
        return self._checkpoints.number

    @property
    def latest_checkpoint_dir(self) -> Path | None:
        """Folder of the newest run's checkpoints; None where there are none on disk."""
        folder = self._checkpoints.folder
        return folder if folder is not None and folder.is_dir() else None

    @property
    def latest_checkpoint_path(self) -> Path | None:
        """Path of the newest checkpoint on disk, of the same run; None if there is none."""
        return self._saved.latest_path

    @property
    def best_checkpoint_path(self) -> Path | None:
        """Path of the best checkpoint on disk, of the same run; None if there is none."""
        return self._saved.best_path

    # ---- helpers

    def _is_kept(self, run: _Run, turns: list[Turn]) -> bool:
        """Keep the checkpoint of the lowest rank that has one; restart with more if there is room.

        The function is held at its checkpoint meanwhile, so that a restart costs no step of it.

        Returns:
            False where the checkpoint was lost with its worker: the turn will be taken again, by
            the function that starts anew from the checkpoint before.
        """
        rank = next((rank for rank, turn in enumerate(turns) if turn.has_checkpoint), None)
        if rank is None:
            return True
        controller, turn = self._supervised("fetch_next_result"), turns[rank]
        blob = turn.checkpoint
        if blob is None:  # only worker 0 sends its own with the turn
            blob = next(filter(None, self._call(CheckpointRequest(rank=rank))), None)
        if blob is None:
            return False
        self._checkpoints.keep(turn, blob, len(turns))
        self._saved = self._checkpoints
        run.plan = dataclasses.replace(
            run.plan,
            checkpoint=self._checkpoints.blob,
            iteration=turn.iteration,
            reported=self._checkpoints.reported(),
        )
        controller.snapshots.set({"plan": run.plan})
        controller.grow()
        return True

    def _mend(self) -> None:
        """Replace workers that died, and wait for those that are busy with what failed before.

        What was lost between two runs costs neither of them a retry.
        """
        call = Call(request=EndRunRequest(), max_losses=self._elastic.max_attempts)
        self._supervised("run").run(call)

    def _share_data_once(self) -> None:
        """Hand out the data. If a worker is lost the next call finds that, and starts all anew."""
        try:
            self._share_data()
        except WorkerLostError as error:
            assert self._group is not None
            self._group.members[error.rank].kill_process()  # Ray may have lost sight of it alone

    def _share_data(self) -> None:
        assert self._group is not None
        members: list[Any] = self._group.members
        shares = self._datasets.shared_out([member.actor for member in members])
        references = [
            member.execute(session.receive_shards, share)
            for member, share in zip(members, shares, strict=True)
        ]
        tasks.results(members, references)

    def _call(self, request: Request) -> list[Any]:
        """Make a request to all runners; losses are counted over the calls of a run."""
        run = self._training(request.name)
        call = Call(
            request=request,
            max_losses=self._max_losses,
            num_losses=run.num_losses,
            causes=run.causes,
        )
        try:
            outcomes = self._supervised(request.name).run(call)
        finally:
            run.num_losses = call.num_losses
        return [outcome.value() for outcome in outcomes]

    @contextlib.contextmanager
    def _ending_on_failure(self, run: _Run) -> Iterator[None]:
        """End the run where what is within fails."""
        try:
            yield
        except BaseException as error:
            self.abort()
            if not isinstance(error, WorkerLostError):
                raise
            raise TrainingWorkerError(
                f"The training function lost workers {run.num_losses} times, and max_retries="
                f"{self._max_losses} (max_failures in fit()). {error}",
                error.rank,
                error.node_id,
                error.cause,
            ) from error

    def _overridden(self, name: str) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
        """Return a method of the user's backend; None where it is the one that does nothing."""
        own = getattr(self._backend, name)
        return None if own is getattr(Backend, name) else own

    def _supervised(self, method: str) -> Controller:
        if self._controller is None:
            raise InactiveWorkerGroupError(
                f"{method}: the workers are not started, or shut down. Call start() first."
            )
        self._controller.check_process()
        return self._controller

    def _training(self, method: str) -> _Run:
        self._supervised(method)
        if self._run is None:
            raise TrainBackendError(
                f"{method}() was called while no function is being trained: call "
                "start_training() first."
            )
        return self._run


def executor_for(config: BackendConfig, scaling: Any, failure: Any) -> BackendExecutor:
    """Return an executor that is not started, by a ScalingConfig and a FailureConfig.

    Ray's own of these names are taken as well; None for `failure` allows no loss.
    """
    num_cpus, num_gpus, others = worker_resources(
        getattr(scaling, "use_gpu", False), getattr(scaling, "resources_per_worker", None)
    )
    return BackendExecutor(
        config,
        scaling.num_workers,
        num_cpus,
        num_gpus,
        others,
        getattr(failure, "max_failures", 0),
        elastic=getattr(failure, "elastic", None),
        placement_strategy=getattr(scaling, "placement_strategy", None),
        label_selector=getattr(scaling, "label_selector", None),
    )


def _uneven(turns: list[Turn]) -> str:
    said = "; ".join(f"worker {rank} {_SAID[turn.kind]}" for rank, turn in enumerate(turns))
    return (
        f"The workers do not go in step: {said}. Every worker must call report() and "
        "save_checkpoint() equally often and in the same order, also where only the results of "
        "one are used."
    )
