"""The checkpoints of one run, as the driver holds them."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle

from raysgd.checkpoint.file import read_pickle
from raysgd.checkpoint.numbered import NumberedCheckpoint, NumberedCheckpoints
from raysgd.train.checkpoint import Checkpoint, CheckpointStrategy
from raysgd.train.report_queue import Turn
from raysgd.train.validation import Reported, ReportedCheckpointStatus, Validations

__all__ = ["RunCheckpoints", "packed_checkpoint"]

logger = logging.getLogger(__name__)


class RunCheckpoints:
    """The newest checkpoint in memory, and on disk those that the strategy keeps.

    Args:
        folder: where to; None to hold the newest in memory alone.
        strategy: which ones stay on disk.
        number: number of the newest so far.
        decode: of the user's backend; None where it does nothing.
        validation: a ValidationConfig; None where nothing is validated.

    Raises:
        TypeError: if `strategy` is no CheckpointStrategy.
    """

    def __init__(
        self,
        folder: Path | None = None,
        strategy: CheckpointStrategy | None = None,
        number: int = 0,
        decode: Callable[[Any], dict[str, Any]] | None = None,
        validation: Any = None,
    ) -> None:
        strategy = CheckpointStrategy() if strategy is None else strategy
        if not isinstance(strategy, CheckpointStrategy):
            raise TypeError(
                f"checkpoint_strategy={strategy!r}: must be a CheckpointStrategy, such as "
                "CheckpointStrategy(num_to_keep=2)."
            )
        keep = 0 if folder is None else strategy.num_to_keep
        self._score = None if keep == 0 else strategy.checkpoint_score_attribute
        self._decode = decode
        self.disk = NumberedCheckpoints(
            folder or Path(),
            keep,
            strategy.checkpoint_score_attribute,
            strategy.checkpoint_score_order,
        )
        self.folder = folder
        self.number = number
        """Number of the newest."""
        self.blob: bytes | None = None
        """The newest, pickled."""
        self._latest: dict[str, Any] | None = None
        self._validations = Validations(validation)
        self._told: list[Reported] = []

    def restore(self) -> NumberedCheckpoint | None:
        """Go on with what an earlier run has left in the folder; return the newest of that."""
        found = None if self.folder is None else self.disk.restore()
        if found is None:
            return None
        newest, self.blob = found
        self.number = newest.number
        return newest

    def keep(self, turn: Turn, blob: bytes, world_size: int) -> None:
        """Take a checkpoint over; when this returns it is on disk, where it shall be.

        Raises:
            CheckpointError: if it cannot be written.
        """
        self._check_score(turn)
        if self._decode is not None:
            blob = cloudpickle.dumps(self._decode(pickle.loads(blob)))
        if turn.validation:
            self._validations.start(self.number + 1, blob, turn.validation)
        self._measure()
        self.disk.save(self.number + 1, blob, turn.numbers, world_size, turn.iteration)
        self.number += 1
        self.blob, self._latest = blob, None

    def _check_score(self, turn: Turn) -> None:
        """Warn, once, if a checkpoint has no number by which it can be scored."""
        name = self._score
        if name is None or name in turn.numbers or turn.validation:
            return
        self._score = None
        logger.warning(
            "checkpoint_score_attribute=%r: a checkpoint was reported whose metrics have no number "
            "of that name%s. Such checkpoints count as the worst. There is %s.",
            name,
            ", but another value" if name in turn.names else "",
            ", ".join(turn.names) or "nothing else",
        )

    def await_validations(self) -> None:
        """Wait until all are validated; which are the best is known then."""
        self._measure(wait=True)
        self.disk.finish()

    def abort(self) -> None:
        """Note that the run has ended early."""
        self._validations.cancel()

    def _measure(self, wait: bool = False) -> None:
        measured = self._validations.collect(wait)
        self.disk.note(measured, self._validations.tasks.keys())

    def reported(self) -> list[Reported]:
        """Return those on disk, as the workers shall hear of them."""
        validations, found = self._validations, []
        for held in self.disk.by_number():
            status = validations.status.get(held.number, ReportedCheckpointStatus.COMMITTED)
            task = validations.tasks.get(held.number)
            if task is not None:
                status = ReportedCheckpointStatus.PENDING_VALIDATION
            found.append(Reported(held.path, held.numbers, status, task))
        return found

    def news(self) -> list[Reported] | None:
        """Return the same; None where it is what was returned before."""
        before, self._told = self._told, self.reported()
        return None if self._told == before else self._told

    @property
    def latest(self) -> dict[str, Any] | None:
        """The newest checkpoint, as it was saved."""
        if self._latest is None and self.blob is not None:
            self._latest = pickle.loads(self.blob)
        return self._latest

    @property
    def latest_path(self) -> Path | None:
        """The newest checkpoint on disk."""
        return _path(self.disk.newest)

    @property
    def best_path(self) -> Path | None:
        """The best checkpoint on disk."""
        return _path(self.disk.best)

    def newest_checkpoint(self) -> Checkpoint | None:
        """Return the newest: the file where it is on disk, else what is in memory."""
        held = self.disk.newest
        if held is not None and held.number == self.number:
            return Checkpoint(path=held.path)
        return None if self.blob is None else Checkpoint(blob=self.blob)

    def best_checkpoints(self) -> list[tuple[Checkpoint, dict[str, Any]]]:
        """Return those on disk, the best first, each with the numbers that came with it."""
        return [
            (Checkpoint(path=held.path), dict(held.numbers)) for held in self.disk.by_goodness()
        ]


def packed_checkpoint(checkpoint: Any) -> bytes | None:
    """Return what a run shall start from, pickled: a dict, a Checkpoint, or one's path."""
    if checkpoint is None:
        return None
    if isinstance(checkpoint, str | os.PathLike):
        if not os.path.isdir(os.path.expanduser(checkpoint)):
            return read_pickle(checkpoint)[0]
        checkpoint = Checkpoint.from_directory(checkpoint)
    if hasattr(checkpoint, "to_directory"):
        checkpoint = Checkpoint.taken_from(checkpoint).packed()
    if not isinstance(checkpoint, Mapping):
        raise TypeError(
            f"checkpoint={checkpoint!r}: must be a dict, a Checkpoint or the path of one."
        )
    blob: bytes = cloudpickle.dumps(dict(checkpoint))
    return blob


def _path(held: NumberedCheckpoint | None) -> Path | None:
    return None if held is None else held.path
