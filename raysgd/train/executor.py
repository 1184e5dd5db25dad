"""Starts workers and a backend, and runs training functions on them, one after the other.

The snapshot of a run has its newest checkpoint, and its ``global_step`` is its number of reports.
"""

import contextlib
import logging
import math
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cloudpickle

from raysgd._internal.arguments import as_int, check_function
from raysgd._internal.forwarding import forward_to
from raysgd._internal.runner import Request
from raysgd.cluster import remote_functions
from raysgd.cluster.actor_group import ActorGroup
from raysgd.elastic.call import Call, LoadRequest
from raysgd.elastic.config import ElasticConfig, as_elastic_config
from raysgd.elastic.controller import Controller
from raysgd.elastic.events import Event
from raysgd.errors import WorkerLostError
from raysgd.loop.requests import ApplyRequest
from raysgd.train.arguments import pickle_function
from raysgd.train.backend import (
    Backend,
    BackendConfig,
    InactiveWorkerGroupError,
    TrainBackendError,
    backend_class,
)
from raysgd.train.checkpoint import Checkpoint, CheckpointStrategy, RunCheckpoints
from raysgd.train.constants import TRAIN_CHECKPOINT_SUBDIR
from raysgd.train.datasets import Datasets
from raysgd.train.function_runner import EndRunRequest, FunctionRunner, NextResultRequest
from raysgd.train.result_queue import GrowthPolicy, TrainingResult, check_in_step
from raysgd.train.worker_group import WorkerGroup, group_options
from raysgd.train.worker_session import RunSpec

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Run:
    """The training function that is running."""

    controller: Controller
    spec: RunSpec
    checkpoints: RunCheckpoints
    datasets: Datasets
    call: Call
    """Its `losses` counts the losses of workers over all requests of the run."""
    skips_reports: bool = False
    """Whether to skip reports."""
    growth_policy: GrowthPolicy = field(default_factory=GrowthPolicy)
    return_values: list[Any] | None = None
    """The results of the function by rank; None until it has returned."""

    def start_state(self) -> dict[str, Any]:
        """Return the state of each start: the fields of the spec, with the newest checkpoint."""
        blob, iteration = self.checkpoints.newest_blob, self.checkpoints.iteration
        return vars(replace(self.spec, checkpoint=blob, iteration=iteration))

    def send(self, request: Request) -> list[Any]:
        """Return the answers of the workers by rank."""
        return self.controller.run(replace(self.call, request=request))

    def begin(self) -> None:
        """Send the function and the data to all workers."""
        try:
            self.datasets.send(self.controller.members)
        except WorkerLostError as error:
            # If only the connection is lost, kill the process. The next call restarts it.
            self.controller.members[error.rank].kill_process()
        self.send(LoadRequest(state=self.start_state()))


class BackendExecutor:
    """Starts workers and a backend, and runs training functions on them.

    Methods that need the workers raise InactiveWorkerGroupError before `start` and after
    `shutdown`. Methods of training raise TrainBackendError if they are called out of order.

    Arguments are those of :class:`raysgd.train.Trainer` and :class:`raysgd.train.ScalingConfig`.
    ``snapshot_every`` of `elastic` is ignored.
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
        max_retries = as_int("BackendExecutor", "max_retries", max_retries, -1)
        self.options = group_options(
            num_workers,
            num_cpus_per_worker,
            num_gpus_per_worker,
            additional_resources_per_worker,
            placement_strategy,
        )
        self._backend_config = backend_config
        self._backend: Backend = backend_class(backend_config)()
        self._max_retries = math.inf if max_retries < 0 else max_retries
        elastic = as_elastic_config("BackendExecutor", elastic)
        self._elastic = replace(elastic, snapshot_every="auto")
        self._controller: Controller | None = None
        self._workers: WorkerGroup | None = None
        self.checkpoints = self._earlier_checkpoints = RunCheckpoints()
        """Those of the newest run. `_earlier_checkpoints` are those of the newest run with one."""
        self._run: _Run | None = None
        self._finalizer: Any = None

    # ---- lifecycle

    def start(self, initialization_hook: Callable[[], None] | None = None) -> None:
        """Start the workers and the backend. Each worker first calls the hook."""
        if self.is_started:
            raise RuntimeError("The workers are already started. Call shutdown() first.")
        if initialization_hook is not None:
            check_function("start", "initialization_hook", initialization_hook)
        group = ActorGroup(self.options)
        self._workers = WorkerGroup.view_of(group)
        proxy = weakref.proxy(self)  # a reference would keep the executor from being collected
        self._controller = controller = Controller(
            group,
            FunctionRunner(self._backend.share_cuda_visible_devices),
            self._backend_config.collective_backend(use_gpu=self.options.num_gpus > 0),
            initialization_hook,
            self._backend_config.timeout_s,
            self._elastic,
            supports_live_join=False,
            on_start=lambda: proxy._prepare_workers(),
        )
        # Shut down even if the script never calls shutdown().
        self._finalizer = weakref.finalize(self, controller.shutdown, force=True)
        try:
            controller.start()
        except BaseException:
            self._forget()
            raise

    def _prepare_workers(self) -> None:
        """Set up the backend and share the data on workers that have just started."""
        self._backend.on_start(self.worker_group, self._backend_config)
        if self._run is not None:
            self._run.growth_policy.forget_checkpoint()
            self._run.datasets.send(self._run.controller.members)

    def shutdown(self, graceful_termination: bool = True, patience_s: float = 5) -> None:
        """Stop the workers. You can call `start` again afterwards.

        With `graceful_termination`, backend and workers clean up. Busy workers have `patience_s`
        seconds to finish.
        """
        controller, is_gentle = self._controller, False
        if controller is None:
            return
        controller.check_process()
        try:
            if graceful_termination and self._run is None and controller.group_status == "ready":
                # The `on_shutdown` hook of the backend would wait for busy workers forever.
                is_gentle = remote_functions.wait_until_idle(controller.members, patience_s)
            if is_gentle:
                self._backend.on_shutdown(self.worker_group, self._backend_config)
        except Exception:
            logger.warning("%s.on_shutdown failed.", type(self._backend).__name__, exc_info=True)
        finally:
            controller.shutdown(force=not is_gentle)
            self._forget()

    def _forget(self) -> None:
        self._run = self._controller = self._workers = None
        self._finalizer.detach()

    @property
    def is_started(self) -> bool:
        """Whether there are workers."""
        return self._controller is not None

    @property
    def worker_group(self) -> WorkerGroup:
        """The workers."""
        self._require_workers("worker_group")
        assert self._workers is not None
        return self._workers

    @property
    def events(self) -> list[Event]:
        """Losses, restarts, and growth of the workers since `start`, oldest first."""
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
        name: str = "",
        iteration: int = 0,
        resume: bool = False,
    ) -> None:
        """Send a function of no arguments to every worker. The first wait for results starts it.

        Checkpoints go into `run_dir`. `dataset`, `checkpoint`, and `checkpoint_strategy` mean the
        same as in `Trainer.run`. `latest_checkpoint_id` is the number of the newest checkpoint so
        far, by default 0. `iteration` is the number of earlier reports. `resume` continues from the
        newest checkpoint in `run_dir`, if there is one.
        """
        controller = self._require_workers("start_training")
        if self._run is not None:
            raise TrainBackendError(
                "start_training(): another training function is running. Call finish_training() "
                "first."
            )
        checkpoints = RunCheckpoints(
            None if run_dir is None else Path(run_dir) / TRAIN_CHECKPOINT_SUBDIR,
            checkpoint_strategy,
            latest_checkpoint_id or 0,
            self._find_override("decode_data"),
        )
        if resume and (manifest := checkpoints.restore()) is not None:
            iteration = manifest.global_step
        elif checkpoint is not None:
            checkpoints.newest_blob = cloudpickle.dumps(Checkpoint.from_any(checkpoint).to_dict())
        checkpoints.iteration = iteration
        spec = replace(self._make_spec(train_func, run_dir, metadata), name=name)
        datasets = dataset if isinstance(dataset, Datasets) else Datasets(dataset)
        # From here on there is a run, and a failure must end it.
        self._earlier_checkpoints, self.checkpoints = self._last_saved, checkpoints
        call = Call(method="run", max_retries=self._max_retries)
        self._run = run = _Run(controller, spec, checkpoints, datasets, call)
        with self.abort_on_error():
            controller.snapshots.replace_with(run.start_state)
            self._await_idle_workers(controller)
            run.begin()

    def _make_spec(self, function: Callable[[], Any], folder: Any, metadata: Any) -> RunSpec:
        keeps_batch = self._elastic.global_batch == "keep"
        return RunSpec(
            uuid.uuid4().hex,
            pickle_function(function),
            metadata=dict(metadata or {}),
            folder="" if folder is None else str(folder),
            encode=self._find_override("encode_data"),
            full_world_size=self.options.num_workers if keeps_batch else None,
        )

    def fetch_next_result(self) -> list[dict[str, Any]] | None:
        """Wait until every worker has reported, and return the reports by rank.

        Return None when the function has returned on all workers. Raise the exception of the
        function, or WorkerLostError if workers are lost more often than ``max_retries`` allows.
        After a loss, `Controller.run` restarts all workers within `run.send`, with the snapshot
        that `start_training` has set.
        """
        run = self._require_run("fetch_next_result")
        with self.abort_on_error():
            while run.return_values is None:
                results: list[TrainingResult] = run.send(NextResultRequest())
                check_in_step(results)
                run.checkpoints.save(results)
                if run.growth_policy.may_grow_after(results[0]):
                    run.checkpoints.iteration = results[0].iteration
                    run.controller.restart_with_more_workers()
                if results[0].kind == "end":
                    run.return_values = [result.return_value for result in results]
                elif results[0].kind == "report" and not run.skips_reports:
                    return [self._backend.decode_data(result.metrics) for result in results]
        return None

    def pause_reporting(self) -> None:
        """Skip reports from now on. Checkpoints are still kept."""
        self._require_run("pause_reporting").skips_reports = True

    def finish_training(self) -> list[Any]:
        """Skip reports until the end of the function, and return its results by rank."""
        run = self._require_run("finish_training")
        run.skips_reports = True
        while run.return_values is None:
            self.fetch_next_result()
        self._run = None
        self.checkpoints.finish()
        return run.return_values

    @contextlib.contextmanager
    def abort_on_error(self) -> Iterator[None]:
        """End the current run if the block raises."""
        try:
            yield
        except BaseException as error:
            run = self._run
            self.abort()
            if run is not None and isinstance(error, WorkerLostError):
                number, allowed = run.call.losses.num_losses, run.call.max_retries
                error.args = (
                    f"The training function lost workers {number} time{'s' * (number != 1)}, but "
                    f"max_retries={allowed} (max_failures={allowed} in fit()). {error}",
                )
            raise

    def abort(self) -> None:
        """End the current run, if any."""
        run, self._run = self._run, None
        if run is not None:
            run.controller.stop(EndRunRequest())

    def run(self, train_func: Callable[[], Any]) -> list[Any]:
        """Call a function on every worker, without reports, and return the results by rank.

        Raise WorkerLostError if a worker is lost. The call is not repeated.
        """
        controller = self._require_workers("run")
        if self._run is not None:  # an error must not stop the other function
            return self.worker_group.execute(train_func)
        self._await_idle_workers(controller)
        return controller.run(Call(request=ApplyRequest(function=train_func), method="run"))

    # ---- checkpoints

    @property
    def _last_saved(self) -> RunCheckpoints:
        return self.checkpoints if self.checkpoints.has_saved else self._earlier_checkpoints

    latest_checkpoint = forward_to(
        "_last_saved.latest", "The newest checkpoint of the newest run that saved one, or None."
    )
    latest_checkpoint_path = forward_to(
        "_last_saved.latest_path",
        "Path of the newest checkpoint on disk of the newest run, or None.",
    )
    best_checkpoint_path = forward_to(
        "_last_saved.best_path",
        "Path of the best checkpoint on disk of the newest run, or None.",
    )

    latest_checkpoint_id: int = forward_to("checkpoints.number", "Number of the newest checkpoint.")

    @property
    def latest_checkpoint_dir(self) -> Path | None:
        """Folder of the newest run's checkpoints; None if no checkpoint is on disk."""
        folder = self.checkpoints.folder
        return folder if folder is not None and folder.is_dir() else None

    # ---- helpers

    def _await_idle_workers(self, controller: Controller) -> None:
        """Replace dead workers, and wait for workers that still run a failed function.

        These losses do not count against the retries of a run.
        """
        most = self._elastic.max_start_attempts
        controller.run(Call(request=EndRunRequest(), method="run", max_retries=most))

    def _find_override(self, name: str) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
        own = getattr(self._backend, name)
        return None if own is getattr(Backend, name) else own

    def _require_workers(self, method: str) -> Controller:
        if self._controller is None:
            raise InactiveWorkerGroupError(f"{method}: there are no workers. Call start() first.")
        self._controller.check_process()
        return self._controller

    def _require_run(self, method: str) -> _Run:
        self._require_workers(method)
        if self._run is None:
            raise TrainBackendError(
                f"{method}(): no training function is running. Call start_training() first."
            )
        return self._run
