"""The feature that splits batches if memory runs out, for all frameworks."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from raysgd.data.partition import MicroBatchPlan
from raysgd.data.source import SourceBatch
from raysgd.loop.feature import UpdateFeature
from raysgd.loop.options import WorkerSettings
from raysgd.loop.update import Update

MicroBatches: TypeAlias = Sequence[tuple[Any, MicroBatchPlan]]
_CALL_EACH_ONCE = (
    "train_batch must call self.backward(loss) and self.optimizer_step(optimizer) once for each "
    "batch, after all losses of the batch."
)


class IndivisibleError(BaseException):
    """Raised in a micro-batch of a batch that must not be split. The loop repeats the step unsplit.

    It does not derive from Exception, so that user code does not catch it.
    """


class MicroBatching(UpdateFeature):
    """Decides whether batches may be split, and splits them if memory ran out.

    Micro-batches are equivalent to the whole batch if user code computes all gradients before the
    update, and uses the helpers of raysgd for gradients and updates.
    """

    def __init__(self, train_state: Any) -> None:
        self._train_state = train_state  # a `TrainState`, whose module imports this one
        self._settings: WorkerSettings = train_state.settings
        self.why_not_split: str | None = None  # why batches must not be split
        self.num_splits = 1  # micro-batches per batch; more than 1 after memory ran out

    def refuse_split(self, why: str, remedy: str = _CALL_EACH_ONCE) -> None:
        """Record why batches must not be split. Raise IndivisibleError if this batch is split."""
        if argument := self._settings.options.layout.logical_workers_argument:
            raise RuntimeError(f"{why}. With {argument}, {remedy}")
        self.why_not_split = self.why_not_split or why
        if self._train_state.update.is_split:
            raise IndivisibleError(why)

    def begin_update(self, update: Update) -> None:
        """Warn if a batch cannot be split and is larger because workers are missing."""
        if update.plan.is_oversized:
            self._settings.warn_once(
                "indivisible",
                "With %d of %d workers, each batch has more samples than its loader's batch size, "
                "and needs more memory. It cannot be split: %s.",
                self._settings.context.world_size,
                self._settings.options.num_workers,
                self.why_not_split or "only the default train_epoch takes batches in parts",
            )

    def split_batch(
        self, source_batch: SourceBatch, micro_batch: MicroBatchPlan, may_split: bool
    ) -> MicroBatches:
        """Return the micro-batches of a batch. The default is one."""
        return [(source_batch.content, micro_batch)]

    def choose_num_splits(self, error: BaseException, batch: Any, may_split: bool) -> int:
        """Return the number of micro-batches per batch after an error, or 0 to raise the error.

        Add advice to the error. `batch` is that of the update in progress, or None.
        """
        return 0

    def increase_num_splits(self, min_splits: int) -> None:
        """Use at least `min_splits` micro-batches. All ranks must call this at the same step."""

    def is_recoverable(self, error: BaseException) -> bool:
        """Return whether training can continue after an error, because only memory ran out."""
        return False
