"""Runs an operator in a worker, for all frameworks: requests, new generations, and state."""

import contextlib
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from raysgd._internal.config import BATCH_SIZE, worker_config
from raysgd._internal.forwarding import forward_to
from raysgd._internal.imports import frozen_imports
from raysgd._internal.runner import Request, Runner, WorkerContext
from raysgd._internal.worker_status import (
    BatchProgress,
    Measurements,
    ProcessStatus,
    ReportedPosition,
    SnapshotStatus,
    UpdateStatus,
    WorkerStatus,
)
from raysgd.checkpoint.file import manifest_entries, write_state
from raysgd.cluster.large_values import FileContent, IncomingValue
from raysgd.cluster.serialization import find_unpicklable
from raysgd.elastic.call import (
    ExportShardsRequest,
    ImportShardsRequest,
    LoadRequest,
    RestartStateRequest,
)
from raysgd.loop import requests
from raysgd.loop.loop import Loop
from raysgd.loop.loop_control import LoopControl
from raysgd.loop.metrics_recorder import MetricReader
from raysgd.loop.operator_base import OperatorBase
from raysgd.loop.options import Options
from raysgd.loop.state_access import StateAccess
from raysgd.loop.state_dict import load_from_leader, load_state, read_state
from raysgd.loop.train_state import TrainState

logger = logging.getLogger(__name__)


class OperatorRunner(Runner, ABC):
    """Runs one operator. `Runner` documents which thread calls each method."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._loop: Loop | None = None
        self.control = LoopControl()
        self._metric_reader = MetricReader()
        self.restoring = contextlib.ExitStack()
        """Restores what the runner changes in the process, which may be the user's."""

    # ---- lifecycle

    def rejoin(self, context: WorkerContext, leader_rank: int) -> str | None:
        self._set_config_size(context)
        loop, train_state = self._hosted_loop, self._train_state
        position = train_state.position_to_save()
        train_state.begin_generation(context)
        state = load_from_leader(loop, leader_rank) if context.has_process_group else None
        train_state.lacks_state = False
        if train_state.position_to_save() != position:
            loop.source.discard_unread()  # otherwise, the next segment may continue it
        if not train_state.state_status.is_complete:
            loop.snapshots.clear()
        self.operator.on_world_change()
        if state is not None:  # the hook may register the data of the leader
            train_state.data.set_batch_size(state["batching"])  # may differ in the setup
            train_state.data.check_equal_data(state["fingerprint"])
        train_state.data.warn_of_stale_ranks()
        return "\n".join(filter(None, (each.warning for each in train_state.features)))

    def _worker_arguments(self, context: WorkerContext) -> tuple[Any, Any, dict[str, Any]]:
        """Return the operator's class, this worker's config, and arguments of `WorkerSettings`."""
        options = self._options
        with contextlib.nullcontext() if context.is_in_driver else frozen_imports():
            operator_cls, given = options.unpack()
        num_workers = options.layout.num_planned_workers(context.world_size)
        config = worker_config(given, num_workers, copies=context.is_in_driver)
        sizes = {
            "worker_batch_size": config.get(BATCH_SIZE),
            "requested_global_batch_size": given.get(BATCH_SIZE),
        }
        return operator_cls, config, {"options": options, "context": context, **sizes}

    def _set_config_size(self, context: WorkerContext) -> None:
        settings, number = self._train_state.settings, context.world_size
        if settings.requested_global_batch_size is not None:
            size = settings.requested_global_batch_size // self._options.layout.num_trained_parts(
                number
            )
            self.operator.config[BATCH_SIZE] = settings.worker_batch_size = size

    def start_operator(self, operator: OperatorBase, state_access: StateAccess) -> None:
        """Start an operator that is set up. Use the data order and the state of rank 0."""
        read_snapshot = partial(read_state, is_snapshot=True)
        self._loop = Loop(operator, state_access, self.control, read_snapshot)
        train_state = self._train_state
        self._set_config_size(train_state.context)
        if train_state.context.world_size > 1:
            # Use the seed of rank 0, because each process may have drawn its own.
            seed, fingerprint = train_state.collectives.broadcast(
                lambda: (train_state.data.seed, train_state.data.fingerprint()), 0
            )
            train_state.data.reseed(seed)
            train_state.data.check_equal_data(fingerprint)
            for feature in train_state.features:
                feature.sync_initial_state()
        if not train_state.context.is_alone:
            self.operator.on_world_change()

    def teardown(self) -> None:
        if self._loop is not None:
            self._train_state.data.end_processes()
        self._loop = None
        self.restoring.close()

    def unpicklable_argument(self) -> str:
        config, _ = find_unpicklable(self._options.config)
        operator, _ = find_unpicklable(self._options.training_operator_cls)
        return f"config{config}" if config else f"training_operator_cls{operator}"

    operator: OperatorBase = forward_to("_hosted_loop.operator", "The operator, once it is set up.")
    _train_state: TrainState = forward_to("_hosted_loop.train_state", "Its training state.")

    @property
    def _hosted_loop(self) -> Loop:
        if (loop := self._loop) is None:
            raise RuntimeError("This worker has no operator: its setup has not finished.")
        return loop

    # ---- access from another thread, in which `teardown` can unset `_loop` at any time

    def status(self, acknowledged_step: int = -1) -> WorkerStatus:
        if (loop := self._loop) is None:
            return WorkerStatus()
        train_state, segment = loop.train_state, loop.train_state.segment
        running = segment or loop.evaluation.batches
        meters = None if running is None else train_state.meters
        source, snapshots, now = loop.source, loop.snapshots, train_state.position
        recorder = loop.recorder
        has_copies = recorder.is_merged and segment is not None
        num_copies = train_state.context.world_size if has_copies else 1
        position = ReportedPosition(
            num_completed_epochs=now.epoch,
            in_epoch=now.offset > 0,
            global_step=now.global_step,
            validation_offset=now.validation_offset,
            num_batches=0 if running is None else running.num_finished_steps,
            epoch_samples=source.epoch_samples,
        )
        batches = BatchProgress(
            global_step=position.global_step,
            num_batches=position.num_batches,
            num_total_batches=None if running is None else running.total_steps,
            num_samples=0 if meters is None else int(meters.num_samples) // num_copies,
            latest_metrics={} if meters is None else self._metric_reader.read(meters),
        )
        measured = Measurements(
            step_s=0.0 if segment is None else segment.step_s or loop.step_s,
            samples_per_s=train_state.read_speed(),
            timing=train_state.step_timing.totals,
            log_points=recorder.unacknowledged_log_points(acknowledged_step),
        )
        start, bad_steps = train_state.call.start_step, train_state.bad_steps
        new_bad_steps = [dict(bad) for bad in bad_steps if bad["step"] > start]
        place = self.control.failure_place or f"after step {position.global_step}"
        return WorkerStatus(
            position=position,
            batches=batches,
            measured=measured,
            snapshot=SnapshotStatus(snapshots.newest_step, snapshots.num_invalidations),
            updates=UpdateStatus(train_state.micro_batching.num_splits, new_bad_steps),
            state_status=train_state.state_status,
            process=ProcessStatus(True, place),  # blocked if this worker has returned
        )

    def set_interrupted(self, interrupted: bool) -> None:
        self.control.is_interrupted = interrupted

    def pause_at(self, step: int | None) -> int:
        self.control.driver_pause_step = math.inf if step is None else step
        return 0 if (loop := self._loop) is None else loop.train_state.position.global_step

    def acquire_snapshot(self, num_invalidations: int | None = None) -> dict[str, Any] | None:
        return None if (loop := self._loop) is None else loop.snapshots.acquire(num_invalidations)

    def release_snapshot(self, snapshot: dict[str, Any], seconds: float) -> None:
        if (loop := self._loop) is not None:
            loop.snapshots.release(snapshot, seconds)

    # ---- requests

    def handle(self, request: Request) -> Any:
        """Handle a request of the driver. Defer Ctrl-C while a step is in progress."""
        self.control.failure_place = ""
        with self.control.deferring_ctrl_c():
            match request:
                case requests.TrainRequest():
                    with self._train_state.step_timing.running():
                        return self._hosted_loop.train(request)
                case requests.ValidateRequest(is_sanity_check=True):
                    return self._hosted_loop.evaluation.sanity_check(request)
                case requests.ValidateRequest():
                    with self._hosted_loop.snapshots.before_validation():
                        return self._hosted_loop.evaluation.validate(request)
                case requests.PredictRequest():
                    return self._hosted_loop.evaluation.predict(request.loader)
                case requests.LeavingMetricsRequest():
                    return self._hosted_loop.leaving_metrics(request.call_number)
                case requests.UpdateSchedulersRequest():
                    return self.update_schedulers(request.call_number, request.metric)
                case requests.StateRequest():
                    return self.state_dict(request.frozen)
                case requests.SaveRequest():
                    state = {**self.state_dict(request.frozen), **request.driver_entries}
                    state["data"]["rng"] = request.generator_states
                    write = partial(write_state, state, request.label)
                    return FileContent(write, manifest_entries(state))
                case LoadRequest():
                    return self.load_state_dict(request.state, request.incoming)
                case requests.PrepareExportRequest():
                    for feature in self._train_state.features:
                        feature.before_export()
                    return self._train_state.generators.state()
                case requests.ModelsRequest():
                    return self._hosted_loop.state_access.unsharded_models(request.only_weights)
                case requests.ApplyRequest():
                    return request.function()
                case requests.ApplyOperatorRequest():
                    return self._apply_operator(request.function)
                case RestartStateRequest():
                    return self.restart_state(request.num_workers)
                case ExportShardsRequest():
                    return self._train_state.to_cpu(self._train_state.placement.export_shards())
                case ImportShardsRequest():
                    return self._train_state.placement.import_shards(request.shards)
        raise NotImplementedError(f"Operators do not support {request.name}.")

    def warm_up(self) -> None:
        """Compute the gradients of a batch, so that compilation does not delay the group later."""
        measures_speed = self._options.elastic.shares == "measured"
        if not (measures_speed or any(each.needs_warm_up for each in self._train_state.features)):
            return
        try:
            for _ in range(1 + measures_speed):  # the first batch is slower than others
                self._hosted_loop.warm_up()
        except Exception as error:
            logger.warning("The warm-up of a replacement worker failed: %r", error)

    # ---- answers to requests

    @abstractmethod
    def update_schedulers(self, call_number: int, metric: float) -> None:
        """Step every scheduler with a metric, only once for each call."""

    def _apply_operator(self, function: Callable[[Any], Any]) -> Any:
        """Call a function with the operator. Take a new snapshot if it changed the state."""
        train_state, loop = self._train_state, self._hosted_loop
        before = self._user_settings()
        try:
            return function(self.operator)
        finally:
            for feature in train_state.features:
                feature.after_user_function()
            if self._user_settings() != before:
                loop.snapshots.clear(is_outdated=True)
                if not train_state.context.is_alone:
                    loop.snapshots.take_if_due()

    def _user_settings(self) -> tuple[Any, ...]:
        state_access, batching = self._hosted_loop.state_access, self._train_state.data.batching()
        return state_access.user_settings(), batching, state_access.module_modes()

    # ---- state

    def state_dict(self, frozen: bool = True) -> dict[str, Any]:
        """Return the state, or this worker's shards of it, on the CPU."""
        self._train_state.check_undamaged()
        if not self._train_state.placement.is_in_sync:
            self._train_state.settings.warn_once(
                "ahead",
                "Workers were lost within a step, and some optimizers of this state have already "
                "made their update. A trainer that loads the state repeats the update.",
            )
        return dict(self._train_state.to_cpu(read_state(self._hosted_loop, frozen=frozen)))

    def load_state_dict(self, state: dict[str, Any], incoming: IncomingValue | None = None) -> None:
        """Load a state. Receive its large arrays late, in the memory of the training state."""
        load_state(self._hosted_loop, state, incoming)

    def restart_state(self, num_workers: int = 1) -> dict[str, Any] | None:
        """Return the state from which new workers can continue, or None.

        A sharded state needs the shards of all workers. `num_workers` workers can send shards.
        """
        if self._loop is None or self._train_state.state_status.condition != "good":
            return None
        train_state = self._train_state
        has_all = train_state.context.world_size == num_workers and train_state.placement.is_in_sync
        if not (train_state.state_status.is_complete or has_all):
            return None
        return dict(train_state.to_cpu(read_state(self._loop, is_snapshot=True)))
