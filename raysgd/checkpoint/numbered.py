"""The checkpoints of one run of a function, numbered, in a folder: the best, and the newest."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from raysgd.checkpoint.file import read_manifest, read_pickle, write_pickle
from raysgd.checkpoint.location import LocalFile
from raysgd.checkpoint.manifest import Manifest
from raysgd.checkpoint.store import rating, surplus
from raysgd.errors import CheckpointError

__all__ = ["NumberedCheckpoint", "NumberedCheckpoints"]

logger = logging.getLogger(__name__)

_NAME = re.compile(r"checkpoint_([0-9]{6,})")


class NumberedCheckpoint(NamedTuple):
    """A checkpoint on disk."""

    number: int
    path: Path
    numbers: Mapping[str, float]
    """What was measured with it."""
    iteration: int
    """Reports that were made before it, the one that it came with included."""


class NumberedCheckpoints:
    """Writes ``checkpoint_000001`` and so on into a folder, and removes what is not to be kept.

    The newest is kept beside the best as long as the run goes on, since that is what it restarts
    from; `finish` removes it where it is none of the best.

    Args:
        folder: where to; it is made with the first checkpoint.
        keep: how many of the best to keep; None for all, 0 to write none.
        attribute: by which number the best are known.
        order: "max" if more of it is better, or "min".
    """

    def __init__(
        self,
        folder: Path,
        keep: int | None = None,
        attribute: str = "",
        order: Literal["max", "min"] = "max",
    ) -> None:
        self._folder = LocalFile(str(folder))
        self._keep = keep
        self._attribute = attribute
        self._order = order
        self._held: list[NumberedCheckpoint] = []
        self._awaited: Collection[int] = ()
        """Numbers of those that are still measured, and stay until that is known."""

    def save(
        self,
        number: int,
        blob: bytes,
        numbers: Mapping[str, float],
        world_size: int,
        iteration: int = 0,
    ) -> None:
        """Write a checkpoint, unless none are written.

        Raises:
            CheckpointError: if it cannot be written.
        """
        if self._keep == 0:
            return
        self._folder.make_folder()
        manifest = Manifest(world_size=world_size, global_step=iteration, metrics=numbers)
        path = self._folder.child(f"checkpoint_{number:06d}").name
        write_pickle(blob, path, manifest)
        saved = NumberedCheckpoint(number, Path(path), dict(numbers), iteration)
        self._held = [held for held in self._held if held.number != number] + [saved]
        self._tidy(saved)

    def note(self, measured: Mapping[int, Mapping[str, float]], awaited: Collection[int]) -> None:
        """Add to what is known of checkpoints, by their numbers.

        Args:
            measured: what was measured since they were saved.
            awaited: which ones are still measured; they are kept until that is known.
        """
        self._awaited = awaited
        self._held = [
            held._replace(numbers={**held.numbers, **measured.get(held.number, {})})
            for held in self._held
        ]

    def finish(self) -> None:
        """Note that nothing will be restarted from the newest any more."""
        self._tidy(None)

    @property
    def best(self) -> NumberedCheckpoint | None:
        """The best of those on disk; of equals the newer."""
        return max(self._held, key=self._goodness, default=None)

    def by_goodness(self) -> list[NumberedCheckpoint]:
        """Return those on disk, the best first."""
        return sorted(self._held, key=self._goodness, reverse=True)

    def by_number(self) -> list[NumberedCheckpoint]:
        """Return those on disk, the oldest first."""
        return sorted(self._held, key=lambda held: held.number)

    @property
    def newest(self) -> NumberedCheckpoint | None:
        """The newest of those on disk."""
        return max(self._held, key=lambda held: held.number, default=None)

    def restore(self) -> tuple[NumberedCheckpoint, bytes] | None:
        """Find what an earlier process has left in the folder; return the newest in order.

        Raises:
            CheckpointError: if there are checkpoints and none can be read.
        """
        found = {
            int(match[1]): name
            for name in self._folder.file_names()
            if (match := _NAME.fullmatch(name))
        }
        newest, problems = None, []
        self._held = []
        for number in sorted(found, reverse=True):
            path = self._folder.child(found[number]).name
            try:
                if newest is None:
                    blob, manifest = read_pickle(path)
                else:
                    manifest = read_manifest(path)
            except CheckpointError as error:
                logger.warning("Passed over %s: %s", path, error)
                problems.append(str(error))
                continue
            said = manifest or Manifest()
            held = NumberedCheckpoint(number, Path(path), said.metrics, said.global_step)
            self._held.append(held)
            if newest is None:
                newest = held, blob
        if newest is None and problems:
            raise CheckpointError(
                "\n- ".join([f"No checkpoint in {self._folder.name} can be read:", *problems])
            )
        return newest

    def _tidy(self, newest: NumberedCheckpoint | None) -> None:
        for held in surplus(self._held, self._keep, self._goodness, newest):
            if held.number in self._awaited:
                continue
            self._held.remove(held)
            try:
                LocalFile(str(held.path)).remove()
            except CheckpointError as error:
                logger.warning("Kept it: %s", error)

    def _goodness(self, held: NumberedCheckpoint) -> tuple[tuple[bool, float], int]:
        value = held.numbers.get(self._attribute, math.nan)
        return rating(value, self._order), held.number
