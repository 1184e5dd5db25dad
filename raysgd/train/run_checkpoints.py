"""The checkpoints of one run, held by the driver."""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from raysgd.checkpoint.file import read_pickle, write_pickle
from raysgd.checkpoint.location import Location
from raysgd.checkpoint.manifest import Manifest
from raysgd.checkpoint.store import CheckpointFolder, name_numbers
from raysgd.train.checkpoint import Checkpoint, CheckpointStrategy
from raysgd.train.constants import TIMESTAMP
from raysgd.train.result_queue import TrainingResult

logger = logging.getLogger(__name__)


class RunCheckpoints(CheckpointFolder):
    """Keeps the newest checkpoint in memory, and the selection of the strategy on disk.

    The files are named ``checkpoint_000001`` and so on. During the run, the newest checkpoint is
    kept on disk in addition to the best, because a restart needs it. Without a folder, only the
    newest checkpoint is kept, in memory.
    """

    _pattern = re.compile(r"checkpoint_[0-9]{6,}")

    def __init__(
        self,
        folder: Path | None = None,
        strategy: CheckpointStrategy | None = None,
        number: int = 0,
        decode: Callable[[Any], dict[str, Any]] | None = None,
    ) -> None:
        strategy = CheckpointStrategy() if strategy is None else strategy
        if not isinstance(strategy, CheckpointStrategy):
            raise TypeError(f"checkpoint_strategy={strategy!r}: must be a CheckpointStrategy.")
        keep = 0 if folder is None else strategy.num_to_keep
        score, order = strategy.checkpoint_score_attribute, strategy.checkpoint_score_order
        if (score, order) == (TIMESTAMP, "max"):
            score = None  # the newest by number, because clocks differ between machines
        super().__init__(Location(folder or Path()), keep, score, order)
        self._decode = decode
        self.folder = folder
        self.number = number
        self.newest_blob: bytes | None = None
        """The newest checkpoint, pickled."""
        self.iteration = 0
        """Number of reports up to the newest checkpoint."""
        self.has_saved = False  # or restored

    def restore(self) -> Manifest | None:
        """Continue with the checkpoints of an earlier run in the folder.

        Return the manifest of the newest intact checkpoint. Its ``global_step`` is the number of
        reports up to it. Raise CheckpointError if there are checkpoints, but none can be loaded.
        """
        names = [] if self.folder is None else self._names()
        if not names:
            return None
        newest, self.newest_blob, manifest = self._load_first(names, read_pickle)
        self._read_manifests(names)
        (self.number,), self.has_saved = name_numbers(newest), True
        return manifest

    def save(self, results: Sequence[TrainingResult]) -> None:
        """Store the checkpoint of worker 0, if there is one, on disk too if the strategy keeps it.

        Raise ValueError after storing one that lacks the number that rates it. `results` are those
        of all workers.
        """
        rank = next((rank for rank, each in enumerate(results) if each.has_checkpoint), None)
        if rank is None:
            return
        result, blob = results[0], results[0].checkpoint
        if result.not_finite:
            logger.warning(
                "A checkpoint is not kept, because its %s has NaN or infinity. The last finite "
                "checkpoint stays.",
                result.not_finite,
            )
            return
        if blob is None:
            raise RuntimeError(
                f"Worker {rank} reported a checkpoint, but worker 0 did not. raysgd keeps the "
                "checkpoint of worker 0: report a checkpoint there."
            )
        if self._decode is not None:
            blob = cloudpickle.dumps(self._decode(pickle.loads(blob)))
        name = f"checkpoint_{self.number + 1:06d}"
        if self._keep != 0:
            self._folder.make_folder()
            manifest = Manifest(
                world_size=len(results), global_step=result.iteration, metrics=dict(result.numbers)
            )
            write_pickle(blob, self._folder.child(name).name, manifest)
            self._manifests[name] = manifest
            self._remove_surplus(name)
        self.number += 1
        self.newest_blob, self.has_saved, self.iteration = blob, True, result.iteration
        if self._keep != 0 and self._monitor not in (None, *result.numbers):
            raise ValueError(
                f"checkpoint_score_attribute={self._monitor!r}: {name} has no number of that name. "
                f"Report it with the checkpoint. The numbers are: {', '.join(result.numbers)}."
            )

    def finish(self) -> None:
        """Remove the newest checkpoint unless it is one of the best."""
        self._remove_surplus(None)

    @property
    def latest(self) -> dict[str, Any] | None:
        """The newest checkpoint, in its original form."""
        return None if self.newest_blob is None else pickle.loads(self.newest_blob)

    @property
    def latest_path(self) -> Path | None:
        newest = max(self._list_best_first(), key=name_numbers, default=None)
        return None if newest is None else self._path_of(newest)

    @property
    def best_path(self) -> Path | None:
        return next(map(self._path_of, self._list_best_first()), None)

    def newest_checkpoint(self) -> Checkpoint | None:
        """Return the newest checkpoint: the file if it is on disk, otherwise the one in memory."""
        path = self.latest_path
        if path is not None and name_numbers(path.name) == (self.number,):
            return Checkpoint(path=path)
        return None if self.newest_blob is None else Checkpoint(blob=self.newest_blob)

    def best_checkpoints(self) -> list[tuple[Checkpoint, dict[str, Any]]]:
        """Return the checkpoints on disk, best first, each with its numbers."""
        return [
            (Checkpoint(path=self._path_of(name)), dict(manifest.metrics))
            for name in self._list_best_first()
            if (manifest := self._manifests[name])
        ]

    def _path_of(self, name: str) -> Path:
        return Path(self._folder.child(name).name)
