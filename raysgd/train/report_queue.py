"""Between the thread of a training function and the driver: a queue of one.

A report is laid down and the function goes on; the next one has to wait until the driver has taken
it, so that no worker is ahead of the slowest by more than that. A checkpoint is laid down and the
function waits until the driver comes for the next turn, which it does when it holds the checkpoint
for good: from then on it cannot be lost.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from raysgd.cluster.serialization import Packed

__all__ = ["ReportQueue", "RunStoppedError", "Turn", "TurnKind"]

logger = logging.getLogger(__name__)

TurnKind = Literal["report", "checkpoint", "end"]


class RunStoppedError(BaseException):
    """Ends a training function that the driver has stopped.

    Not an Exception, so that an ``except Exception`` around a training step lets it pass.
    """


@dataclass(frozen=True)
class Turn:
    """What a function hands over at one point: all workers have to come to the same ones."""

    kind: TurnKind
    content: Packed | None = None
    """What was reported, as the backend has encoded it, or what the function returned."""
    checkpoint: bytes | None = None
    """A pickled checkpoint, from worker 0 alone."""
    has_checkpoint: bool = False
    numbers: Mapping[str, float] = field(default_factory=dict)
    """By what a checkpoint may be scored."""
    names: tuple[str, ...] = ()
    """All names that came with it, numbers or not."""
    iteration: int = 0
    """Reports that were made up to here, this one included."""
    validation: Any = False
    """Whether to validate the checkpoint, or how."""
    is_portable = True
    """So that the driver can read it where it has neither a GPU nor a process group."""

    @property
    def metrics(self) -> Any:
        """A copy of what was reported.

        Raises:
            TypeError: if this process cannot unpickle it.
        """
        try:
            return None if self.content is None else self.content.value()
        except Exception as error:
            raise TypeError(
                f"The driver cannot read what a worker reported: {error!r}. Report plain values, "
                "or make their classes importable on the driver."
            ) from error

    @property
    def value(self) -> Any:
        """What the function returned; None, with a warning, if this process cannot unpickle it."""
        try:
            return None if self.content is None else self.content.value()
        except Exception as error:
            logger.warning("Cannot read what the training function returned: %r.", error)
            return None


class ReportQueue:
    """The queue. `put` and `put_safely` are called in the function's thread, the rest in others."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turn: Turn | None = None
        self._taken: Turn | None = None
        self._error: BaseException | None = None
        self._ended = False
        self._stopped = False
        self._waiting = False

    # ---- the function's side

    def put(self, turn: Turn) -> None:
        """Lay a turn down, as soon as the one before is taken.

        Raises:
            RunStoppedError: if the driver has stopped the function.
        """
        with self._changed:
            self._wait_until(lambda: self._turn is None)
            self._turn = turn
            self._changed.notify_all()

    def put_safely(self, turn: Turn) -> None:
        """Lay a turn down, and wait until the driver holds its checkpoint for good."""
        self.put(turn)
        self.until_dealt_with(turn)

    def until_dealt_with(self, turn: Turn, timeout_s: float | None = None) -> None:
        """Wait until the driver has done all that a turn asks for; at most `timeout_s`."""
        with self._changed:
            self._wait_until(lambda: turn is not self._turn and turn is not self._taken, timeout_s)

    def end(self, turn: Turn | None, error: BaseException | None = None) -> None:
        """Lay down how the function has ended; the thread's last act."""
        with self._changed:
            self._waiting = True  # there is nothing left to do but this
            self._changed.wait_for(lambda: self._turn is None or self._stopped)
            self._turn, self._error, self._ended = turn, error, True
            self._changed.notify_all()

    def _wait_until(self, reached: Any, timeout_s: float | None = None) -> None:
        self._waiting = True
        try:
            self._changed.wait_for(lambda: reached() or self._stopped, timeout_s)
        finally:
            self._waiting = False
        if self._stopped:
            raise RunStoppedError("The driver has stopped this training function.")

    # ---- the driver's side

    def take(self) -> Turn:
        """Wait for the next turn and take it; says that the one before is dealt with.

        Raises:
            BaseException: what the function raised.
        """
        with self._changed:
            self._taken = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._turn is not None or self._ended)
            turn, error = self._turn, self._error
            if turn is None or turn.kind != "end":  # an end can be taken again
                self._turn, self._taken = None, turn
            self._changed.notify_all()
        if turn is not None:
            return turn
        if isinstance(error, RunStoppedError) or error is None:
            raise RuntimeError("The training function was stopped.") from error
        raise error

    def stop(self) -> None:
        """Let the function raise wherever it waits, or comes to wait, for the driver."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    @property
    def blocked_on_driver(self) -> bool:
        """Whether the function waits for the driver, or has ended."""
        with self._changed:
            return self._ended or self._waiting
