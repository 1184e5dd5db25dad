"""The calls ``train`` and ``validate`` on one worker: segments of epochs up to a goal."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from raysgd.context import PausedError
from raysgd.data import Dataset
from raysgd.data.source import Source
from raysgd.loop.registration import Registration
from raysgd.loop.signal import Signal
from raysgd.loop.snapshots import Snapshots
from raysgd.loop.steps import Steps
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
        self._registration: Registration = operator._registration
        self._batches: Iterator[Any] | None = None
        self._signature: tuple[Any, tuple[bool, frozenset[str] | None]] = (None, (True, None))
        self._call = -1
        self._segments: list[Mapping[str, Any]] = []
        # ends of epochs that the goal does not count: the call began just before one
        self._more_epochs = 0
        # committed and skipped steps as the call began
        self._began_at = 0
        self._skipped_before = 0
        self._validation_batches: _Counted | None = None
        self._validation_start: tuple[int, int] | None = None
        # whether the workers' orders were the same in the epoch before
        self._orders_agree = False
        # offset at which the segment under way began
        self._start: int | None = None
        self._shared_out = True
        self._source: Source | None = None
        self.read: Source | None = None
        """What the newest call reads."""
        self.snapshots = Snapshots(None)
        """Copies of the state for the driver; none until the runner says how often."""
        self.num_covered: int | None = None
        """Samples that all workers have trained on in the call; None where that is unknown."""

    @property
    def steps(self) -> Steps | None:
        """The segment under way."""
        return self._registration.steps

    def forget_iteration(self) -> None:
        """Let the next segment iterate over the loader anew, from where the epoch stands."""
        self._registration.steps = self._batches = None

    def keep_iteration(self, moved: bool) -> None:
        """After a rejoin, go on in a loader that cannot be rewound, unless the position `moved`."""
        if moved or self._shared_out:
            self.forget_iteration()

    @property
    def num_batches(self) -> int:
        """Batches finished in the segment, or the pass over the validation data, under way."""
        steps, validated = self.steps, self._validation_batches
        if steps is not None:
            return steps.num_finished
        return 0 if validated is None else validated.count

    def call_state(self) -> dict[str, Any]:
        """Return what the call under way has reached, for workers that join it."""
        covered = self.num_covered
        if covered is not None and self._start is not None:
            covered = _added(covered, self._between(self._start))
        return {
            "call": self._call,
            "num_covered": covered,
            "began_at": self._began_at,
            "more_epochs": self._more_epochs,
            "num_skipped": self._registration.num_skipped - self._skipped_before,
            "validation": self._validation_start,
        }

    def join_call(self, state: Mapping[str, Any]) -> None:
        """Take part in a call that others began; of what was measured there nothing is here."""
        if self._call != state["call"]:
            self._segments = []
        self._call, self.num_covered = state["call"], state["num_covered"]
        self._more_epochs = state["more_epochs"]
        self._began_at = state["began_at"]
        self._skipped_before = self._registration.num_skipped - state["num_skipped"]
        self._validation_start = state["validation"]

    def forget_validation(self) -> None:
        """Let a validation that is repeated begin at the position that was loaded."""
        self._validation_start = None

    # ---- train

    def train(
        self,
        call: int,
        until_epoch: int | None,
        until_step: int | None,
        info: dict[str, Any] | None,
        profile: bool,
        dataset: Dataset | None,
    ) -> Mapping[str, Any]:
        """Train until so many epochs are completed, or so many steps are done, in all."""
        self._registration.check_averaged()
        if self._call != call:
            self._begin(call)
        self._profile(profile)
        source, changed = self._registration.training_source(dataset)
        if changed:
            self.forget_iteration()
        self._shared_out, self._source = source.sharded, source
        self.read = source
        while (limit := self._left(until_epoch, until_step)) != 0:
            pause = self.signal.pause
            if pause is not None and self._registration.global_step >= pause:
                raise PausedError
            self._train_segment(source, limit, info)
        self._registration.check_averaged()  # again: it may have been unfrozen meanwhile
        if self._registration.context.distributed:
            self._registration.sync_buffers()
        result = self._result()
        if self._registration.scales:
            result[NUM_SKIPPED_STEPS] = self._registration.num_skipped - self._skipped_before
        return result

    def _left(self, until_epoch: int | None, until_step: int | None) -> int | None:
        """Return how many steps are left to the goal; None for as many as the epoch has."""
        registration = self._registration
        if until_step is not None:
            return max(0, until_step - registration.global_step)
        assert until_epoch is not None
        return 0 if registration.epoch >= until_epoch + self._more_epochs else None

    def _train_segment(self, source: Source, limit: int | None, info: Any) -> None:
        registration, operator = self._registration, self.operator
        start = self._start = registration.offset
        self.snapshots.maybe_take(registration, operator, self.call_state)
        by_position, by_name = self._train_epoch_takes(
            {"info": info, "num_steps": limit, "epoch_idx": registration.epoch}
        )
        steps = registration.steps = self._new_steps(source, limit)
        if steps.total_batches == 0 and start == 0:
            raise _empty("train", source)
        registration.meters = None
        try:
            metrics = operator.train_epoch(steps, *by_position, **by_name)
            left = steps.finish()
        except BaseException:
            self._settle_failure(steps, source, start)
            raise
        if left:
            self._settle_rest(source, left)
        self._cover(source, start)
        self._segments.append(_checked_result(operator.train_epoch, metrics))
        self._compare_counts(metrics.get(NUM_SAMPLES), steps, source, start)
        if steps.num_batches == 0:
            del self._segments[-1]
            if not steps.paused:
                self._check_empty_segment(steps, source, start, limit)
        # a loop that stops early of its own will has ended its epoch
        self._registration.steps = None
        if steps.epoch_is_over or (limit is None and not steps.paused):
            registration.offset = 0
            registration.epoch += 1
            self._batches = None

    def _train_epoch_takes(self, arguments: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return those that the signature of ``train_epoch`` takes: older ones end after ``info``.

        Returns:
            What goes by position, and what by name.
        """
        method = self.operator.train_epoch
        if method != self._signature[0]:  # reading it takes as long as a step of a small model
            self._signature = method, _taken_by(method)
        info_by_name, taken = self._signature[1]
        by_position = [] if info_by_name else [arguments.pop("info")]
        return by_position, {n: v for n, v in arguments.items() if taken is None or n in taken}

    def _settle_rest(self, source: Source, left: list[Any]) -> None:
        """Take back the batches of a group that the loop left before its end."""
        warnings.warn(
            f"{type(self.operator).__name__}.train_epoch ended within an accumulation group, so "
            f"that the gradients of its last {len(left)} batches are dropped. Let it draw whole "
            f"groups of {self._registration.accumulation_steps} batches.",
            RuntimeWarning,
            stacklevel=2,
        )
        self._batches = None if source.sharded else itertools.chain(left, self._batches or ())

    def _settle_failure(self, steps: Steps, source: Source, start: int) -> None:
        """Keep what a segment has reached, and what is measured of it, when it has raised."""
        again = steps.fail()
        self._cover(source, start)
        meters = self._registration.meters
        if meters is not None and meters.batch_count == steps.num_batches:
            self._compare_counts(meters.num_samples, steps, source, start)
        if steps.loader_failed:
            source.close_workers()  # its processes may be gone
        if source.sharded or steps.loader_failed:
            self._batches = None  # the offset says where to go on
        else:
            self._batches = itertools.chain(again, self._batches or ())
        if self._registration.meters is not None:
            self._segments.append(self._registration.meters.summary())
        self._registration.steps = None

    def _check_empty_segment(
        self, steps: Steps, source: Source, start: int, limit: int | None
    ) -> None:
        """See why a segment had no batch: the loader is empty, was at its end, or was not asked."""
        if steps.epoch_is_over and start == 0:
            raise _empty("train", source)
        if steps.epoch_is_over:
            if self._registration.global_step == self._began_at:
                # the call before stopped or failed exactly at the end of its epoch, and could not
                # know that it was the end; this one has not done anything yet
                self._more_epochs += 1
        elif limit is None:
            warnings.warn(
                f"{type(self.operator).__name__}.train_epoch took no batch from the iterator that "
                "it is given: no step was counted, and the epoch counts as done.",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            raise RuntimeError(
                f"{type(self.operator).__name__}.train_epoch took no batch from its iterator, so "
                "num_steps cannot be counted. Iterate over the iterator that it is given."
            )

    def _cover(self, source: Source, start: int) -> None:
        """Count the samples from `start` on, which the whole group has trained on."""
        self._start = None
        if not source.sharded or self.num_covered is None:
            self.num_covered = None
        else:
            self.num_covered = _added(self.num_covered, self._between(start))

    def _compare_counts(self, counted: Any, steps: Steps, source: Source, start: int) -> None:
        """See whether the user counts what offsets count, and not tokens, or batches as items."""
        taken = source.num_taken(start, steps.num_batches)
        if taken is not None and isinstance(counted, int | float) and counted != taken:
            self.num_covered = None

    def _between(self, start: int) -> int | None:
        """Return the samples from `start` to where the epoch stands."""
        if self._source is None:
            return None
        return self._source.num_samples(start, self._registration.offset)

    def _new_steps(self, source: Source, limit: int | None) -> Steps:
        registration = self._registration
        left = source.steps_left(registration.offset)
        go_on: Callable[[bool], bool] | None = None
        if not source.sharded and registration.context.world_size > 1:
            # such loaders may differ in length: all end with the first, or it would be waited for
            if left is not None:
                left = registration.minimum(left)
            else:
                go_on = self._every_rank
        if self._batches is None:
            self._check_order(source)
            self._batches = source.batches(registration.epoch, registration.offset)
        on_commit = None
        if self.snapshots.each_step:
            on_commit = partial(
                self.snapshots.maybe_take, registration, self.operator, self.call_state
            )
        return Steps(
            registration, source, self._batches, limit, left, go_on, self.signal, on_commit
        )

    def _check_order(self, source: Source) -> None:
        """See that all ranks share out one order: a user's sampler or generator may differ."""
        registration, epoch = self._registration, self._registration.epoch
        rank, size = registration.context.world_rank, registration.context.world_size
        if not source.sharded:
            return
        if size == 1:
            self._orders_agree = True  # with who joins later, whose sampler begins anew
            return
        was_drawn = source.has_order(epoch)
        digest = source.order_digest(epoch)
        if digest is None:
            return
        if registration.minimum(digest) != -registration.minimum(-digest):
            if registration.minimum(-int(self._orders_agree)) == 0:
                raise RuntimeError(
                    f"The workers' orders of epoch {epoch} differ, as "
                    f"{type(source.loader.sampler).__name__} gives them, so that samples would be "
                    "repeated and left out. If the DataLoader has a generator, seed it alike on "
                    "all workers, or leave it out. Let a sampler of your own draw from a "
                    "torch.Generator that is its `generator`, from the global generators of "
                    "torch, numpy or random, which are seeded alike on all workers meanwhile, or "
                    "from what set_epoch(epoch) tells it. If it gives each worker a part of its "
                    "own, pass add_dist_sampler=False to the trainer."
                )
            # the orders were the same before: the sampler of a worker that has joined since has
            # drawn less often
            leader = registration.minimum(rank if was_drawn else size) % size
            order = registration.from_rank(lambda: source.order(epoch), leader)
            source.take_order(epoch, order)
        self._orders_agree = True

    def _every_rank(self, has_batch: bool) -> bool:
        return bool(self._registration.minimum(int(has_batch)))

    # ---- validate

    def validate(
        self, call: int, num_steps: int | None, info: dict[str, Any] | None, profile: bool
    ) -> Mapping[str, Any]:
        """Evaluate the rest of the validation loader, or `num_steps` steps, round and round.

        A `call` that is made again, since it failed here or on another worker, begins where it did.
        """
        self._begin(call)
        self._profile(profile)
        self.num_covered = None
        registration, operator = self._registration, self.operator
        source = self.read = registration.source("validation")
        if self._validation_start is None or self._validation_start[0] != call:
            self._validation_start = call, registration.validation_offset
        offset, left = self._validation_start[1], num_steps
        with registration.validating():
            while left is None or left > 0:
                ahead = source.steps_left(offset)
                limit = min((n for n in (left, ahead) if n is not None), default=None)
                taken_from = source.batches(0, offset, limit)
                batches = self._validation_batches = _Counted(taken_from, self.signal)
                try:
                    metrics = operator.validate(batches, info)
                except BaseException:
                    source.close_workers()
                    raise
                self._segments.append(_checked_result(operator.validate, metrics))
                # sized loader: count the group's steps, not this rank's batches
                taken = batches.count if ahead is None or limit is None else limit
                if offset == 0 and (ahead == 0 or (batches.exhausted and taken == 0)):
                    raise _empty("validation", source)
                is_end = limit is None or taken < limit or taken == ahead
                offset = 0 if is_end else source.offset_after(offset, taken)
                if left is None or (taken == 0 and not batches.exhausted):
                    break
                left -= taken
        registration.validation_offset = offset
        self._validation_batches = None
        return self._result()

    # ---- results

    def _begin(self, call: int) -> None:
        self._call, self._segments, self.num_covered = call, [], 0
        self._more_epochs = 0
        self._began_at = self._registration.global_step
        self._skipped_before = self._registration.num_skipped
        self._registration.timers.reset()

    def _profile(self, profile: bool) -> None:
        timers = self._registration.timers
        if profile:
            timers.enable()
        else:
            timers.disable()

    def _result(self) -> Summary:
        result = merge_segments(self._segments)
        timers = self._registration.timers
        if timers.enabled:
            return Summary({**result, "profile": timers.stats()}, result.weights)
        return result


def _added(total: int, more: int | None) -> int | None:
    return None if more is None else total + more


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
            batch = next(self._batches)
        except StopIteration:
            self.exhausted = True
            raise
        self.count += 1
        return batch


def _taken_by(train_epoch: Callable[..., Any]) -> tuple[bool, frozenset[str] | None]:
    """Return whether ``info`` goes by name, and the names that are taken; None where all are."""
    accepted = inspect.signature(train_epoch).parameters
    kinds = [parameter.kind for parameter in accepted.values()]
    # by position, since older overrides call it what they like
    by_name = len(kinds) < 2 or kinds[1] not in _POSITIONAL
    return by_name, None if inspect.Parameter.VAR_KEYWORD in kinds else frozenset(accepted)


def _checked_result(method: Callable[..., Any], result: Any) -> Mapping[str, Any]:
    """Return what an operator's method returned, if it is a dict of metrics."""
    if not isinstance(result, Mapping):
        raise TypeError(
            f"{method.__qualname__} returned {type(result).__name__}; it must return a dict of "
            "metrics (which may be empty)."
        )
    return result


def _empty(name: str, source: Source) -> RuntimeError:
    if isinstance(source.loader, Iterator):
        return RuntimeError(
            f"The {name} loader gives no more batch: {source.describe()}. An iterator, such as a "
            "generator, can be read once: register something that iter() starts again, like a "
            "DataLoader, a list or an object whose __iter__ is the generator."
        )
    return RuntimeError(
        f"The {name} loader gives no batch: {source.describe()}. Use more data, a smaller batch "
        "size or drop_last=False."
    )
