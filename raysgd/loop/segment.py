"""A segment of training: what one call of ``train_epoch`` trains. It counts the steps."""

import contextlib
import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from raysgd._internal.nested import describe
from raysgd._internal.step_timing import DATA, OTHER
from raysgd.data.partition import MicroBatchPlan
from raysgd.data.source import BatchSource, SourceBatch
from raysgd.loop.loop_control import LoopControl
from raysgd.loop.sources import empty_loader_error
from raysgd.loop.train_state import TrainState


@dataclass(eq=False, repr=False)
class Segment(Iterator[Any]):
    """Yields its batches to ``train_epoch``, and commits each update when the next one begins.

    The request for the next batch shows that the previous update is done. Therefore loops of users
    need not count steps. A segment has updates. An update has one step, or several with gradient
    accumulation, which are committed together. A step is split at two places:

    - The source yields several batches for it, each planned as a micro-batch, if workers are
      missing, or with equal bits.
    - `MicroBatching` splits each batch of the source if memory ran out.

    The way of a batch: `BatchSource.read` of the loader, `_prefetch`, `_draw_batch` with the
    plan, `MicroBatching.split_batch`, `TrainState.begin_micro_batch`, and ``train_batch``, whose
    part is in `Update`. After the next request: `commit_if_done`, and `TrainState.commit`.

    It continues with the unread batches of the source, if there are any. The functions
    `after_commit` run after each commit, unless ``train_epoch`` has raised.
    """

    _train_state: TrainState
    source: BatchSource
    _control: LoopControl
    max_steps: int | None = None  # of the segment
    steps_left: int | None = None  # of the epoch; None if unknown
    after_commit: Sequence[Callable[[], None]] = ()
    read_limit: int | None = None  # steps to read of a new iteration; None for all
    pause_step: float = math.inf  # number of committed steps at which to pause
    break_ends_epoch: bool = True  # if train_epoch stops before `max_steps`

    def __post_init__(self) -> None:
        train_state = self._train_state
        # For each batch, the ranks compare samples, or agree whether all of them have one.
        source, is_group = self.source, train_state.context.world_size > 1
        self._compares_samples = is_group and source.compares_samples
        self._agrees = is_group and not source.is_partitioned and self.steps_left is None
        limits = [n for n in (self.max_steps, self.steps_left) if n is not None]
        self.total_steps = min(limits, default=None)  # of this segment; None if unknown
        self._update, self._position = train_state.update, train_state.position
        self.start_step, self.start_offset = self._position.global_step, self._position.offset
        self.num_committed, self.was_read, self.has_paused = 0, False, False
        self.may_split = False  # train_epoch takes micro-batches, by `allow_split`
        self.has_loader_failed = False  # its iterator raised an error and cannot continue
        self._is_exhausted = False  # some rank has no more batches in the epoch
        self._started = time.perf_counter()
        self.batch: Any = None  # the newest batch of the update
        self.num_collated_samples: int | None = None  # of it, if this worker trains all of them
        # Batches of the update, until the commit. None: a partitioned source can read it again.
        self._drawn: list[SourceBatch | None] = []
        self._micro_batches: deque[tuple[Any, MicroBatchPlan]] = deque()  # not yet yielded
        self._prefetched: SourceBatch | None = None  # until an update has it

    def __next__(self) -> Any:
        self.was_read = True
        self._train_state.step_timing.begin(OTHER)
        self.commit_if_done()
        if self._update.is_open or not self.epoch_is_over:  # otherwise, count the epoch first
            self._control.raise_if_interrupted()
        if not self._micro_batches:
            self._draw_batch()
        samples, micro_batch = self._micro_batches.popleft()
        num_batches = len(self._update.plan.micro_batches)
        batch_is_last = self._is_exhausted or len(self._drawn) == num_batches
        self._train_state.begin_micro_batch(micro_batch, batch_is_last and not self._micro_batches)
        self._train_state.step_timing.begin(self._train_state.step_timing.batch_phase)
        return samples

    def commit_if_done(self, raised: bool = False) -> None:
        """Commit the update in progress if it counts, although it may have `raised`."""
        if not self._update.should_commit(raised):
            return
        num_steps = self._update.micro_batch.step_index + 1
        offset = self.source.offset_after(self.start_offset, self.num_committed + num_steps)
        try:
            self._train_state.commit(num_steps, offset)
        finally:
            if not self._update.is_open:
                self.batch, self._drawn = None, []
                self.num_committed += num_steps
        if not raised:
            for function in self.after_commit:
                function()

    def _draw_batch(self) -> None:
        """Add a batch to the update, in micro-batches. Raise StopIteration if the segment ends."""
        has_failed = self.has_loader_failed or self._update.is_committing
        can_read = self._prefetched is None and not has_failed
        if can_read and not self._drawn:  # another update, unless the segment ends
            is_over = self._is_exhausted or self.num_committed == self.total_steps
            pause_step = min(self.pause_step, self._control.driver_pause_step)
            self.has_paused = not is_over and self.start_step + self.num_committed >= pause_step
            can_read = not (is_over or self.has_paused)
        if can_read:
            self._prefetch()
        if (source_batch := self._prefetched) is None:
            raise StopIteration
        self._prefetched = None
        self._drawn.append(None if self.source.is_partitioned else source_batch)
        number, train_state = len(self._drawn), self._train_state
        if number == 1:  # the first batch plans the whole update
            num_steps = train_state.accumulation_steps
            if self.total_steps is not None:
                num_steps = min(num_steps, self.total_steps - self.num_committed)
            plan = source_batch.plan or self.source.plan(self._position.offset, num_steps)
            self._update.begin(plan)
        planned = self._update.plan.micro_batches
        if not self.source.is_partitioned and number < len(planned):
            self._prefetch()  # the loader may end before its claimed length
        micro_batch, splitting = planned[number - 1], train_state.micro_batching
        trains_all = splitting.num_splits == 1 and not micro_batch.is_repeated
        self.batch = source_batch.content
        self.num_collated_samples = source_batch.num_collated_samples if trains_all else None
        self._micro_batches.extend(splitting.split_batch(source_batch, micro_batch, self.may_split))

    def _prefetch(self) -> None:
        """Prefetch a batch, unless any rank has no more batches."""
        timing = self._train_state.step_timing
        timing.begin(DATA)
        try:
            self._prefetched = self._control.next_batch(self._batches, None)
        except BaseException:
            self.has_loader_failed = True
            raise
        timing.begin(OTHER)
        has_batch, collectives = self._prefetched is not None, self._train_state.collectives
        if not (has_batch or self.start_offset or self.num_committed or self._drawn):
            raise empty_loader_error("train", self.source)
        # `_prefetched` keeps the batch if a worker is lost during this collective.
        if self._compares_samples:
            self.source.check_same_samples(collectives)
        elif self._agrees and not collectives.all_reduce_min(int(has_batch))[0]:
            self._prefetched = None
        if self._prefetched is None:
            self._is_exhausted = True
            context, taken = self._train_state.context, self.num_committed + len(self._drawn)
            if self.steps_left is not None and context.world_size > 1:
                raise RuntimeError(
                    f"The train loader of worker {context.world_rank} ended after {taken} of "
                    f"{self.steps_left} batches, and other workers would wait for more. Correct or "
                    "remove __len__ of the loader. Its data set must not raise StopIteration."
                )

    @functools.cached_property
    def _batches(self) -> Iterator[SourceBatch]:
        """The batches of the source, from the time when `allow_split` can no longer be called."""
        position, source = self._position, self.source
        source.change_partition(may_split=self.may_split)
        if source.unread is None:
            source.unread = source.read(position.epoch, position.offset, self.read_limit)
        return source.unread

    def finish(self) -> None:
        """End the segment after ``train_epoch`` has returned."""
        self.commit_if_done()
        if self.has_loader_failed:
            raise RuntimeError(
                "train_epoch caught an error of its loader, which cannot continue. Raise the error "
                "again, or skip broken samples in the data set."
            )
        if self._update.is_committing:
            raise RuntimeError(
                "train_epoch caught an error at the end of an update, which therefore does not "
                "count. Raise the error again."
            )
        if self._update.is_open:
            raise RuntimeError(
                "train_epoch ended within an accumulation group, before the update. Draw whole "
                f"groups of {len(self._update.plan.micro_batches)} batches from the iterator."
            )
        if self._update.optimizer_steps.came_late and self.num_committed:
            text = "train_epoch must train a batch before it draws the next, or failures lose it"
            self._train_state.settings.warn_once("late", f"{text}, and EMA does not see it.")
        if self.epoch_is_over:
            # Code of the loader after its last batch may matter.
            rest = self._control.next_batch(self._batches, None)
            if rest is not None and self.source.steps_left(self._position.offset) == 0:
                text = "Epochs end after len(loader) batches and leave out the rest of %s."
                self._train_state.settings.warn_once("length", text, self.source.describe())

    def end_after_error(self) -> None:
        """Undo the update in progress, unless it counts. The source gives its batches again."""
        with contextlib.suppress(Exception):  # the error of train_epoch is raised
            self.commit_if_done(raised=True)
        again = [each for each in (*self._drawn, self._prefetched) if each is not None]
        self._micro_batches.clear()
        # Also after a commit, because code after the update may have changed buffers.
        self._train_state.roll_back()
        if self.has_loader_failed:
            self.source.end_processes()  # the next iteration begins at the offset
        self.source.give_back(again)

    @property
    def epoch_is_over(self) -> bool:
        return self._is_exhausted or self.num_committed == self.steps_left

    @property
    def ends_epoch(self) -> bool:
        """Whether the epoch is over if ``train_epoch`` asks for no further batch."""
        update, goes_on = self._update, self.has_paused or self.has_loader_failed
        done = self.num_finished_steps + (update.is_open and update.micro_batch.ends_step)
        stops_early = self.break_ends_epoch and done != self.max_steps and not goes_on
        return stops_early or self.epoch_is_over or done == self.steps_left

    @property
    def num_finished_steps(self) -> int:
        """Number of finished steps, including steps that wait for their update."""
        return self.num_committed + self._update.micro_batch.step_index

    @property
    def step_s(self) -> float:
        """Mean seconds per step so far. 0 before the first step is done."""
        done = self.num_finished_steps
        return (time.perf_counter() - self._started) / done if done else 0.0

    def describe_position(self) -> str:
        """Return the step in progress, and its batch, as text."""
        done, batch = self.start_step + self.num_finished_steps, describe(self.batch)
        if self.has_loader_failed:
            return f"when reading the batch of step {done + 1}"
        return f"after step {done}" if self.batch is None else f"in step {done + 1}, batch {batch}"


def allow_split(iterator: Iterable[Any]) -> Iterable[Any]:
    """Allow the iterator of a segment to split large batches."""
    if isinstance(iterator, Segment) and not iterator.was_read:
        iterator.may_split = iterator._train_state.micro_batching.why_not_split is None
    return iterator
