"""Folders of checkpoints: list, load, rank, and remove them."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

from raysgd.checkpoint.file import read_manifest
from raysgd.checkpoint.location import UnreachableError, locate
from raysgd.checkpoint.manifest import Manifest
from raysgd.errors import CheckpointError

logger = logging.getLogger(__name__)


class CheckpointFolder:
    """The checkpoints in a folder. A subclass names, reads, and writes them."""

    _pattern: ClassVar[re.Pattern[str]]
    """Matches the names of checkpoints. The numbers in a name define the order."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep: int | None,
        monitor: str | None,
        mode: Literal["min", "max"],
    ) -> None:
        self._folder = locate(folder)
        self._keep = keep
        self._monitor = monitor
        self._mode = mode
        self._manifests: dict[str, Manifest | None] = {}
        """Manifests by checkpoint name; None for a manifest that cannot be read."""

    def _names(self) -> list[str]:
        """Return the names of the checkpoints, newest first."""
        found = filter(self._pattern.fullmatch, self._folder.file_names())
        return sorted(found, key=position_of, reverse=True)

    def _check(self, name: str, manifest: Manifest) -> None:
        """Raise an error if a checkpoint does not belong in this folder."""

    def _learn(self, names: Iterable[str]) -> None:
        """Read new manifests, and forget the manifests of checkpoints that are not in `names`."""
        known = self._manifests
        self._manifests = {name: known[name] for name in names if name in known}
        for name in names:
            if name in known:
                continue
            try:
                manifest = read_manifest(self._folder.child(name).name)
            except UnreachableError:
                raise
            except CheckpointError as error:
                logger.warning("Ignored a damaged checkpoint: %s", error)
                manifest = None
            if manifest is not None:
                self._check(name, manifest)
            self._manifests[name] = manifest

    def _load_first(
        self,
        names: Iterable[str],
        read: Callable[[str], tuple[Any, Manifest | None]],
    ) -> tuple[str, Any, Manifest]:
        """Return the name, the content, and the manifest of the first checkpoint that loads.

        Warn of the checkpoints before it. Raise an error if a checkpoint could not be read, but may
        be intact.
        """
        skipped: list[tuple[str, str]] = []
        for name in names:
            file = self._folder.child(name)
            try:
                content, manifest = read(file.name)
            except UnreachableError:
                raise
            except CheckpointError as error:
                skipped.append((file.shown, str(error)))
                self._manifests[name] = None
                continue
            if manifest is None:
                skipped.append((file.shown, "It has no manifest."))
                continue
            self._check(name, manifest)
            for place, reason in skipped:
                logger.warning("Skipped %s: %s", place, reason)
            return name, content, manifest
        reasons = "".join(f"\n- {place}: {reason}" for place, reason in skipped)
        raise CheckpointError(f"No checkpoint in {self._folder.shown} can be loaded:{reasons}")

    def _surplus(self, newest: str | None) -> list[str]:
        """Return the checkpoints to remove: neither `newest` nor among the best."""
        ranked = [] if self._keep is None else self._ranked(newest)[self._keep :]
        return [name for name in ranked if name != newest]

    def _ranked(self, newest: str | None = None) -> list[str]:
        """Return the names of the readable checkpoints, best first, then newest first."""
        known = (name for name, manifest in self._manifests.items() if manifest)
        return sorted(known, key=lambda name: self._goodness(name, newest), reverse=True)

    def _goodness(self, name: str, newest: str | None) -> Any:
        """Return a sort key; larger is better."""
        value = self._value_of(name)
        is_rated = not math.isnan(value)
        rating = (value if self._mode == "max" else -value) if is_rated else 0.0
        is_current = newest is None or not is_abandoned(name, newest)
        return is_current, is_rated, rating, position_of(name)

    def _value_of(self, name: str) -> float:
        manifest = self._manifests[name]
        return manifest.metrics.get(self._monitor or "", math.nan) if manifest else math.nan


def is_abandoned(name: str, newest: str) -> bool:
    """Return whether `name` has a later step than `newest`, because training went back."""
    return position_of(name)[1:] > position_of(newest)[1:]


def position_of(name: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall("[0-9]+", name)))
