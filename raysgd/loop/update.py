"""One update of the optimizers: its micro-batches, the weights of its losses, and its end.

A step is one batch of the loader on each worker; `global_step` counts steps. An update has one
step, or several with gradient accumulation. A step has several micro-batches if its batch is split,
or with equal bits. The life of an update, with the hooks of features::

    for batch in segment:                  # update.begin(plan), then OPEN with its first batch
        feature.begin_update(update)
        feature.begin_micro_batch(update)
        operator.train_batch(batch)        # each backward() and optimizer_step(): see `Update`
        # The loop asks for the next batch, or returns:
        if update.should_commit():
            feature.before_commit(update)  # COMMITTING
            update.commit()                # COMMITTED: the steps count
            feature.commit(update)
            update.close()                 # CLOSED

    if train_epoch raises:
        if update.should_commit(raised=True):
            ...                            # as above
        feature.roll_back(update)          # restores what changed since the last commit
        update.close()                     # CLOSED: the next attempt repeats its batches
        raise
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, TypedDict

from raysgd.data.partition import MicroBatch, UpdatePlan
from raysgd.metrics import is_numeric


class WarmedUp(BaseException):
    """Raised when a warm-up has computed its gradients. User code must not catch it."""


class MicroBatchMetrics(NamedTuple):
    """What a micro-batch adds to the meters."""

    metrics: Mapping[str, Any]
    weight: float
    ends_step: bool


class BadStep(TypedDict):
    """An update that counts, but is not applied. Users see it in ``trainer.bad_steps``."""

    step: int  # the last one of the update
    epoch: int  # from 1
    reason: str
    value: Any  # the norm of gradients as text, or a loss that jumped
    samples: list[Any]  # of all workers, as `BatchSource.sample_ids`


class UpdateState(Enum):
    """The states of an update, and what follows each."""

    CLOSED = auto()  # OPEN, by `begin_micro_batch`
    OPEN = auto()  # OPEN, COMMITTING by `begin_commit`, or CLOSED by `close`
    COMMITTING = auto()  # COMMITTED by `commit`, or CLOSED by `close` after a roll-back
    COMMITTED = auto()  # CLOSED, by `close`


_NO_PLAN, _NO_BATCH = UpdatePlan(), MicroBatch()


class Update:
    """The update in progress on this worker, up to its commit or roll-back.

    The loop begins each micro-batch, and passes the update to the hooks of all features. Without a
    loop, each batch has its own, which never opens. Each worker has one object for all updates,
    from `begin` to `close`.

    What happens between a backward pass and the commit, and the file that calls each method, in
    PyTorch. With one micro-batch, `add` to `end` may repeat, for other losses and optimizers:

    ========================  ==========================  =========================================
    method                    called in                   effect
    ========================  ==========================  =========================================
    `begin_micro_batch`       loop/train_state            earlier gradients are out of ``.grad``
    `LossWeights.add`         torch/optimization          they return, and factors weight them and
                                                          the loss. Workers average gradients in the
                                                          last micro-batch: here, or before `begin`
    `OptimizerSteps.request`  torch/optimization          ``requested`` has the optimizer. Before
                                                          the last micro-batch, the step ends here
    `mark_bad`                torch/features/bad_steps    no step is made, as without items on all
                                                          workers: ``lack_items`` is set
    `OptimizerSteps.begin`    torch/optimization          ``running_optimizer`` is it, as in
                                                          ``optimizer.step()`` of user code
    `OptimizerSteps.end`      torch/optimization          ``counts`` has the step, even if skipped
    `hold_metrics`            loop/operator_base          the metrics wait for the commit
    `should_commit`           loop/segment                asked when the loop requests a batch
    `begin_commit`            loop/train_state            features may refuse in ``before_commit``
    `commit`                  loop/train_state            the steps count
    ========================  ==========================  =========================================
    """

    def __init__(self, has_fixed_parts: bool = False) -> None:
        self.has_fixed_parts = has_fixed_parts
        """Whether workers add up gradients and counts of parts, and average neither. The commit
        gives each worker the metrics of all workers, and the update counts then."""
        self.is_warm_up = False  # the update ends before an optimizer updates
        self.is_damaged = False  # an update or a load left changes that no feature could restore
        self.loss_weights = LossWeights(self)
        self.optimizer_steps = OptimizerSteps(self)
        self.close()

    def begin(self, plan: UpdatePlan) -> None:
        """Begin an update, which opens with its first micro-batch."""
        self.plan = plan
        self.loss_weights.reset()  # user code may have used both after the last update
        self.optimizer_steps.reset()

    def close(self) -> None:
        """Forget the update, after its commit or roll-back."""
        self.state = UpdateState.CLOSED
        self.plan = _NO_PLAN
        self.num_splits = 1  # after memory ran out, planned micro-batches are split too
        self.bad_step: BadStep | None = None  # why it counts, but nothing is applied
        self.held_metrics: list[MicroBatchMetrics] = []  # until the update counts
        self.index = -1  # of the current micro-batch; -1 before the first
        self.micro_batch, self.in_last_micro_batch, self.begins_step = _NO_BATCH, True, True
        self.loss_weights.reset()
        self.optimizer_steps.reset()

    def begin_micro_batch(self, micro_batch: MicroBatch, is_last: bool = True) -> None:
        """Begin a micro-batch, and open the update. If this `is_last`, the update ends with it."""
        self.index += 1
        self.begins_step = not self.index or micro_batch.step_index > self.micro_batch.step_index
        self.state = UpdateState.OPEN
        self.micro_batch, self.in_last_micro_batch = micro_batch, is_last
        self.num_splits = max(self.num_splits, micro_batch.num_in_batch)
        self.optimizer_steps.requested = set()
        self.loss_weights.begin_micro_batch()

    @property
    def is_open(self) -> bool:
        """Whether it has batches, and was neither committed nor undone."""
        return self.state in (UpdateState.OPEN, UpdateState.COMMITTING)

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of the update."""
        return len(self.plan.micro_batches) * self.num_splits

    @property
    def is_split(self) -> bool:
        """Whether batches are split into micro-batches."""
        return len(self.plan.micro_batches) * self.num_splits > self.plan.num_steps

    @property
    def has_one_micro_batch(self) -> bool:
        """Whether the update has only this micro-batch. Always false with fixed parts."""
        return self.index <= 0 and self.in_last_micro_batch and not self.has_fixed_parts

    def should_commit(self, raised: bool = False) -> bool:
        """Return whether the update counts on this worker, if the loop now ends it.

        ========================================  =============  =============  =============
        the loop ...                              asks for more  returns        has `raised`
        ========================================  =============  =============  =============
        before the last micro-batch               it continues   an error       it is undone
        in the last micro-batch                   it is counted  it is counted  it is undone
        there, if `optimizer_steps.are_complete`  it is counted  it is counted  it is counted
        after a feature has refused it            -              -              it is undone
        ========================================  =============  =============  =============
        """
        is_done = self.state is UpdateState.OPEN and self.in_last_micro_batch
        return is_done and (not raised or self.optimizer_steps.are_complete)

    def hold_metrics(self, metrics: Iterable[MicroBatchMetrics]) -> None:
        """Hold metrics until the update counts."""
        self.held_metrics += metrics

    def release_metrics(self) -> list[MicroBatchMetrics]:
        """Return the held metrics, which count now. Numbers of a bad step count for no samples."""
        held, self.held_metrics = self.held_metrics, []
        for index, (metrics, _, ends_step) in enumerate(held if self.bad_step is not None else ()):
            kept = {k: v for k, v in metrics.items() if is_numeric(v) and not getattr(v, "ndim", 0)}
            held[index] = MicroBatchMetrics(kept, 0, ends_step)
        return held

    def mark_bad(self, bad_step: BadStep) -> None:
        """Let the update count without being applied, for a reason in this record."""
        self.bad_step = bad_step

    def set_damaged(self, is_damaged: bool) -> None:
        """Record whether the state has changes that no feature can restore."""
        self.is_damaged = is_damaged

    def begin_warm_up(self) -> None:
        """Let the updates end before an optimizer steps."""
        self.is_warm_up = True

    def begin_commit(self) -> None:
        """Let features refuse the update, before `commit`."""
        self.state = UpdateState.COMMITTING

    def commit(self) -> None:
        """Make the steps of this update count. `close` follows, after the hooks of features."""
        self.state = UpdateState.COMMITTED
        for key, count in self.optimizer_steps.counts.items():
            if count > self.optimizer_steps.max_counts.get(key, count):
                self.optimizer_steps.max_counts[key] = count


class OptimizerSteps:
    """Counts the steps of optimizers in an update, and knows the most of any earlier update."""

    def __init__(self, update: Update) -> None:
        self._update = update
        self.max_counts: dict[int, int] = {}
        """Most steps of an update that counted, at least 1, by the ID of a registered optimizer."""
        self.reset()

    def expect(self, optimizers: Sequence[Any]) -> None:
        """Expect steps of the registered optimizers."""
        self.max_counts = dict.fromkeys(map(id, optimizers), 1)

    def reset(self) -> None:
        self.running_optimizer: Any = None  # the optimizer whose step runs
        self.requested: set[int] = set()
        """IDs of the optimizers whose step was requested in this micro-batch."""
        self.counts: defaultdict[int, int] = defaultdict(int)
        """Number of steps by the ID of each optimizer that has stepped."""
        self.are_skipped = False  # all of them, for lack of items
        self.came_late = False  # after the end of the update

    def request(self, optimizer: Any) -> bool:
        """Record the request of a step. Return False if it is the second in this micro-batch."""
        before, self.requested = self.requested, self.requested | {id(optimizer)}
        return self.requested != before

    def begin(self, optimizer: Any, is_requested: bool = True) -> None:
        """Begin a step of an optimizer, which may change the state from now on."""
        self.running_optimizer = optimizer
        if not is_requested:  # ``optimizer.step()`` of user code, after which gradients stay
            self.requested.discard(id(optimizer))

    def end(self, optimizer: Any) -> None:
        """End a step of an optimizer, also one that was skipped."""
        weights, self.running_optimizer = self._update.loss_weights, None
        self.are_skipped = weights.lack_items and (self.are_skipped or not self.counts)
        weights.end_step()
        self.came_late = self._update.state is UpdateState.CLOSED
        if not self.came_late:
            self.counts[id(optimizer)] += 1

    def forget_running(self) -> None:
        """Forget the step of an optimizer that raised and has not changed the state."""
        self.running_optimizer = None

    @property
    def need_copies(self) -> bool:
        """Whether a failure can come between optimizer steps, or between a step and the commit."""
        # With fixed parts, a worker can be lost between its step and the commit.
        return self._update.has_fixed_parts or sum(self.max_counts.values()) > 1

    @property
    def are_complete(self) -> bool:
        """Whether every optimizer has made the most steps of an earlier update, at least one.

        The steps then count, even if the loop raises.
        """
        is_running = self.running_optimizer is not None
        if self._update.has_fixed_parts or is_running or not self.max_counts:
            return False
        return all(self.counts.get(key, 0) >= count for key, count in self.max_counts.items())


class LossCount(NamedTuple):
    """What is known about a loss of a micro-batch. By default, it is a mean over its samples."""

    num_items: float | None = None  # that it is a mean over, if user code or raysgd counts them
    num_samples: float | None = None  # rows of the batch, if ``train_batch`` of raysgd counts them
    is_sum: bool = False  # a sum over samples, and not a mean

    def with_samples(self) -> LossCount:
        """Return the count to use if workers do not know the sizes of all batches."""
        is_known = self.is_sum or self.num_items is not None
        return self if is_known else self._replace(num_items=self.num_samples)


AllReduce = Callable[[float], float]  # returns the sum of a number over the workers


class Factors(NamedTuple):
    """Factors that make gradients parts of the mean over an update."""

    earlier: float  # of the gradients of earlier micro-batches
    loss: float


class LossWeights:
    """Gives each loss of an update its weight: add up sums, and divide once.

    An update is ``sum of (items * gradient of their mean loss) / total``. `averaging_size` workers
    average their gradients, so a loss has the weight ``items * averaging_size / total``. Until the
    last micro-batch, a planned total replaces the total. The first loss of the last micro-batch
    multiplies earlier gradients by ``planned / total``. The five cases are::

        a loss that is           items              planned total      total
        1 a mean, counted        its count          previous, rounded  sum over all workers
        2 a mean over samples    samples            all samples        all samples (one worker: own)
        3 of unknown samples     part of a batch    steps * workers    steps * workers
        4 of repeated samples    0                  as above           as above
        5 a sum                  the weight is `averaging_size`, or 0 for repeated samples

    The total and the factor are equal on all workers. Only case 1 communicates: once per update or
    optimizer, and once more in the first update of a generation if it has several micro-batches. A
    micro-batch without a loss has no items. In cases 2 and 3, several workers then do not know the
    total, so `StepChecks` rejects a loss after it. If PyTorch workers do not know the sizes of all
    batches, `LossCount.with_samples` makes cases 2 and 3 of the default ``train_batch`` case 1.
    With fixed parts, the total is that of case 2 in all cases, and the exchange divides by counts.

    Only methods write fields: `add` and `_set_divisor` those of the newest loss, and
    `begin_micro_batch` makes it an earlier one. After `end_step`, a loss sets the count again.
    """

    def __init__(self, update: Update) -> None:
        self._update = update
        self.expected_total: float | None = None
        """Planned total of counted items, equal on all workers. None: unknown."""
        self.reset()

    def reset(self) -> None:
        self.has_loss = False  # the current micro-batch has a loss of ``operator.backward``
        self.num_earlier = 0  # earlier micro-batches of the update that have one
        self.lack_items = False  # on all workers, so that the next optimizer step is skipped
        self.awaits_count = True  # the next loss sets the count of the micro-batch
        self._count, self._items, self._items_so_far = LossCount(), 0.0, 0.0  # up to the newest
        self._divisor = 1.0  # total or planned total of the newest losses

    def begin_generation(self) -> None:
        """Forget the expected total, because new workers must use the same number."""
        self.expected_total = None

    def begin_micro_batch(self) -> None:
        self.num_earlier += self.has_loss
        self.has_loss, self.awaits_count = False, True

    def end_step(self) -> None:
        # The next loss may be for another optimizer, and sets the count again. With earlier
        # micro-batches, the losses of all optimizers share the count of the first.
        self.awaits_count = self.awaits_count or not self.num_earlier

    def skip_step_without_items(self, num_items: float) -> None:
        """Skip the next step of an optimizer if the exchange has counted no items."""
        self.lack_items = not num_items

    @property
    def uses_backward(self) -> bool:
        """Whether user code has passed a loss of the update to `backward` of the operator."""
        return self.has_loss or self.num_earlier > 0

    @property
    def counted_items(self) -> float | None:
        """Items of the micro-batch, if user code has counted those of the newest loss."""
        return None if self._count.num_items is None else self._items

    def add(
        self, count: LossCount, averaging_size: int = 1, all_reduce: AllReduce = float
    ) -> Factors:
        """Add a loss.

        Raises:
            ValueError: If another loss of the micro-batch has another count in an update of several
                micro-batches, or if user code counts items only for some batches of an update.
        """
        update = self._update
        if update.state is UpdateState.CLOSED:
            self.reset()
        self.has_loss = True
        if count.is_sum:
            self.lack_items = False
            return Factors(1.0, 0.0 if update.micro_batch.is_repeated else float(averaging_size))
        earlier = 1.0
        # Whether workers communicate must not depend on the numbers.
        if self.awaits_count or (count.num_items is not None and update.has_one_micro_batch):
            earlier = self._set_divisor(count, averaging_size, all_reduce)
        elif count.num_items not in (None, self._count.num_items):
            raise ValueError(
                f"backward(num_samples={count.num_items!r}) follows "
                f"num_samples={self._count.num_items} for another loss of the same batch. With "
                "accumulation or equal bits, pass the same number."
            )
        weight = self._items * averaging_size / self._divisor if self._items else 0.0
        return Factors(earlier, weight)

    def _set_divisor(self, count: LossCount, averaging_size: int, all_reduce: AllReduce) -> float:
        """Set the items and the divisor of the loss, and return the factor of earlier gradients."""
        update = self._update
        if self.num_earlier and (self._count.num_items is None) != (count.num_items is None):
            raise ValueError(
                "backward(num_samples=...) was passed for some batches of an accumulation "
                "group. Pass it for all of them or for none."
            )
        self._count = count
        micro_batch = update.micro_batch
        items = micro_batch.num_samples if count.num_items is None else count.num_items
        if items is None:
            items = micro_batch.fraction
        self._items = 0.0 if micro_batch.is_repeated else float(items)
        self._items_so_far = self._items + (self._items_so_far if self.num_earlier else 0.0)
        # An update of one micro-batch needs no plan.
        is_single = update.has_one_micro_batch
        planned = total = 0.0 if is_single else self._planned_total(averaging_size, all_reduce)
        if update.in_last_micro_batch and not update.has_fixed_parts:
            total = self._total(averaging_size, all_reduce)
        if total or self.awaits_count:  # an earlier loss of the batch may have had items
            self._divisor, self.lack_items = total, not total
        self.awaits_count = False
        if not (self.num_earlier and total) or math.isclose(total, planned, rel_tol=1e-12):
            return 1.0
        return planned / total

    def _planned_total(self, averaging_size: int, all_reduce: AllReduce) -> float:
        plan = self._update.plan
        if self._update.has_fixed_parts:
            return float(plan.total_samples or 1)
        if self._count.num_items is not None:
            if self.expected_total is None:  # the first update of a generation
                all_items = self._update.num_micro_batches * all_reduce(self._items)
                self.expected_total = _power_of_two(all_items)
            return self.expected_total
        if plan.total_samples is None:
            return float(plan.num_steps * averaging_size)
        return plan.total_samples if averaging_size > 1 else plan.num_samples  # all, or its own

    def _total(self, averaging_size: int, all_reduce: AllReduce) -> float:
        plan = self._update.plan
        if self._count.num_items is not None:
            total = all_reduce(self._items_so_far)
            self.expected_total = _power_of_two(total)
            return total
        if averaging_size > 1 and plan.total_samples is not None:
            return plan.total_samples
        return self._items_so_far * averaging_size  # the mean of each worker weighs the same


def _power_of_two(number: float) -> float:
    """Return a power of two near a number. To multiply by it does not round."""
    return 2.0 ** round(math.log2(number)) if number else 1.0
