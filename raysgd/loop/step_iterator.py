"""A segment of training: the iterator that a loop draws batches from, and that counts steps."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from raysgd.data.partition import MicroBatch
from raysgd.data.source import BatchSource
from raysgd.loop.signal import Signal
from raysgd.loop.train_state import TrainState

__all__ = ["StepIterator"]

_NOTHING = object()


class StepIterator:
    """Yields the batches of one segment of training, and commits each step as the next begins.

    Asking for the next batch is what says that the step before is done; so loops that users
    write themselves are counted like the default one. With gradient accumulation batches come
    in groups, the update follows the last one of a group, and they are committed together. Where
    workers are missing, so that a worker's batch is larger, the default loop takes it in parts that
    make one update as well; and so it does where batches are split since memory ran out.

    Args:
        train_state: where the steps are counted.
        source: where the batches come from.
        batches: its batches from ``train_state.offset`` on.
        limit: the most batches of this segment; None for the rest of the epoch.
        steps_left: steps from ``train_state.offset`` to the end of the epoch; None where unknown.
        go_on: asks all ranks whether each of them has a batch; None where that is certain.
        signal: asks it to stop or to pause.
        on_commit: called after each update.
    """

    def __init__(
        self,
        train_state: TrainState,
        source: BatchSource,
        batches: Iterator[Any],
        limit: int | None,
        steps_left: int | None,
        go_on: Callable[[bool], bool] | None,
        signal: Signal,
        on_commit: Callable[[], None] | None = None,
    ) -> None:
        self._train_state = train_state
        self._source = source
        self._batches = batches
        self._steps_left = steps_left
        self._is_limited = limit is not None
        self.total_batches = min((n for n in (limit, steps_left) if n is not None), default=None)
        """Batches that this segment will have; None where that is unknown."""
        self._go_on = go_on
        self._on_commit = on_commit
        self.start_step = train_state.global_step
        """Committed steps as it begins."""
        self._started = time.perf_counter()
        self._signal = signal
        self._step = train_state.step
        # of the batch under way, where it is split
        self._parts: deque[tuple[Any, MicroBatch]] = deque()
        self.batch: Any = None
        """The batch under way, all parts of it."""
        self._places: Sequence[MicroBatch] | None = None
        train_state.parts.in_use = False
        self._next_batch = _NOTHING
        self._exhausted = False
        self._ended = False
        self._timers = train_state.timers if train_state.timers.enabled else None
        self.start = train_state.offset
        """Offset at which it begins."""
        self.paused = False
        """Whether it has ended for a pause."""
        self.num_batches = 0
        """Batches that are committed."""
        self.drawn_from = False
        """Whether a loop has asked for a batch."""
        self.loader_failed = False
        """Whether it was the loader that raised; it cannot be asked again then."""

    @property
    def step_s(self) -> float:
        """Mean seconds of a batch so far; 0 before the first is done."""
        num_finished = self.num_finished
        if not num_finished:
            return 0.0
        return (time.perf_counter() - self._started) / num_finished

    @property
    def num_finished(self) -> int:
        """Batches that are finished, also those whose update is still to come."""
        return self.num_batches + self._step.place.step

    @property
    def in_step(self) -> bool:
        """Whether a step is under way, and has not come to its end by what the loader raised."""
        return bool(self._step.batches) and not self.loader_failed

    @property
    def num_taken(self) -> int | None:
        """Samples of this worker in the batches that are committed; None where unknown."""
        in_parts = self._train_state.parts.in_use
        return self._source.num_taken(self.start, self.num_batches, in_parts)

    @property
    def epoch_is_over(self) -> bool:
        """Whether no batch of this epoch is left."""
        return self._exhausted or self.num_batches == self._steps_left

    @property
    def loop_ends_epoch(self) -> bool:
        """Whether the epoch is over, if the loop asks for no further batch.

        One that stops of its own will, where no number of steps was asked for, ends it.
        """
        if not self._ended and not self._is_limited:
            return True
        place = self._step.place
        under_way = place.step + place.ends_step if self._step.batches else 0
        return self.epoch_is_over or self.num_batches + under_way == self._steps_left

    def __iter__(self) -> StepIterator:
        return self

    def in_parts(self) -> StepIterator:
        """Let large batches come in parts, for a loop that does not care how many there are."""
        if not self.drawn_from:
            self._train_state.parts.in_use = self._train_state.parts.why_not is None
        return self

    def __next__(self) -> Any:
        self.drawn_from = True
        if self._step.batches and self._step.place.is_last:
            self._commit()
        self._signal.raise_stop()
        if self._parts:
            return self._next_part()
        if not self._step.batches and self._is_at_end():
            self._ended = True
            raise StopIteration
        batch, self._next_batch = self._next_batch, _NOTHING
        if batch is _NOTHING:
            batch = self._take()
        if batch is _NOTHING:
            self._ended = True
            raise StopIteration
        # what is shared out is read again by its offset
        self._step.draw(None if self._source.sharded else batch)
        place = self._next_place()
        self.batch = batch
        self._parts.extend(self._train_state.parts.split_batch(batch, place))
        return self._next_part()

    def _next_part(self) -> Any:
        part, place = self._parts.popleft()
        self._train_state.begin_batch(place)
        return part

    def _is_at_end(self) -> bool:
        if self._exhausted or self.num_batches == self.total_batches:
            return True
        pause = self._signal.pause  # which may be taken back at any moment
        self.paused = pause is not None and self.start_step + self.num_batches >= pause
        return self.paused

    def finish(self) -> list[Any]:
        """Settle the last step, when the loop has returned, and note where the epoch stands.

        Returns:
            Batches to train again: those of a group that the loop left before its end.
        """
        step = self._step
        lost = self._give_up() if step.batches and not step.place.is_last else []
        try:
            if step.batches:
                self._commit()
        finally:
            self._note_offset()
            self._train_state.end_segment()
        return lost

    def fail(self) -> list[Any]:
        """Settle the step in flight when the loop has raised; return batches to train again.

        The step counts if every optimizer has made its updates.
        """
        lost = [] if self._step.is_updated else self._give_up()
        self.finish()
        self._train_state.roll_back()
        return lost

    def _give_up(self) -> list[Any]:
        """Give up the group in flight; return its batches, and one that was taken ahead."""
        lost = self._step.batches + ([] if self._next_batch is _NOTHING else [self._next_batch])
        self._next_batch = _NOTHING
        self._forget_batch()
        self._train_state.roll_back()
        return lost

    def _forget_batch(self) -> None:
        self._parts.clear()
        self.batch = None

    def _next_place(self) -> MicroBatch:
        train_state, position = self._train_state, len(self._step.batches) - 1
        if position == 0:
            size = train_state.accumulation_steps
            left = None if self.total_batches is None else self.total_batches - self.num_batches
            self._planned = size if left is None else min(size, left)
            self._places = self._source.places(
                self._offset(), self._planned, train_state.parts.in_use
            )
        if self._places is not None:
            return self._places[position]
        is_last = position + 1 == self._planned
        if not is_last and not self._source.sharded:
            # the end of such a loader is known when it is met, whatever length it claims
            self._next_batch = self._take()
            is_last = self._next_batch is _NOTHING
        return MicroBatch(position, self._planned, is_last, step=position)

    def _take(self) -> Any:
        """Return the next batch, or nothing where this rank or another has none left."""
        try:
            timer = (
                contextlib.nullcontext() if self._timers is None else self._timers.record("data")
            )
            with timer, self._signal.waiting():
                batch = next(self._batches, _NOTHING)
        except BaseException:
            self.loader_failed = True
            raise
        if self._go_on is not None:
            self._next_batch = batch  # it is there again where a worker is lost as all are asked
            if not self._go_on(batch is not _NOTHING):
                batch = _NOTHING
            self._next_batch = _NOTHING
        if batch is _NOTHING:
            self._exhausted = True
            self._check_length()
        return batch

    def _check_length(self) -> None:
        """Refuse a loader that ends early if the other workers rely on its length."""
        train_state = self._train_state
        if self._steps_left is None or train_state.context.world_size == 1:
            return
        taken = self.num_batches + len(self._step.batches)
        raise RuntimeError(
            f"The train loader of worker {train_state.context.world_rank} ended after {taken} "
            f"of {self._steps_left} batches, and the other workers would wait for it. Correct its "
            "__len__, or leave that out. If its data set raises StopIteration, raise another error."
        )

    def _offset(self) -> int:
        return self._source.offset_after(self.start, self.num_batches)

    def _note_offset(self) -> None:
        self._train_state.offset = self._offset()

    def _commit(self) -> None:
        num_steps = self._step.place.step + 1
        try:
            self._train_state.commit(num_steps)
        finally:
            if not self._step.is_open:  # else it is no update
                self._forget_batch()
                self.num_batches += num_steps
        if self._on_commit is not None:
            self._note_offset()
            self._on_commit()
