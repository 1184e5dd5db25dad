"""The calls ``train`` and ``validate`` on one worker: segments of epochs up to a goal.

The life of a step, whose state `raysgd.loop.step.Step` holds::

    for batch in segment:                     # DRAWN: the loader has given the batch
        for feature in features:              # RUNNING
            feature.begin_batch(place)
        operator.train_batch(batch)           # UPDATED: every optimizer has made its updates
            # In each optimizer_step():
            feature.before_update(optimizer)
            optimizer.step()
            feature.after_update(optimizer)
        # The loop asks for the next batch, or returns:
        feature.before_commit()
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
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from raysgd._internal.context import OutOfMemoryError, PausedError
from raysgd._internal.nested import unchanged
from raysgd.callbacks.learning_rate import learning_rates
from raysgd.data.source import BatchSource
from raysgd.loop.evaluation import Evaluation, no_batch, weighted
from raysgd.loop.micro_batches import IndivisibleError
from raysgd.loop.operator_base import checked_result
from raysgd.loop.requests import TrainRequest
from raysgd.loop.signal import Signal
from raysgd.loop.state import Snapshots
from raysgd.loop.step import WarmedUp
from raysgd.loop.step_iterator import StepIterator
from raysgd.loop.train_state import TrainState
from raysgd.metrics import NUM_SAMPLES, NUM_SKIPPED_STEPS, Summary, merge_segments

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
        self.train_state: TrainState = operator._train_state
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
        self.results: list[tuple[int, Mapping[str, Any]]] = []
        # ends of epochs that the goal does not count: the call began just before one
        self._more_epochs = 0
        # committed and skipped steps as the call began
        self._began_at = 0
        self._skipped_before = 0
        # offset from which on covered samples are still to be counted; None between segments
        self._uncounted_from: int | None = None
        self.evaluation = Evaluation(self)
        self.snapshots = Snapshots(self.train_state)
        """Copies of the state for the driver."""
        self.num_covered: int | None = None
        """Samples that all workers have trained on in the call; None where that is unknown."""

    @property
    def segment(self) -> StepIterator | None:
        """The segment under way."""
        return self.train_state.segment

    def forget_iteration(self) -> None:
        """Let the next segment iterate over the loader anew, from where the epoch stands."""
        self.train_state.segment = self._batches = None

    def keep_iteration(self, moved: bool) -> None:
        """After a rejoin, go on in a loader that cannot be rewound, unless the position `moved`."""
        if moved or self._source is None or self._source.sharded:
            self.forget_iteration()

    @property
    def num_batches(self) -> int:
        """Batches finished in the segment, or the pass over the validation data, under way."""
        segment, validated = self.segment, self.evaluation.batches
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
        train_state = self.train_state
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
            "num_skipped": (self.train_state.num_skipped or 0) - self._skipped_before,
            "validation": self.evaluation.start,
        }

    def join_call(self, state: Mapping[str, Any]) -> None:
        """Take part in a call that others began; of what was measured there nothing is here."""
        if self._call != state["call"]:
            self.results = []
        self._call, self.num_covered = state["call"], state["num_covered"]
        self.scheduled = state["scheduled"]
        self._more_epochs = state["more_epochs"]
        self._began_at = state["began_at"]
        self._skipped_before = (self.train_state.num_skipped or 0) - state["num_skipped"]
        self.evaluation.start = state["validation"]

    # ---- train

    def train(self, request: TrainRequest) -> Mapping[str, Any] | None:
        """Train up to the goal of a request; return None if it paused where the request says."""
        train_state, logged = self.train_state, request.logged
        callback_pause = self.signal.callback_pause = request.callback_pause
        train_state.check_trained()
        train_state.step.check_whole(train_state.global_step)
        for feature in train_state.features:
            feature.begin_call(logs_steps=logged is not None)
        if self._call != request.call:
            self.begin(request.call)
        if request.split is not None:
            train_state.parts.raise_split(request.split)
        self.profile(request.profile)
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
                self.results, self.num_covered = [], 0
                left = request.start_step - train_state.global_step or left
            elif logged is not None and train_state.global_step < logged:
                left = logged - train_state.global_step  # repeated steps are counted apart
            self._train_segment(source, left, request.info)
        if source.sharded and train_state.offset and source.steps_left(train_state.offset) == 0:
            # it failed just before it ended the epoch
            self._train_segment(source, None, request.info)
        train_state.check_trained()  # again: it may have been unfrozen meanwhile
        if train_state.context.distributed:
            for feature in train_state.features:
                feature.sync_buffers()
        result = self.result()
        if (num_skipped := train_state.num_skipped) is not None:
            result[NUM_SKIPPED_STEPS] = num_skipped - self._skipped_before
        return result

    def measured(self, call: int, since: int | None = None) -> Mapping[str, Any] | None:
        """Return what was measured in a call so far; None where it has not come here.

        Of the segments from the step `since` on it comes with learning rates and norms.
        """
        if self._call != call or not self.results:
            return None
        if since is None:
            return self.result()
        found = merge_segments([metrics for start, metrics in self.results if start >= since])
        of_step = dict(learning_rates(self.operator))
        for feature in self.train_state.features:
            of_step |= feature.step_metrics()
        return Summary({**found, **of_step}, found.weights)

    def _left(self, until_epoch: int | None, until_step: int | None) -> int | None:
        """Return how many steps are left to the goal; None for as many as the epoch has."""
        train_state = self.train_state
        if until_epoch is not None and train_state.epoch >= until_epoch + self._more_epochs:
            return 0
        return None if until_step is None else max(0, until_step - train_state.global_step)

    def _train_segment(self, source: BatchSource, limit: int | None, info: Any) -> None:
        train_state, operator = self.train_state, self.operator
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
            raise no_batch("train", source, self._first_without_batch(source))
        train_state.meters = None
        try:
            with train_state.timers.record("train_epoch"):
                metrics = operator.train_epoch(segment, *by_position, **by_name)
            left = segment.finish()
        except IndivisibleError:  # the step is redone as a whole
            if segment.num_batches == 0:
                train_state.meters = None  # what it measured will be measured again
            self._settle_failure(segment, source)
            train_state.step.check_whole(train_state.global_step)
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
            num_batches = max(1, segment.num_batches)
            self.results.append((started_at, weighted(metrics, num_batches)))
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
        train_state = self.train_state
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
        batches = self._draw(source, self._ordered_as, train_state.offset)
        return StepIterator(
            train_state, source, batches, limit, left, go_on, self.signal, on_commit
        )

    @property
    def _ordered_as(self) -> int:
        """The epoch whose order the one under way has."""
        return 0 if self._repeats else self.train_state.epoch

    def _draw(self, source: BatchSource, epoch: int, offset: int) -> Iterator[Any]:
        """Yield what is left of an iteration, which begins when the first batch is asked for.

        Until then it is open whether the loop takes batches in parts.
        """
        in_parts = self.train_state.parts.in_use
        if self._batches is None or (source.sharded and in_parts != self._in_parts):
            self._batches = source.batches(epoch, offset, in_parts=in_parts)
            self._in_parts = in_parts
        for batch in self._batches:  # noqa: UP028  "yield from" would end it with this one
            yield batch

    def _every_rank(self, has_batch: bool) -> bool:
        self._has_batch = has_batch
        return bool(self.train_state.minimum(int(has_batch)))

    def _first_without_batch(self, source: BatchSource) -> int | None:
        """Return the first worker whose own loader is empty; None if the workers share one."""
        context = self.train_state.context
        if source.sharded or context.world_size == 1:
            return None
        own = context.world_size if self._has_batch else context.world_rank
        return int(self.train_state.minimum(own))

    def _settle_rest(self, source: BatchSource, left: list[Any]) -> None:
        """Take back the batches of a group that the loop left before its end."""
        warnings.warn(
            f"{type(self.operator).__name__}.train_epoch ended within an accumulation group, so "
            f"that the gradients of its last {len(left)} batches are dropped. Let it draw whole "
            f"groups of {self.train_state.accumulation_steps} batches.",
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
        meters = self.train_state.meters
        if meters is not None:
            # of what is trained again, all but the batch or part under way has been measured
            if meters.batch_count == segment.num_batches and len(again) < 2:
                self._compare_counts(meters.num_samples, segment)
            self.results.append((segment.start_step, meters.summary()))
        self.train_state.segment = None

    def _check_empty_segment(
        self, segment: StepIterator, source: BatchSource, limit: int | None
    ) -> None:
        """See why a segment had no batch: the loader is empty, was at its end, or was not asked."""
        name = f"{type(self.operator).__name__}.train_epoch"
        if segment.epoch_is_over and segment.start == 0:
            raise no_batch("train", source, self._first_without_batch(source))
        if segment.epoch_is_over:
            train_state = self.train_state
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
        offset = self.train_state.offset
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

    def warm_up(self) -> None:
        """Compute the gradients of one training batch, and leave everything as it was."""
        train_state, operator = self.train_state, self.operator
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

    def begin(self, call: int) -> None:
        """Begin a new call."""
        self._call, self.results, self.num_covered = call, [], 0
        self._more_epochs = 0
        self._began_at = self.train_state.global_step
        self._skipped_before = self.train_state.num_skipped or 0
        self.train_state.timers.reset()

    def profile(self, profile: bool) -> None:
        """Let timers run, or not."""
        timers = self.train_state.timers
        (timers.enable if profile else timers.disable)()

    def result(self) -> Summary:
        """Return the merged metrics of the call."""
        result = merge_segments([metrics for _, metrics in self.results])
        timers = self.train_state.timers
        profile = {"profile": timers.stats()} if timers.enabled else {}
        return Summary({**result, **profile}, result.weights)  # the caller's own


def _arguments_of(
    train_epoch: Callable[..., Any], info: Any, **others: Any
) -> tuple[list[Any], dict[str, Any]]:
    """Return what a ``train_epoch`` takes, by position and by name: older ones end at ``info``."""
    function = getattr(train_epoch, "__func__", None)
    # of a method it is asked once, since to ask takes as long as a small step
    accepted = _signature(train_epoch) if function is None else _signature_once(function)[1:]
    kinds = [parameter.kind for parameter in accepted]
    # by position, since older overrides call it what they like
    by_position = len(kinds) > 1 and kinds[1] in _POSITIONAL
    by_name = others if by_position else {"info": info, **others}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        names = {parameter.name for parameter in accepted}
        by_name = {name: value for name, value in by_name.items() if name in names}
    return [info] if by_position else [], by_name


def _signature(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    return tuple(inspect.signature(function).parameters.values())


_signature_once = functools.lru_cache(maxsize=16)(_signature)
