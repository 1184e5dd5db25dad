"""One update of the optimizers: its micro-batches, the steps of optimizers, and its end.

A step is one batch of the loader on each worker; `global_step` counts steps. An update has one
step, or several with gradient accumulation. A step has several micro-batches if its batch is split,
or with equal bits. The life of an update, with the hooks of features::

    for batch in segment:                  # update.begin(plan); its first batch opens it
        feature.begin_update(update)
        feature.begin_micro_batch(update)
        operator.train_batch(batch)        # each backward() and optimizer_step(): see `Update`
        # train_epoch asks for the next batch, or returns:
        if update.should_commit():
            feature.before_commit(update)  # may refuse it
            update.commit()                # the steps count, and it is no longer open
            feature.commit(update)
            update.close()

    if train_epoch raises:
        if update.should_commit(raised=True):
            ...                            # as above
        feature.roll_back(update)          # restores what changed since the last commit
        update.close()                     # the next attempt repeats its batches
        raise
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

from raysgd.data.partition import MicroBatchPlan, UpdatePlan
from raysgd.loop.loss_weights import LossWeights
from raysgd.metrics import is_numeric


class WarmedUp(BaseException):
    """Raised when a warm-up has computed its gradients. User code must not catch it."""


class MicroBatchMetrics(NamedTuple):
    """What a micro-batch adds to the meters."""

    metrics: Mapping[str, Any]
    weight: float
    ends_step: bool


class BadStepRecord(TypedDict):
    """An update that counts, but is not applied. Users see it in ``trainer.bad_steps``."""

    step: int  # the last one of the update
    epoch: int  # from 1
    reason: str
    value: Any  # the loss or the norm of gradients as text, or a loss that jumped
    samples: list[Any]  # of all workers, as `BatchSource.sample_ids`


_NO_PLAN, _NO_MICRO_BATCH = UpdatePlan(), MicroBatchPlan()


class Update:
    """The update in progress on this worker, up to its commit or roll-back.

    `TrainState` begins each micro-batch, and passes the update to the hooks of all features.
    Without a segment, each batch has its own, which never opens. Each worker has one object for all
    updates, from `begin` to `close`.

    What happens between a backward pass and the commit, and the file that calls each method, in
    PyTorch. With one micro-batch, `add` to `end` may repeat, for other losses and optimizers:

    ========================  ==========================  =========================================
    method                    called in                   effect
    ========================  ==========================  =========================================
    `begin_micro_batch`       loop/train_state            earlier gradients are out of ``.grad``
    `before_backward`         torch/optimization          `StepChecks` rejects a loss after a gap,
                                                          or after changes of gradients
    `LossWeights.add`         torch/optimization          earlier gradients return, and factors
                                                          weight them and the loss, whose pass may
                                                          average them
    `observe_loss`            torch/optimization          features read the loss and its factors
    `after_backward`          torch/optimization          `StepChecks` remembers gradients that are
                                                          not final
    `OptimizerSteps.request`  torch/optimization          ``requested`` has the optimizer
    `before_step`             torch/optimization          `StepChecks` rejects a second step, or
                                                          changes of these gradients. Before the
                                                          last micro-batch, the step ends here
    `complete_gradients`      torch/optimization          the exchange averages what no pass has
    `before_optimizer_step`   torch/optimization          features clip gradients, or `mark_bad`
    `mark_bad`                torch/features/bad_steps    no step is made, as without items on all
                                                          workers: ``has_no_items`` is set
    `OptimizerSteps.make`     torch/optimization          the optimizer steps, if nothing overflows
    `check_direct_step`       torch/optimization          `StepChecks` rejects ``optimizer.step()``
                                                          of user code that ignores features
    `OptimizerSteps.begin`    torch/optimization          ``running_optimizer`` is it, as in
                                                          ``optimizer.step()`` of user code
    `OptimizerSteps.end`      torch/optimization          ``counts`` has the step, even if skipped
    `hold_metrics`            loop/operator_base          the metrics wait for the commit
    `should_commit`           loop/segment                asked when it draws a batch
    `begin_commit`            loop/train_state            features may refuse in ``before_commit``
    `commit`                  loop/train_state            the steps count
    ========================  ==========================  =========================================
    """

    def __init__(self) -> None:
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
        self.is_open = False  # it has batches, and was neither committed nor undone
        self.is_committing = False  # features may refuse it
        self.is_warm_up = False  # the update ends before an optimizer updates
        self.plan = _NO_PLAN
        self.num_splits = 1  # after memory ran out, planned micro-batches are split too
        self.bad_step: BadStepRecord | None = None  # why it counts, but nothing is applied
        self.held_metrics: list[MicroBatchMetrics] = []  # until the update counts
        self.micro_batch_index = -1  # before the first
        self.micro_batch, self.in_last_micro_batch, self.begins_step = _NO_MICRO_BATCH, True, True
        self.loss_weights.reset()
        self.optimizer_steps.reset()

    def begin_micro_batch(self, micro_batch: MicroBatchPlan, is_last: bool = True) -> None:
        """Begin a micro-batch, and open the update. If this `is_last`, the update ends with it."""
        self.micro_batch_index += 1
        is_later_step = micro_batch.step_index > self.micro_batch.step_index
        self.begins_step = not self.micro_batch_index or is_later_step
        self.is_open, self.is_committing = True, False
        self.micro_batch, self.in_last_micro_batch = micro_batch, is_last
        self.num_splits = max(self.num_splits, micro_batch.num_splits)
        self.optimizer_steps.begin_micro_batch()
        self.loss_weights.begin_micro_batch()

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of the update."""
        return len(self.plan.micro_batches) * self.num_splits

    @property
    def is_split(self) -> bool:
        """Whether batches are split into micro-batches, and could be whole."""
        return not self.plan.has_logical_workers and self.num_micro_batches > self.plan.num_steps

    @property
    def has_one_micro_batch(self) -> bool:
        """Whether the update has only this micro-batch. Fixed parts are several."""
        is_only = self.micro_batch_index <= 0 and self.in_last_micro_batch
        return is_only and not self.plan.has_logical_workers

    def should_commit(self, raised: bool = False) -> bool:
        """Return whether the update counts on this worker, if it ends now.

        ========================================  =============  =============  =============
        ``train_epoch``                           asks for more  returns        has `raised`
        ========================================  =============  =============  =============
        before the last micro-batch               it continues   an error       it is undone
        in the last micro-batch                   it is counted  it is counted  it is undone
        there, if `optimizer_steps.are_complete`  it is counted  it is counted  it is counted
        after a feature has refused it            -              -              it is undone
        ========================================  =============  =============  =============
        """
        is_done = self.is_open and not self.is_committing and self.in_last_micro_batch
        return is_done and (not raised or self.optimizer_steps.are_complete)

    def hold_metrics(self, metrics: Iterable[MicroBatchMetrics]) -> None:
        """Hold metrics until the update counts."""
        self.held_metrics += metrics

    def pop_metrics(self) -> list[MicroBatchMetrics]:
        """Return the held metrics, which count now. Numbers of a bad step count for no samples."""
        held, self.held_metrics = self.held_metrics, []
        for index, (metrics, _, ends_step) in enumerate(held if self.bad_step is not None else ()):
            kept = {k: v for k, v in metrics.items() if is_numeric(v) and not getattr(v, "ndim", 0)}
            held[index] = MicroBatchMetrics(kept, 0, ends_step)
        return held

    def mark_bad(self, bad_step: BadStepRecord) -> None:
        """Let the update count without being applied, for a reason in this record."""
        self.bad_step = bad_step

    def begin_warm_up(self) -> None:
        """Let the updates end before an optimizer steps."""
        self.is_warm_up = True

    def begin_commit(self) -> None:
        """Let features refuse the update, before `commit`."""
        self.is_committing = True

    def commit(self) -> None:
        """Make the steps of this update count. `close` follows, after the hooks of features."""
        self.is_open = False
        self.optimizer_steps.commit()


class OptimizerSteps:
    """The steps of optimizers in an update, from the request to the commit.

    ``operator.optimizer_step`` requests a step. Without it, ``optimizer.step()`` of user code is a
    direct step. The life of both::

        request(optimizer)         # in each micro-batch
        skip(optimizer)            # in the last one, without items or in a bad step; or else:
        make(optimizer, function)  # calls the function, which skips the step if it overflows
            begin(optimizer)       # from now on, the state may change; a direct step begins here
            end(optimizer)
        commit()                   # the steps count
    """

    def __init__(self, update: Update) -> None:
        self._update = update
        self.max_counts: dict[int, int] = {}
        """Most steps of an update that counted, at least 1, by the ID of a registered optimizer."""
        self.num_ended = 0  # in all updates, and after them
        self.is_requested = False  # the step that runs, and not direct
        self.counts_in_commit = False  # and not before, because the commit communicates
        self.reset()

    def expect(self, optimizers: Sequence[Any], counts_in_commit: bool = False) -> None:
        """Expect steps of the registered optimizers."""
        self.max_counts = dict.fromkeys(map(id, optimizers), 1)
        self.counts_in_commit = counts_in_commit

    def load_max_counts(self, counts: Sequence[int]) -> None:
        """Load the `max_counts` of another worker, or of a saved state, in their order."""
        if isinstance(counts, list | tuple) and len(counts) == len(self.max_counts):
            self.max_counts = dict(zip(self.max_counts, counts, strict=True))

    def reset(self) -> None:
        self.running_optimizer: Any = None  # the optimizer whose step runs
        self.requested: set[int] = set()
        """IDs of the optimizers whose step was requested in this micro-batch."""
        self.counts: defaultdict[int, int] = defaultdict(int)
        """Number of steps by the ID of each optimizer that has stepped."""
        self.are_skipped = False  # all of them, for lack of items
        self.came_late = False  # after the end of the update

    def begin_micro_batch(self) -> None:
        self.requested = set()

    def request(self, optimizer: Any) -> bool:
        """Record the request of a step. Return False if it is the second in this micro-batch."""
        key = id(optimizer)
        is_first = key not in self.requested
        self.requested |= {key}
        return is_first

    def skip(self, optimizer: Any) -> None:
        """End a requested step of a registered optimizer that must not step."""
        if id(optimizer) in self.max_counts:
            self.end(optimizer)

    def make(self, optimizer: Any, function: Callable[[Any], None]) -> None:
        """Make a requested step with a function, or skip it if the function makes none."""
        num_ended, self.is_requested = self.num_ended, True
        try:
            function(optimizer)
        finally:
            self.is_requested = False
        if self.num_ended == num_ended:
            self.skip(optimizer)

    def begin(self, optimizer: Any) -> None:
        """Begin a step of an optimizer, which may change the state from now on."""
        self.running_optimizer = optimizer

    def end(self, optimizer: Any) -> None:
        """End a step of an optimizer, also one that was skipped."""
        weights, self.running_optimizer = self._update.loss_weights, None
        self.are_skipped = weights.has_no_items and (self.are_skipped or not self.counts)
        weights.end_step()
        self.num_ended += 1
        self.came_late = not self._update.is_open
        if not self.came_late:
            self.counts[id(optimizer)] += 1

    def count_wrapped(self, optimizer: Any) -> None:
        """Count a step of an optimizer whose wrapper does not step."""
        self.num_ended += 1
        self.counts[id(optimizer)] += 1

    def commit(self) -> None:
        """Count the steps of this update for `max_counts`."""
        if (found := self.counts) != self.max_counts:
            self.max_counts = {k: max(n, found.get(k, 0)) for k, n in self.max_counts.items()}

    @property
    def need_backup(self) -> bool:
        """Whether a failure can come between optimizer steps, or between a step and the commit."""
        # In a commit that communicates, another worker can be lost.
        return self.counts_in_commit or sum(self.max_counts.values()) > 1

    @property
    def are_complete(self) -> bool:
        """Whether every optimizer has made the most steps of an earlier update, at least one.

        The steps then count, even if ``train_epoch`` raises.
        """
        is_running = self.running_optimizer is not None
        if self.counts_in_commit or is_running or not self.max_counts:
            return False
        return all(self.counts.get(key, 0) >= count for key, count in self.max_counts.items())
