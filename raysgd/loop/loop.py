"""Runs the calls of ``train`` on one worker, in segments of epochs up to a goal.

`raysgd.loop.update` shows the life of an update. A segment ends as follows:

=======================  ==========================================================================
``train_epoch`` returns  The next segment begins, until the call reaches its goal.
pause                    The iterator ends early. For the driver, `Loop.train` raises PausedError.
StepInterruptedError     The driver interrupts the call, for example because a worker was lost.
IndivisibleError         A batch must not be split. The loop repeats the step with whole batches.
RetrySplitError          The driver repeats the call with more micro-batches per batch.
WarmedUp                 The gradients are computed. `Loop.warm_up` restores the state.
another error            The driver raises it, or repeats the call without lost workers.
=======================  ==========================================================================

If a failed update changed something that no feature can restore, ``is_damaged`` is set in the
training state. The worker then needs the state of another worker or of a snapshot. Without either,
training raises an error until a checkpoint is loaded.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from raysgd._internal.runner import PausedError, RetrySplitError
from raysgd.data.source import BatchSource
from raysgd.loop.evaluation import Evaluation
from raysgd.loop.loop_control import LoopControl
from raysgd.loop.metrics_recorder import MetricsRecorder
from raysgd.loop.micro_batching import IndivisibleError
from raysgd.loop.operator_base import OperatorBase, as_metrics, bind_epoch
from raysgd.loop.requests import CallbackPause, TrainRequest
from raysgd.loop.segment import Segment
from raysgd.loop.snapshot_taker import SnapshotTaker
from raysgd.loop.sources import empty_loader_error
from raysgd.loop.state_access import StateAccess
from raysgd.loop.update import WarmedUp
from raysgd.metrics import with_weight

logger = logging.getLogger(__name__)


class Loop:
    """Runs an operator's ``train_epoch``, and merges the metrics of its segments.

    A segment is what one call of ``train_epoch`` trains: an epoch, the rest of an epoch, or a
    number of steps. A repeated request trains only the steps that are left to its goal. It has the
    same call number as the first request.
    """

    def __init__(
        self,
        operator: OperatorBase,
        state_access: StateAccess,
        control: LoopControl,
        read_snapshot: Callable[[Loop], dict[str, Any]],
    ) -> None:
        self.operator = operator
        self.state_access = state_access
        self.control = control
        train_state = self.train_state = operator._train_state
        self._position = train_state.position
        self.source = BatchSource(())  # of the newest call of ``train``
        self._next_log_step: int | None = None  # step that ends a segment, so that it is logged
        self.step_s = 0.0  # mean seconds per step of the last segment of the call
        self.recorder = MetricsRecorder(train_state)
        self.evaluation = Evaluation(operator, control, self.recorder)
        self.snapshots = SnapshotTaker(train_state, partial(read_snapshot, self))

    def train(self, request: TrainRequest) -> Mapping[str, Any] | CallbackPause:
        """Train up to the goal of a request, and return its metrics, or a `CallbackPause`.

        Raise PausedError if the driver asked for a pause.
        """
        train_state = self.train_state
        self._begin_call(request)
        self._add_due_log_point(request)
        while not self._is_at_goal(request):
            step, pause = self._position.global_step, request.callback_pause_step
            if pause is not None and step >= pause:
                return CallbackPause()
            if step >= self.control.driver_pause_step:
                raise PausedError
            if step <= request.start_step:
                self.recorder.clear()
            self._train_segment(self._max_steps_of_segment(request), request)
            self._add_due_log_point(request)
        offset = self._position.offset
        if self.source.is_partitioned and offset and self.source.steps_left(offset) == 0:
            # A failure occurred after the last step of the epoch, before the epoch was counted.
            self._train_segment(None, request)
        for feature in train_state.features:
            feature.check_parameters()  # user code can change parameters during the call
            feature.end_call()
        if train_state.context.has_process_group:
            for feature in train_state.features:
                feature.sync_buffers()
        return self.recorder.result()

    def _begin_call(self, request: TrainRequest) -> None:
        train_state = self.train_state
        self.step_s = 0.0
        train_state.check_undamaged()
        for feature in train_state.features:
            feature.check_parameters()
            feature.begin_call(logs_steps=request.log_every is not None)
        if train_state.call.call_number != request.call_number:
            self.recorder.begin(request.call_number)
        if request.min_splits:
            train_state.micro_batching.increase_num_splits(request.min_splits)
        train_state.timers.enabled = request.profile
        trained_on = train_state.data.training_source_name
        source = train_state.data.select_training(request.dataset)
        if train_state.data.training_source_name != trained_on:
            self._position.offset = 0  # of another epoch
            self.source.discard_unread()
        source.change_partition(shares=request.shares)
        self.source = source
        train_state.step_timing.num_loader_workers = getattr(source.loader, "num_workers", None)

    def _add_due_log_point(self, request: TrainRequest) -> None:
        """Add a point if one is due, and set the step of the next one."""
        start, step = request.start_step, self._position.global_step
        self._next_log_step = None
        if (every := request.log_every) is not None:
            newest = max(self.train_state.call.last_log_step, start)
            if step >= (newest // every + 1) * every:
                self.recorder.add_log_point()
            self._next_log_step = (max(step, start) // every + 1) * every

    def _is_at_goal(self, request: TrainRequest) -> bool:
        call, epochs, until = self.train_state.call, request.until_epoch, request.until_step
        has_epochs = epochs is not None and self._position.epoch >= epochs + call.extra_epochs
        has_steps = until is not None and self._position.global_step >= until
        return call.ended_early or has_epochs or has_steps

    def _max_steps_of_segment(self, request: TrainRequest) -> int | None:
        """Return the maximum number of steps of the next segment, or None if its epoch ends it."""
        step, until = self._position.global_step, request.until_step
        if step < request.start_step and self._position.epoch >= request.start_epoch:
            return request.start_step - step  # steps that were done before the call
        return None if until is None else until - step

    def _train_segment(self, max_steps: int | None, request: TrainRequest) -> None:
        train_state, operator, position = self.train_state, self.operator, self._position
        segment = self._begin_segment(max_steps, request)
        try:
            with train_state.timers.record("train_epoch"):
                result = bind_epoch(operator, segment, request.info or {}, position.epoch)()
            segment.finish()
            metrics = as_metrics(operator.train_epoch, result)
        except IndivisibleError:  # train the step again with whole batches
            self._end_failed_segment(segment)
            train_state.check_undamaged()
            return
        except BaseException as error:
            in_update = train_state.update.is_open and not segment.has_loader_failed
            batch = segment.batch if in_update else None
            self.control.failure_place = segment.describe_position()
            self._end_failed_segment(segment)
            if number := train_state.micro_batching.choose_num_splits(
                error, batch, segment.may_split
            ):
                raise RetrySplitError(number) from error
            raise
        if segment.num_committed or not segment.was_read:
            metrics = with_weight(metrics, segment.num_committed or 1)
            self.recorder.add_segment(segment.start_step, metrics)
        if not segment.was_read:  # train_epoch has its own batches, and may have counted them
            position.global_step = max(segment.start_step, int(operator.global_step))
        train_state.segment = None
        if position.global_step == segment.start_step and not segment.has_paused:
            self._check_empty_segment(segment, request)
        train_state.call.keeps_modes = segment.has_paused
        self.step_s = segment.step_s
        if segment.ends_epoch:
            segment.source.discard_unread()
            train_state.end_epoch()

    def _begin_segment(self, max_steps: int | None, request: TrainRequest) -> Segment:
        train_state, call, position = self.train_state, self.train_state.call, self._position
        break_ends_epoch = position.epoch < request.start_epoch
        if position.global_step >= request.start_step:
            call.start_step, break_ends_epoch = request.start_step, request.until_epoch is not None
        elif position.offset == 0:  # earlier calls are replayed; usually, each was an epoch
            call.start_step = position.global_step
        train_state.user_set_step = train_state.meters = None
        self.snapshots.take_if_due(is_collective=True)
        train_state.restore_modes()
        after_commit: list[Callable[[], None]] = []
        if self.snapshots.takes_between_steps:
            after_commit.append(self.snapshots.take_if_due)
        if request.ends_at_nonfinite_loss:
            after_commit.append(self._end_at_nonfinite_loss)
        pauses = [n for n in (request.callback_pause_step, self._next_log_step) if n is not None]
        segment = Segment(
            train_state,
            self.source,
            self.control,
            max_steps=max_steps,
            steps_left=self._agree_on_epoch(),
            after_commit=after_commit,
            pause_step=min(pauses, default=math.inf),
            break_ends_epoch=break_ends_epoch,
        )
        train_state.segment = segment
        return segment

    def _agree_on_epoch(self) -> int | None:
        """Agree on the order of the epoch. Return the steps that are left, or None if unknown."""
        train_state, source = self.train_state, self.source
        source.current_epoch, offset = self._position.epoch, self._position.offset
        if source.unread is None:  # first, because the length may depend on the epoch
            source.agree_on_order(source.current_epoch, offset, train_state.collectives)
        steps_left = source.steps_left(offset)
        if steps_left == 0 and offset == 0:  # only the worker with the empty loader raises
            raise empty_loader_error("train", source)
        if steps_left is None or source.is_partitioned or train_state.context.world_size == 1:
            return steps_left
        # The workers' own loaders can differ in length. The shortest one ends the epoch.
        return train_state.collectives.all_reduce_min(min(steps_left, 2**62))[0]  # fits 64 bits

    def _end_at_nonfinite_loss(self) -> None:
        """End the call if a worker has measured a loss that is not finite in this segment."""
        meters, segment = self.train_state.meters, self.train_state.segment
        is_bad = meters is not None and meters.has_nonfinite_loss()
        if self.train_state.context.world_size > 1:
            is_bad = self.train_state.collectives.any_rank(is_bad)
        if is_bad and segment is not None:
            self.train_state.call.ended_early = True
            segment.pause_step = 0  # a past step, so that the next request ends the segment

    def _end_failed_segment(self, segment: Segment) -> None:
        """Undo the update of a segment that raised, and record its metrics."""
        try:
            segment.end_after_error()
            if self.train_state.meters is not None:
                self.recorder.add_segment(segment.start_step, self.train_state.meters.summary())
        finally:
            self.train_state.segment, self.train_state.call.keeps_modes = None, False

    def _check_empty_segment(self, segment: Segment, request: TrainRequest) -> None:
        """Raise an error for a segment without a step, warn of it, or add an epoch to the call.

        The loader was at its end, or ``train_epoch`` did not ask for a batch.
        """
        if segment.epoch_is_over:
            position, call = self._position, self.train_state.call
            is_last = position.epoch + 1 >= (request.until_epoch or 0) + call.extra_epochs
            if position.global_step == call.start_step and is_last and request.adds_epoch:
                call.extra_epochs += 1
        else:
            kind = type(self.operator).__name__
            drew_none = f"{kind}.train_epoch drew no batch from its iterator"
            if segment.max_steps is not None:
                raise RuntimeError(
                    f"{drew_none}, so raysgd cannot count num_steps. Draw the batches from the "
                    "iterator, or increase self.global_step."
                )
            logger.warning("%s. The epoch counts as done, but no step was counted.", drew_none)

    def leaving_metrics(self, call_number: int) -> Mapping[str, Any] | None:
        """Return the metrics of a call so far, or None if it has none. Add them to a last point."""
        recorder = self.recorder
        if self.train_state.call.call_number != call_number or not recorder.own_metrics:
            return None
        if self._next_log_step is not None:
            recorder.add_log_point(is_leaving=True)
        return recorder.result(is_leaving=True)

    def warm_up(self) -> None:
        """Compute the gradients of one training batch, then restore the state."""
        train_state = self.train_state
        source, settings = train_state.data.source_or_missing("train"), train_state.settings
        context, worker_batch_size = settings.context, settings.worker_batch_size
        if isinstance(source.loader, Iterator):
            return  # to read a batch early would lose it
        # Use the batch size of the full group, although this worker is still alone.
        source.repartition(settings.options.num_workers, 0, worker_batch_size)
        try:
            with train_state.preserving_state(self.operator), contextlib.suppress(WarmedUp):
                train_state.update.begin_warm_up()
                segment = train_state.segment = Segment(
                    train_state, source, self.control, max_steps=1, steps_left=1, read_limit=1
                )
                bind_epoch(self.operator, segment, {}, self._position.epoch)()
        finally:
            source.end_processes()
        source.repartition(context.world_size, context.world_rank, worker_batch_size)
