"""What others ask of a loop while it runs: to stop, or to pause at a step."""

from __future__ import annotations

__all__ = ["Signal", "StepInterruptedError"]


class StepInterruptedError(Exception):
    """Raised inside a loop when the driver asked the worker to stop."""


class Signal:
    """Set by the thread that answers the driver, and read by the one that trains.

    Nothing is copied from here, so that what is asked holds from the next batch on, and what is
    taken back is as if it had not been asked.
    """

    def __init__(self) -> None:
        self.stop = False
        """Whether the call under way is to raise at its next batch."""
        self.driver_pause: int | None = None
        """Committed steps at which the driver wants all workers to pause; None: at none."""
        self.callback_pause: int | None = None
        """The same of a callback; each call of train sets it when it begins."""

    @property
    def pause(self) -> int | None:
        """Committed steps at which to pause first; None for no pause."""
        pauses = (self.driver_pause, self.callback_pause)
        return min((step for step in pauses if step is not None), default=None)

    def raise_stop(self) -> None:
        """Raise StepInterruptedError if the call is to stop."""
        if self.stop:
            raise StepInterruptedError("The driver asked this worker to stop.")
