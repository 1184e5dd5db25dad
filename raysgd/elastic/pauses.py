"""Pauses of a call at a step, where workers join and leave."""

from __future__ import annotations

from collections.abc import Mapping

from raysgd._internal.context import Progress
from raysgd.cluster.worker_handle import WorkerHandle
from raysgd.elastic.attempt import Attempt
from raysgd.elastic.commands import Commands
from raysgd.elastic.feature import Feature
from raysgd.elastic.policies import pause_step

__all__ = ["Pauses"]


class Pauses(Feature):
    """Lets all workers of a generation pause at the same step."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self.step: int | None = None

    def request(
        self, attempt: Attempt, progress: Mapping[WorkerHandle, Progress], num_members: int
    ) -> bool:
        """Request a pause if possible. Return False if workers have passed the step."""
        if len(progress) < num_members or attempt.outcomes:
            return True  # a worker does not answer, or the call is ending
        if not all(p.step_s for p in progress.values()):
            return True  # the step duration is unknown before the first step
        step = self.step = pause_step(list(progress.values()))
        heard = self._commands.pause_at(step)
        return all(f.done() and f.exception() is None and f.result() < step for f in heard)

    def cancel(self) -> None:
        """Cancel the pause."""
        if self.step is not None:
            self._commands.pause_at(None)
            self.step = None
