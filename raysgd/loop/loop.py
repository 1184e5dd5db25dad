"""The calls ``train`` and ``validate`` on one worker: segments of epochs up to a goal.

The life of a step, whose state `raysgd.loop.step.Step` holds::

    for batch in segment:                     # DRAWN: the loader has given the batch
        for feature in features:              # RUNNING
            feature.begin_batch(place)
        operator.train_batch(batch)           # UPDATED: every optimizer has made its updates
        # The loop asks for the next batch, or returns:
        step.commit()                         # COMMITTED: the step counts
        for feature in features:
            feature.commit()

    if train_batch raises:
        if step is UPDATED:
            step.commit()                     # its updates are made; the error is raised
        else:
            for feature in features:
                feature.roll_back()           # restores what it copied
            step.discard()                    # DISCARDED: the batch is trained again

With gradient accumulation a step has several batches. It is updated by the last one. If something
changed that no feature can restore, ``step.is_partial`` is set. The state then comes from another
worker, else from the snapshot, else training raises until a checkpoint is loaded.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from raysgd._internal.context import OutOfMemoryError, PausedError
from raysgd._internal.nested import unchanged
from raysgd.callbacks.learning_rate import learning_rates
from raysgd.data.source import BatchSource, PartitionedSource
from raysgd.loop.micro_batches import IndivisibleError
from raysgd.loop.operator_base import checked_result
from raysgd.loop.requests import RehearseRequest, TrainRequest, ValidateRequest
from raysgd.loop.signal import Signal
from raysgd.loop.state import Snapshots
from raysgd.loop.step import WarmedUp
from raysgd.loop.step_iterator import StepIterator
from raysgd.loop.train_state import TrainState
from raysgd.metrics import NUM_SAMPLES, NUM_SKIPPED_STEPS, Summary, merge_segments, renamed

__all__ = ["Loop"]

_POSITIONAL = {
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
}


class Loop:
    """Runs an operator's ``train_epoch`` and ``validate`` and merges what they return.

    A segment is what one call of ``train_epoch`` trains: an epoch, the rest of one, or so many
    steps of one. Goals are absolute (until epoch 3, until step 240), so that a call can be made
    again after a failure and then does what is left; `call` tells a repetition from a new call.
    """

    def __init__(self, operator: Any, signal: Signal) -> None:
        self.operator = operator
        self.signal = signal
        self._train_state: TrainState = operator._train_state
        # what is left of the iteration over the training data; None: iterate anew
        self._batches: Iterator[Any] | None = None
        self._in_parts = False
        self._repeats = False
        self._has_batch = True
        """Whether this worker's own loader has a batch for the step that begins."""
        self._source: BatchSource | None = None
        self._call = -1
        self.scheduled = -1
        """The newest call that has told the schedulers a metric."""
        self._until_epoch: int | None = None
        # committed steps as each segment began, and what it has measured
        self._results: list[tuple[int, Mapping[str, Any]]] = []
        # ends of epochs that the goal does not count: the call began just before one
        self._more_epochs = 0
        # committed and skipped steps as the call began
        self._began_at = 0
        self._skipped_before = 0
        # offset from which on covered samples are still to be counted; None between segments
        self._uncounted_from: int | None = None
        self._validation_batches: _Counted | None = None
        self.total_validated: int | None = None
        """Batches that the validation under way takes; None where that is unknown."""
        self._validation_start: tuple[int, int] | None = None
        self.snapshots = Snapshots(self._train_state)
        """Copies of the state for the driver."""
        self.num_covered: int | None = None
        """Samples that all workers have trained on in the call; None where that is unknown."""

    @property
    def segment(self) -> StepIterator | None:
        """The segment under way."""
        return self._train_state.segment

    def forget_iteration(self) -> None:
        """Let the next segment iterate over the loader anew, from where the epoch stands."""
        self._train_state.segment = self._batches = None

    def keep_iteration(self, moved: bool) -> None:
        """After a rejoin, go on in a loader that cannot be rewound, unless the position `moved`."""
        if moved or self._source is None or self._source.sharded:
            self.forget_iteration()

    @property
    def num_batches(self) -> int:
        """Batches finished in the segment, or the pass over the validation data, under way."""
        segment, validated = self.segment, self._validation_batches
        if segment is not None:
            return segment.num_finished
        return 0 if validated is None else validated.count

    # ---- state

    def state(self) -> dict[str, Any]:
        """Return the state in the form that is saved, with tensors as they are on this device.

        Where the state of optimizers is divided, ``shares`` has this worker's share of it, and
        what all workers have alike is in that of rank 0 alone.

        What is added here is added to `OperatorRunner._shared_state` as well, from which
        replacement workers take it, and to `OperatorRunner.load_state_dict`.
        """
        train_state = self._train_state
        divided = {}
        if train_state.sharded:
            divided = {"shares": train_state.shards()}
            if train_state.context.world_rank != 0:
                return {"global_step": train_state.global_step, **divided}
        position = train_state.position()
        return {
            "epoch": position["epoch"] + (position["offset"] > 0),
            "global_step": train_state.global_step,
            "operator": self.operator.state_dict(),
            **train_state.training_state(),
            **divided,
            "data": position,
        }

    def state_with_call(self) -> dict[str, Any]:
        """Return the state for another process in which the call under way shall go on."""
        return {**self.state(), "call": self.call_state()}

    def call_state(self) -> dict[str, Any]:
        """Return what the call under way has reached, for workers that join it."""
        self._cover()
        return {
            "call": self._call,
            "scheduled": self.scheduled,
            "num_covered": self.num_covered,
            "began_at": self._began_at,
            "more_epochs": self._more_epochs,
            "num_skipped": (self._train_state.num_skipped or 0) - self._skipped_before,
            "validation": self._validation_start,
        }

    def join_call(self, state: Mapping[str, Any]) -> None:
        """Take part in a call that others began; of what was measured there nothing is here."""
        if self._call != state["call"]:
            self._results = []
        self._call, self.num_covered = state["call"], state["num_covered"]
        self.scheduled = state["scheduled"]
        self._more_epochs = state["more_epochs"]
        self._began_at = state["began_at"]
        self._skipped_before = (self._train_state.num_skipped or 0) - state["num_skipped"]
        self._validation_start = state["validation"]

    def forget_validation(self) -> None:
        """Let a validation that is repeated begin at the position that was loaded."""
        self._validation_start = None

    # ---- train

    def train(self, request: TrainRequest) -> Mapping[str, Any] | None:
        """Train up to the goal of a request; return None if it paused where the request says."""
        train_state, logged = self._train_state, request.logged
        callback_pause = self.signal.callback_pause = request.callback_pause
        train_state.check_trained()
        train_state.check_whole()
        for feature in train_state.features:
            feature.begin_call(logs_steps=logged is not None)
        if self._call != request.call:
            self._begin(request.call)
        if request.split is not None:
            train_state.parts.raise_split(request.split)
        self._profile(request.profile)
        self._until_epoch = request.until_epoch
        source, changed = train_state.data.training_source(request.dataset)
        is_limited_anew = source.limit(request.limit) or request.repeats != self._repeats
        self._repeats = request.repeats
        if changed or is_limited_anew or source is not self._source:
            self.forget_iteration()
        self._source = source
        while (left := self._left(request.until_epoch, request.until_step)) != 0:
            pause = self.signal.pause
            if pause is not None and train_state.global_step >= pause:
                if callback_pause is None or train_state.global_step < callback_pause:
                    raise PausedError  # the driver asked for this pause
                return None
            if train_state.global_step <= request.start_step:
                self._results, self.num_covered = [], 0
                left = request.start_step - train_state.global_step or left
            elif logged is not None and train_state.global_step < logged:
                left = logged - train_state.global_step  # what is done again is kept apart
            self._train_segment(source, left, request.info)
        if source.sharded and train_state.offset and source.steps_left(train_state.offset) == 0:
            # it failed just before it ended the epoch
            self._train_segment(source, None, request.info)
        train_state.check_trained()  # again: it may have been unfrozen meanwhile
        if train_state.context.distributed:
            train_state.sync_buffers()
        result = self._result()
        if (num_skipped := train_state.num_skipped) is not None:
            result[NUM_SKIPPED_STEPS] = num_skipped - self._skipped_before
        return result

    def measured(self, call: int, since: int | None = None) -> Mapping[str, Any] | None:
        """Return what was measured in a call so far; None where it has not come here.

        Of the segments from the step `since` on it comes with learning rates and norms.
        """
        if self._call != call or not self._results:
            return None
        if since is None:
            return self._result()
        found = merge_segments([metrics for start, metrics in self._results if start >= since])
        of_step = dict(learning_rates(self.operator))
        for feature in self._train_state.features:
            of_step |= feature.step_metrics()
        return Summary({**found, **of_step}, found.weights)

    def _left(self, until_epoch: int | None, until_step: int | None) -> int | None:
        """Return how many steps are left to the goal; None for as many as the epoch has."""
        train_state = self._train_state
        if until_epoch is not None and train_state.epoch >= until_epoch + self._more_epochs:
            return 0
        return None if until_step is None else max(0, until_step - train_state.global_step)

    def _train_segment(self, source: BatchSource, limit: int | None, info: Any) -> None:
        train_state, operator = self._train_state, self.operator
        started_at, train_state.counted = train_state.global_step, {}
        self._uncounted_from = train_state.offset
        self.snapshots.maybe_take(self.state_with_call)
        by_position, by_name = _arguments_of(
            operator.train_epoch,
            operator._info_of_epoch(info or {}, limit),
            num_steps=limit,
            epoch_idx=train_state.epoch,
        )
        segment = train_state.segment = self._new_segment(source, limit)
        if segment.total_batches == 0 and segment.start == 0:
            raise _empty("train", source, self._first_without_batch(source))
        train_state.meters = None
        try:
            with train_state.timers.record("train_epoch"):
                metrics = operator.train_epoch(segment, *by_position, **by_name)
            left = segment.finish()
        except IndivisibleError:  # the step is redone as a whole
            if segment.num_batches == 0:
                train_state.meters = None  # what it measured will be measured again
            self._settle_failure(segment, source)
            train_state.check_whole()
            return
        except BaseException as error:
            batch, in_step = segment.batch, segment.in_step
            self._settle_failure(segment, source)
            train_state.parts.explain(error)
            if in_step and (split := train_state.parts.split_after(error, batch)):
                raise OutOfMemoryError(split) from error
            raise
        if left:
            self._settle_rest(source, left)
        self._end_covering()
        metrics = checked_result(operator.train_epoch, metrics)
        self._compare_counts(metrics.get(NUM_SAMPLES), segment)
        if segment.num_batches or not segment.drawn_from:
            weighted = _weighted(metrics, max(1, segment.num_batches))
            self._results.append((started_at, weighted))
        if not segment.drawn_from:  # batches of the loop's own, which it may have counted
            train_state.global_step = max(started_at, int(operator.global_step))
        if train_state.global_step == started_at and not segment.paused:
            self._check_empty_segment(segment, source, limit)
        # a loop that stops early of its own will has ended its epoch
        train_state.segment = None
        if segment.epoch_is_over or (limit is None and not segment.paused):
            train_state.offset = 0
            train_state.epoch += 1
            self._batches = None
            for feature in train_state.features:
                feature.end_epoch(train_state.epoch)

    def _new_segment(self, source: BatchSource, limit: int | None) -> StepIterator:
        train_state = self._train_state
        left = source.steps_left(train_state.offset)
        go_on: Callable[[bool], bool] | None = None
        if not source.sharded and train_state.context.world_size > 1:
            # such loaders may differ in length: all end with the first, or it would be waited for
            if left is not None:
                self._has_batch = left > 0
                left = train_state.minimum(left)
            else:
                go_on = self._every_rank
        if self._batches is None:
            source.agree_on_order(self._ordered_as, train_state.offset, train_state)
        on_commit = None
        if self.snapshots.each_step:
            on_commit = partial(self.snapshots.maybe_take, self.state_with_call)
        batches = self._drawn(source, self._ordered_as, train_state.offset)
        return StepIterator(
            train_state, source, batches, limit, left, go_on, self.signal, on_commit
        )

    @property
    def _ordered_as(self) -> int:
        """The epoch whose order the one under way has."""
        return 0 if self._repeats else self._train_state.epoch

    def _drawn(self, source: BatchSource, epoch: int, offset: int) -> Iterator[Any]:
        """Yield what is left of an iteration, which begins when the first batch is asked for.

        Until then it is open whether the loop takes batches in parts.
        """
        in_parts = self._train_state.parts.in_use
        if self._batches is None or (source.sharded and in_parts != self._in_parts):
            self._batches = source.batches(epoch, offset, in_parts=in_parts)
            self._in_parts = in_parts
        for batch in self._batches:  # noqa: UP028  "yield from" would end it with this one
            yield batch

    def _every_rank(self, has_batch: bool) -> bool:
        self._has_batch = has_batch
        return bool(self._train_state.minimum(int(has_batch)))

    def _first_without_batch(self, source: BatchSource) -> int | None:
        """Return the first worker whose own loader is empty; None if the workers share one."""
        context = self._train_state.context
        if source.sharded or context.world_size == 1:
            return None
        own = context.world_size if self._has_batch else context.world_rank
        return int(self._train_state.minimum(own))

    def _settle_rest(self, source: BatchSource, left: list[Any]) -> None:
        """Take back the batches of a group that the loop left before its end."""
        warnings.warn(
            f"{type(self.operator).__name__}.train_epoch ended within an accumulation group, so "
            f"that the gradients of its last {len(left)} batches are dropped. Let it draw whole "
            f"groups of {self._train_state.accumulation_steps} batches.",
            RuntimeWarning,
            stacklevel=2,
        )
        self._batches = None if source.sharded else itertools.chain(left, self._batches or ())

    def _settle_failure(self, segment: StepIterator, source: BatchSource) -> None:
        """Keep what a segment has reached, and what is measured of it, when it has raised."""
        again = segment.fail()
        self._end_covering()
        if segment.loader_failed:
            source.close_workers()  # its processes may be gone
        if source.sharded or segment.loader_failed:
            self._batches = None  # the offset says where to go on
        else:
            self._batches = itertools.chain(again, self._batches or ())
        meters = self._train_state.meters
        if meters is not None:
            # of what is trained again, all but the batch or part under way has been measured
            if meters.batch_count == segment.num_batches and len(again) < 2:
                self._compare_counts(meters.num_samples, segment)
            self._results.append((segment.start_step, meters.summary()))
        self._train_state.segment = None

    def _check_empty_segment(
        self, segment: StepIterator, source: BatchSource, limit: int | None
    ) -> None:
        """See why a segment had no batch: the loader is empty, was at its end, or was not asked."""
        name = f"{type(self.operator).__name__}.train_epoch"
        if segment.epoch_is_over and segment.start == 0:
            raise _empty("train", source, self._first_without_batch(source))
        if segment.epoch_is_over:
            train_state = self._train_state
            is_last = train_state.epoch + 1 >= (self._until_epoch or 0) + self._more_epochs
            if train_state.global_step == self._began_at and is_last:
                # the call before stopped or failed exactly at the end of its epoch, and could not
                # know that it was the end; this one has not done anything yet
                self._more_epochs += 1
        elif limit is None:
            warnings.warn(
                f"{name} took no batch from the iterator that it is given: no step was counted, "
                "and the epoch counts as done.",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            raise RuntimeError(
                f"{name} took no batch from its iterator, so num_steps cannot be counted. Iterate "
                "over the iterator that it is given, or count in self.global_step."
            )

    # ---- samples that are covered

    def _cover(self) -> None:
        """Count the samples that the whole group has trained on since this was last done."""
        if self._uncounted_from is None or self._source is None:
            return
        offset = self._train_state.offset
        if not self._source.sharded:
            self.num_covered = None
        elif self.num_covered is not None:
            self.num_covered += self._source.num_samples(self._uncounted_from, offset)
        self._uncounted_from = offset

    def _end_covering(self) -> None:
        self._cover()
        self._uncounted_from = None

    def _compare_counts(self, counted: Any, segment: StepIterator) -> None:
        """See whether the user counts what offsets count, and not tokens, or batches as items."""
        taken = segment.num_taken
        if taken is not None and isinstance(counted, int | float) and counted != taken:
            self.num_covered = None

    # ---- validate

    def validate(self, request: ValidateRequest) -> Mapping[str, Any]:
        """Evaluate the rest of the validation loader, or so many steps, round and round.

        A repeated call begins where it did. Of several loaders, or of one that is given with the
        call, each is read from its start.
        """
        call, loader = request.call, request.loader
        self._begin(call)
        self._profile(request.profile)
        self.num_covered = None
        train_state = self._train_state
        if self._validation_start is None or self._validation_start[0] != call:
            start = 0 if request.from_start else train_state.validation_offset
            self._validation_start = call, start
        sources = train_state.data.validation_sources() if loader is None else self._given(loader)
        with train_state.evaluating():
            for name, source in sources.items():
                source.limit(request.limit)
                offset = 0 if name else self._validation_start[1]
                offset = self._evaluate(name, source, offset, request.num_steps, request.info)
        train_state.end_segment()
        if loader is not None:
            self._close(sources)
        elif "" in sources:
            train_state.validation_offset = offset
        self._validation_batches = self.total_validated = None
        return self._result()

    def _evaluate(
        self, name: str, source: BatchSource, offset: int, left: int | None, info: Any
    ) -> int:
        """Evaluate what is left of a loader, or so many steps; return the offset behind them."""
        operator = self.operator
        source.agree_on_order(0, offset, self._train_state)
        while left is None or left > 0:
            ahead = source.steps_left(offset)
            limit = min((n for n in (left, ahead) if n is not None), default=None)
            taken_from = source.batches(0, offset, limit)
            batches = self._validation_batches = _Counted(taken_from, self.signal)
            self.total_validated, self._train_state.meters = limit, None
            try:
                with self._train_state.timers.record("validation"):
                    metrics = operator.validate(batches, info)
            except BaseException:
                source.close_workers()
                raise
            metrics = checked_result(operator.validate, metrics)
            # that of a worker without any batch counts for nothing
            weight = batches.count or not batches.exhausted
            metrics = _weighted(metrics, weight)
            metrics = renamed(metrics, f"val/{name}") if name else metrics
            self._results.append((self._train_state.global_step, metrics))
            # sized loader: count the group's steps, not this rank's batches
            taken = batches.count if ahead is None or limit is None else limit
            if offset == 0 and (ahead == 0 or (batches.exhausted and taken == 0)):
                context = self._train_state.context
                own = not source.sharded and context.world_size > 1
                raise _empty("validation", source, context.world_rank if own else None)
            is_end = limit is None or taken < limit or taken == ahead
            offset = 0 if is_end else source.offset_after(offset, taken)
            if left is None or (taken == 0 and not batches.exhausted):
                break
            left -= taken
        return offset

    def _given(self, loader: Any) -> dict[str, BatchSource]:
        """Return what to read of a loader that was given with a call, or of what makes one."""
        makes_one = callable(loader) and not isinstance(loader, Iterable)
        made = loader(self.operator.config) if makes_one else loader
        return self._train_state.data.sources_of(made)

    def predict(self, loader: Any) -> list[tuple[int, Any]]:
        """Return what the operator predicts for this worker's batches, on CPU, with their places.

        Places grow in the order of the loader, over all workers.
        """
        train_state, operator = self._train_state, self.operator
        sources = self._given(loader)
        if [*sources] != [""]:
            raise TypeError(f"predict() takes one loader, not {len(sources)}: call it for each.")
        source = sources[""]
        if source.shuffles:
            raise ValueError(
                "predict(): the loader shuffles, so that nobody could tell which sample a result "
                "is of. Give one with shuffle=False."
            )
        if not source.sharded and train_state.context.world_size > 1:
            raise TypeError(
                f"predict(): the loader is partitioned by {source.partitioned_by}, so that the "
                "results would have no order. Give a loader of a data set that can be indexed."
            )
        if source.steps_left(0) == 0:
            raise _empty("given", source)
        source.agree_on_order(0, 0, train_state)
        places, found = source.places_of_batches(), []
        with train_state.evaluating():
            batches = self._validation_batches = _Counted(source.batches(0, 0), self.signal)
            try:
                for output in operator._predictions(batches):
                    found.append((next(places), train_state.to_cpu(output)))
            finally:
                self._validation_batches = None
                self._close(sources)
        train_state.end_segment()
        if isinstance(source, PartitionedSource) and next(places, None) is not None:
            raise RuntimeError(
                f"{type(source.loader).__name__} gave {len(found)} batches, fewer than its sampler "
                "has: nobody could tell which samples these are. Let it give one for each."
            )
        return found

    def _close(self, sources: Mapping[str, BatchSource]) -> None:
        """Let go of the processes of loaders that were given with a call."""
        for source in sources.values():
            source.close_workers()

    def rehearse(self, request: RehearseRequest) -> Mapping[str, Any] | None:
        """Validate so many batches to see that it can be done, and leave all as it was.

        What can be read once only, or counts how often it is read, is left alone: then it is None.

        Returns:
            The metrics.
        """
        train_state = self._train_state
        sources = train_state.data.validation_sources()
        if not all(source.can_be_tried for source in sources.values()):
            return None
        with (
            unchanged(self),
            unchanged(self.operator),
            unchanged(train_state),
            train_state.rehearsing(),
        ):
            trial = ValidateRequest(
                call=-1, num_steps=request.num_steps, from_start=True, info=request.info
            )
            metrics = self.validate(trial)
        self._close(sources)
        return metrics

    def warm_up(self) -> None:
        """Compute the gradients of one training batch, and leave everything as it was."""
        train_state, operator = self._train_state, self.operator
        source, settings = train_state.data.readable("train"), train_state.settings
        if not source.can_be_tried:
            return
        # the batch size of a full group, though this worker is still alone
        source.reshard(settings.options.num_workers, 0, settings.batch_share)
        by_position, by_name = _arguments_of(
            operator.train_epoch, operator._info_of_epoch({}, 1), num_steps=1, epoch_idx=0
        )
        with (
            unchanged(operator),
            unchanged(train_state),
            train_state.rehearsing(),
            contextlib.suppress(WarmedUp),
        ):
            batches, train_state.step.is_warm_up = source.batches(0, 0, 1), True
            segment = StepIterator(train_state, source, batches, 1, 1, None, self.signal)
            train_state.segment = segment
            try:
                operator.train_epoch(segment, *by_position, **by_name)
            finally:
                train_state.step.is_warm_up = False
        source.close_workers()
        source.reshard(
            settings.context.world_size, settings.context.world_rank, settings.batch_share
        )

    # ---- results

    def _begin(self, call: int) -> None:
        self._call, self._results, self.num_covered = call, [], 0
        self._more_epochs = 0
        self._began_at = self._train_state.global_step
        self._skipped_before = self._train_state.num_skipped or 0
        self._train_state.timers.reset()

    def _profile(self, profile: bool) -> None:
        timers = self._train_state.timers
        if profile:
            timers.enable()
        else:
            timers.disable()

    def _result(self) -> Summary:
        result = merge_segments([metrics for _, metrics in self._results])
        timers = self._train_state.timers
        profile = {"profile": timers.stats()} if timers.enabled else {}
        return Summary({**result, **profile}, result.weights)  # the caller's own


class _Counted:
    """An iterator that counts what it yields, and can be stopped."""

    def __init__(self, batches: Iterator[Any], signal: Signal) -> None:
        self._batches = batches
        self.signal = signal
        self.count = 0
        self.exhausted = False

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> Any:
        self.signal.raise_stop()
        try:
            with self.signal.waiting():
                batch = next(self._batches)
        except StopIteration:
            self.exhausted = True
            raise
        self.count += 1
        return batch


def _arguments_of(
    train_epoch: Callable[..., Any], info: Any, **others: Any
) -> tuple[list[Any], dict[str, Any]]:
    """Return what a ``train_epoch`` takes, by position and by name: older ones end at ``info``."""
    function = getattr(train_epoch, "__func__", None)
    # of a method it is asked once, since to ask takes as long as a small step
    accepted = _parameters(train_epoch) if function is None else _parameters_once(function)[1:]
    kinds = [parameter.kind for parameter in accepted]
    # by position, since older overrides call it what they like
    by_position = len(kinds) > 1 and kinds[1] in _POSITIONAL
    by_name = others if by_position else {"info": info, **others}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        names = {parameter.name for parameter in accepted}
        by_name = {name: value for name, value in by_name.items() if name in names}
    return [info] if by_position else [], by_name


def _parameters(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    return tuple(inspect.signature(function).parameters.values())


_parameters_once = functools.lru_cache(maxsize=16)(_parameters)


def _weighted(metrics: Mapping[str, Any], num_batches: float) -> Mapping[str, Any]:
    """Let metrics that come without a number of samples count by the batches that they cover."""
    if NUM_SAMPLES in metrics or isinstance(metrics, Summary):
        return metrics
    return Summary(metrics, dict.fromkeys(metrics, num_batches))


def _empty(name: str, source: BatchSource, rank: int | None = None) -> RuntimeError:
    name = f"{name} loader" if rank is None else f"{name} loader of worker {rank}"
    if isinstance(source.loader, Iterator):
        return RuntimeError(
            f"The {name} gives no more batch: {source.describe()}. An iterator, such as a "
            "generator, can be read once: register something that iter() starts again, like a "
            "DataLoader, a list or an object whose __iter__ is the generator."
        )
    return RuntimeError(
        f"The {name} gives no batch: {source.describe()}. Use more data, a smaller batch "
        "size or drop_last=False."
    )
