"""Folders with the newest and the best checkpoints of one run."""

import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from raysgd._internal.arguments import as_int, resolve_mode
from raysgd._internal.files import TEMPORARY_NAME
from raysgd._internal.values import numbers_in
from raysgd.checkpoint.file import read_checkpoint, read_manifest, write_file
from raysgd.checkpoint.location import Location, UnreachableError
from raysgd.checkpoint.manifest import Manifest
from raysgd.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class CheckpointFolder:
    """The checkpoints in a folder. A subclass names, reads, and writes them."""

    _pattern: ClassVar[re.Pattern[str]]
    """Matches the names of checkpoints. The numbers in a name define the order."""

    _folder: Location
    _keep: int | None
    _monitor: str | None
    _mode: Literal["min", "max"]
    _experiment: str = ""
    """Name of the experiment that every checkpoint must have."""
    _manifests: dict[str, Manifest | None] = field(default_factory=dict)
    """Manifests by checkpoint name; None for a manifest that cannot be read."""

    def _names(self) -> list[str]:
        """Return the names of the checkpoints, newest first."""
        names = filter(self._pattern.fullmatch, self._folder.file_names())
        return sorted(names, key=name_numbers, reverse=True)

    def _check_experiment(self, name: str, manifest: Manifest) -> None:
        if (found := manifest.experiment) != self._experiment:
            raise CheckpointError(
                f"{self._folder.label} has checkpoints of experiment {found!r} ({name}), but this "
                f"is {self._experiment!r}. Use another folder, or pass experiment={found!r}."
            )

    def _read_manifests(self, names: Iterable[str]) -> None:
        """Read new manifests, and forget the manifests of checkpoints that are not in `names`."""
        known = self._manifests
        self._manifests = {name: known[name] for name in names if name in known}
        for name in (each for each in names if each not in known):
            try:
                manifest = read_manifest(self._folder.child(name).path)
            except UnreachableError:
                raise
            except CheckpointError as error:
                logger.warning("Ignored a damaged checkpoint: %s", error)
                manifest = None
            if manifest is not None:
                self._check_experiment(name, manifest)
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
                content, manifest = read(file.path)
            except UnreachableError:
                raise
            except CheckpointError as error:
                skipped.append((file.label, str(error)))
                self._manifests[name] = None
                continue
            if manifest is None:
                skipped.append((file.label, "It has no manifest."))
                continue
            self._check_experiment(name, manifest)
            for label, reason in skipped:
                logger.warning("Skipped %s: %s", label, reason)
            return name, content, manifest
        reasons = "".join(f"\n- {label}: {reason}" for label, reason in skipped)
        raise CheckpointError(f"No checkpoint in {self._folder.label} can be loaded:{reasons}")

    def _remove_surplus(self, newest: str | None) -> None:
        """Remove all checkpoints but `newest` and the best ones. Only log errors."""
        surplus = [] if self._keep is None else self._list_best_first()[self._keep :]
        try:
            for name in surplus:
                if name != newest:
                    self._folder.child(name).remove()
                    del self._manifests[name]
            for name in self._folder.file_names() if newest else ():
                unfinished = TEMPORARY_NAME.fullmatch(name)  # the writer of this file was killed
                if unfinished and self._pattern.fullmatch(unfinished[1]):
                    self._folder.child(name).remove()
        except CheckpointError as error:
            logger.warning("Could not remove older checkpoints: %s", error)

    def _list_best_first(self) -> list[str]:
        """Return the names of the readable checkpoints, best first, then newest first."""
        known = (name for name, manifest in self._manifests.items() if manifest)
        return sorted(known, key=self._rating, reverse=True)

    def _rating(self, name: str) -> tuple[bool, float, tuple[int, ...]]:
        """Return a sort key; larger is better. It begins with whether the checkpoint is rated."""
        manifest = self._manifests[name]
        value = manifest.metrics.get(self._monitor or "", math.nan) if manifest else math.nan
        if math.isnan(value):
            return False, 0.0, name_numbers(name)
        return True, value if self._mode == "max" else -value, name_numbers(name)


class RestoredCheckpoint(NamedTuple):
    """The newest intact checkpoint in a folder."""

    path: str
    state: dict[str, Any]


class CheckpointStore(CheckpointFolder):
    """Saves the checkpoints of one experiment into a folder, and loads the newest intact one.

    The folder has files such as ``0007-epoch-00003-step-00000512.ckpt``, in the order of the saves.
    Older ones are removed when a new one is on disk. If the process is killed, at most the current
    save is lost. One process at a time may save into the folder.

    Args:
        folder: a path, or a URL for fsspec. The first save creates it.
        keep: number of checkpoints to keep; None for all. With `monitor`, these are the best, and
            the newest is kept in addition.
        monitor: name of the metric that selects the best checkpoints; None keeps the newest.
        mode: "min" if smaller values of the metric are better, or "max". None: from the name of the
            metric, as "max" for ``val_accuracy``.
        experiment: its name. A folder with checkpoints of another experiment raises an error.

    Raises:
        ValueError: if an argument has a value that is not allowed.
        TypeError: if an argument has another type.
    """

    _pattern = re.compile(r"[0-9]{4,}-epoch-[0-9]{5,}-step-[0-9]{8,}\.ckpt")

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        monitor: str | None = None,
        mode: Literal["min", "max"] | None = None,
        experiment: str,
    ) -> None:
        if keep is not None:
            keep = as_int("CheckpointStore", "keep", keep, 1)
        mode = resolve_mode("CheckpointStore", monitor, mode)
        if not isinstance(experiment, str) or not experiment:
            raise ValueError(
                f"CheckpointStore(experiment={experiment!r}): must be a string with a name."
            )
        super().__init__(Location(folder), keep, monitor, mode, experiment)

    def save(
        self,
        state: Mapping[str, Any],
        metrics: Mapping[str, Any] | None = None,
        world_size: int = 1,
        operator_name: str = "",
    ) -> str:
        """Write the newest checkpoint, and remove surplus ones.

        Args:
            state: result of a trainer's ``state_dict``.
            metrics: metrics of the state. The file contains the metrics that are numbers.
            world_size: number of workers.
            operator_name: class of the operator.

        Returns:
            The path of the checkpoint, or its URL.

        Raises:
            ValueError: if `metrics` has no number for `monitor`.
            CheckpointError: if the checkpoint cannot be written, the folder belongs to another
                experiment, or models, optimizers, or averages have NaN or infinity.
        """
        numbers = numbers_in(metrics or {})
        if self._monitor is not None and self._monitor not in numbers:
            raise ValueError(
                f"CheckpointStore(monitor={self._monitor!r}): must name a metric with one "
                f"number. The numbers are: {', '.join(numbers) or 'none'}."
            )
        self._folder.make_folder()
        names = self._names()
        self._read_manifests(names)
        number = name_numbers(names[0])[0] + 1 if names else 1
        step = state.get("global_step", 0)
        name = f"{number:04d}-epoch-{state['epoch']:05d}-step-{step:08d}.ckpt"
        manifest = Manifest(
            world_size=world_size,
            operator_name=operator_name,
            experiment=self._experiment,
            metrics=numbers,
        )
        path = write_file(state, self._folder.child(name).path, manifest)
        self._manifests[name] = manifest
        self._remove_surplus(name)
        return path

    @property
    def best(self) -> str | None:
        """The path or URL of the checkpoint with the best monitored metric; None without one."""
        self._read_manifests(self._names())
        rated = [name for name in self._list_best_first() if self._rating(name)[0]]
        return self._folder.child(rated[0]).path if rated else None

    def restore(self) -> RestoredCheckpoint | None:
        """Load the newest intact checkpoint. Warn of newer ones that are damaged.

        Returns:
            The checkpoint; None if the folder is empty or missing.

        Raises:
            CheckpointError: if the folder has checkpoints but none can be loaded, if it belongs to
                another experiment, or if it cannot be reached.
        """
        if not (names := self._names()):
            return None
        name, state, _ = self._load_first(names, read_checkpoint)
        file = self._folder.child(name)
        return RestoredCheckpoint(file.path, {**state, "parent": {"path": file.label}})


def name_numbers(name: str) -> tuple[int, ...]:
    """Return the numbers in the name of a checkpoint, which order checkpoints."""
    return tuple(map(int, re.findall("[0-9]+", name)))
