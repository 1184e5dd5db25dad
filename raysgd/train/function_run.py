"""One run of a training function on the driver: the sequence of turns, and checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from raysgd._internal.context import Request
from raysgd.cluster import functions
from raysgd.elastic.call import Call
from raysgd.elastic.controller import Controller
from raysgd.errors import WorkerLostError
from raysgd.train import session
from raysgd.train.datasets import Datasets
from raysgd.train.framework import TrainingWorkerError
from raysgd.train.report_queue import Turn
from raysgd.train.run_checkpoints import RunCheckpoints
from raysgd.train.runner import BeginRequest, EndRunRequest, NextRequest
from raysgd.train.session import Plan

_ACTIONS = {
    "report": "reported",
    "checkpoint": "saved a checkpoint",
    "end": "returned from the function",
}


@dataclass(eq=False)
class FunctionRun:
    """Runs one training function."""

    controller: Controller
    plan: Plan
    """The function, and the checkpoint that it starts from."""
    checkpoints: RunCheckpoints
    datasets: Datasets
    call: Call
    """Counts the losses of workers over all requests of the run."""
    is_silent: bool = False
    """Whether to skip reports."""
    values: list[Any] | None = None
    """The results of the function by rank; None until it has returned."""

    def start(self, max_attempts: int) -> None:
        """Start the function on all workers. Tolerate losses of workers before it begins."""
        with self._as_training_errors():
            self.controller.snapshots.keep(lambda: {"plan": self.plan})
            repair(self.controller, max_attempts)
            try:
                self.share_data()
            except WorkerLostError as error:
                # If only the connection is lost, kill the process. The next call restarts it.
                self.controller.members[error.rank].kill_process()
            self._send(BeginRequest(plan=self.plan))

    def share_data(self) -> None:
        """Send each worker its shards of the data."""
        members: list[Any] = self.controller.members
        shares = self.datasets.shared_out([member.actor for member in members])
        references = [
            member.execute(session.receive_shards, share)
            for member, share in zip(members, shares, strict=True)
        ]
        functions.results(members, references)

    def next_result(self, decode: Callable[[Any], dict[str, Any]]) -> list[dict[str, Any]] | None:
        """Return the next decoded reports by rank, or None when the function has returned."""
        with self._as_training_errors():
            while self.values is None:
                turns: list[Turn] = self._send(NextRequest())
                if len({turn.kind for turn in turns}) > 1:
                    raise RuntimeError(_uneven(turns))
                self._keep_checkpoint(turns)
                if turns[0].kind == "end":
                    self.values = [turn.value for turn in turns]
                elif turns[0].kind == "report" and not self.is_silent:
                    return [decode(turn.metrics) for turn in turns]
        return None

    def _keep_checkpoint(self, turns: list[Turn]) -> None:
        """Keep the checkpoint of worker 0, and add workers if there is room.

        The function waits at its checkpoint, so a restart repeats no step.
        """
        rank = next((rank for rank, turn in enumerate(turns) if turn.has_checkpoint), None)
        if rank is None:
            return
        turn = turns[0]
        if turn.checkpoint is None:
            raise RuntimeError(
                f"Worker {rank} reported a checkpoint, but worker 0 did not. raysgd keeps the "
                "checkpoint of worker 0: report a checkpoint there."
            )
        self.checkpoints.keep(turn, turn.checkpoint, len(turns))
        self.plan = dataclasses.replace(
            self.plan, checkpoint=self.checkpoints.blob, iteration=turn.iteration
        )
        self.controller.snapshots.keep(lambda: {"plan": self.plan})
        self.controller.grow()

    def _send(self, request: Request) -> list[Any]:
        self.call.request = request
        return [outcome.value() for outcome in self.controller.run(self.call)]

    @contextlib.contextmanager
    def _as_training_errors(self) -> Iterator[None]:
        try:
            yield
        except WorkerLostError as error:
            number, allowed = self.call.num_losses, self.call.max_losses
            raise TrainingWorkerError.after(
                error,
                f"The training function lost workers {number} time{'s' * (number != 1)}, but "
                f"max_retries={allowed} (max_failures={allowed} in fit()).",
            ) from error


def repair(controller: Controller, max_attempts: int) -> None:
    """Replace dead workers, and wait for workers that still run a failed function.

    These losses do not count against the retries of a run.
    """
    controller.run(Call(request=EndRunRequest(), method="run", max_losses=max_attempts))


def _uneven(turns: list[Turn]) -> str:
    actions = "; ".join(f"worker {rank} {_ACTIONS[turn.kind]}" for rank, turn in enumerate(turns))
    return (
        f"The workers are out of step: {actions}. Every worker must call report() and "
        "save_checkpoint() equally often and in the same order."
    )
