"""A queue of one result between the thread of a training function and the driver.

`put` waits until the driver has taken the previous result, so no worker gets more than one report
ahead of the slowest. With a checkpoint, and with the report after it, `put` also waits until the
driver asks for the next result. Then the driver holds both, and a loss of workers cannot lose them.
`GrowthPolicy` uses these waits.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from raysgd.cluster.serialization import PackedValue

logger = logging.getLogger(__name__)

ResultKind = Literal["report", "checkpoint", "end"]

_VERBS = {  # of a worker, by the kind of its result
    "report": "reported",
    "checkpoint": "saved a checkpoint",
    "end": "returned from the function",
}


class RunStoppedError(BaseException):
    """Ends a training function that the driver has stopped.

    It is not an Exception, so ``except Exception`` around a training step does not catch it.
    """


@dataclass(frozen=True)
class TrainingResult:
    """One result of a training function. All workers must produce the same sequence of kinds."""

    kind: ResultKind
    content: PackedValue | None = None
    """The encoded report, or the return value of the function."""
    checkpoint: bytes | None = None
    """The pickled checkpoint; only worker 0 sends one."""
    has_checkpoint: bool = False
    nonfinite_array: str = ""
    """Name of an array with NaN or infinity that keeps the checkpoint from being stored."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """The reported numbers, which can rate the checkpoint."""
    iteration: int = 0
    """Number of reports so far, including this one."""
    error: BaseException | None = None
    """The exception that ended the function."""

    @property
    def metrics(self) -> Any:
        """A copy of the report. Raises TypeError if this process cannot unpickle it."""
        try:
            return None if self.content is None else self.content.unpack()
        except Exception as error:
            raise TypeError(
                f"The driver cannot unpickle a report: {error!r}. Report plain values, or make "
                "their classes importable on the driver."
            ) from error

    @property
    def return_value(self) -> Any:
        """The return value of the function. None, with a warning, if unpickling fails."""
        try:
            return self.metrics
        except TypeError as error:
            text = "The driver cannot unpickle the result of the training function: %r"
            logger.warning(text, error.__cause__)
            return None


def check_in_step(results: Sequence[TrainingResult]) -> None:
    """Raise an error if the results of the workers are of different kinds."""
    if len({result.kind for result in results}) > 1:
        each = (f"worker {n} {_VERBS[result.kind]}" for n, result in enumerate(results))
        raise RuntimeError(
            f"The workers are out of step: {'; '.join(each)}. Every worker must call report() and "
            "save_checkpoint() equally often and in the same order."
        )


class ResultQueue:
    """Passes results to the driver. Only one thread calls `put`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next: TrainingResult | None = None  # that the driver has not taken yet
        self._handled: TrainingResult | None = None  # that the driver is handling
        self._is_stopped = self._follows_checkpoint = False
        self.is_blocked_on_driver = False
        """Whether the function is waiting for the driver or has ended."""

    # ---- used by the function

    def put(self, result: TrainingResult) -> None:
        """Pass a result to the driver. Wait until it has handled it if it must not be lost."""
        with self._changed:
            self._wait_until(lambda: self._next is None)
            self._next = result
            self._changed.notify_all()
            if result.has_checkpoint or self._follows_checkpoint:
                self._wait_until(lambda: result is not self._next and result is not self._handled)
            self._follows_checkpoint = result.kind == "checkpoint"

    def end(self, result: TrainingResult) -> None:
        """Pass the end of the function to the driver. This is the last action of its thread."""
        with self._changed:
            self.is_blocked_on_driver = True
            self._changed.wait_for(lambda: self._next is None or self._is_stopped)
            self._next = result
            self._changed.notify_all()

    def _wait_until(self, reached: Callable[[], bool]) -> None:
        self.is_blocked_on_driver = True
        try:
            self._changed.wait_for(lambda: reached() or self._is_stopped)
        finally:
            self.is_blocked_on_driver = False
        if self._is_stopped:
            raise RunStoppedError("The driver has stopped this training function.")

    # ---- used by the driver

    def get(self) -> TrainingResult:
        """Mark the previous result as handled. Then wait for the next result and return it.

        Raise the exception of the function if it has failed.
        """
        with self._changed:
            self._handled = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._next is not None)
            result = self._next
            assert result is not None
            if result.kind != "end":  # the driver can take an end again
                self._next, self._handled = None, result
            self._changed.notify_all()
        if isinstance(result.error, RunStoppedError):
            raise RuntimeError("The training function was stopped.") from result.error
        if result.error is not None:
            raise result.error
        return result

    def stop(self) -> None:
        """Make the function raise when it next waits for the driver, or now if it is waiting."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()


class GrowthPolicy:
    """Tracks in which order a function reports and saves, and decides when its workers may grow.

    To grow, all workers restart from the newest checkpoint. The function waits at each checkpoint
    and at the next report, so a restart then repeats no step. It must not skip a report either:

    ======================  ==================================================================
    order of the function   the workers may grow
    ======================  ==================================================================
    report, then save       at each checkpoint
    both together           at each report with a checkpoint
    save, then report       at the report after a checkpoint, or at the next checkpoint if no
                            report comes between
    ======================  ==================================================================

    The first result of the run shows the order.
    """

    def __init__(self) -> None:
        self._saves_first: bool | None = None  # None before the first result
        self._awaits_report = False  # the newest result is a checkpoint that a report may follow

    def forget_checkpoint(self) -> None:
        """Forget a checkpoint from which the workers start again, before its report."""
        self._awaits_report = False

    def may_grow_after(self, result: TrainingResult) -> bool:
        """Return whether a restart after this result, with `result.iteration`, skips no report."""
        if self._saves_first is None:
            self._saves_first = result.kind == "checkpoint"
        if result.nonfinite_array:  # a restart would repeat the steps since an earlier checkpoint
            return False
        has_waited = self._awaits_report
        self._awaits_report = self._saves_first and result.kind == "checkpoint"
        is_complete = result.has_checkpoint and not self._awaits_report
        return result.kind != "end" and (has_waited or is_complete)
