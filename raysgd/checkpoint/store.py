"""A folder of checkpoints of one job: the newest, and those that are worth keeping."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from raysgd._internal.files import TEMPORARY_NAME
from raysgd.checkpoint.file import STATE, read_checkpoint, write_file
from raysgd.checkpoint.folder import CheckpointFolder, is_given_up, position_of
from raysgd.checkpoint.location import UnreachableError, locate
from raysgd.checkpoint.manifest import Manifest
from raysgd.checkpoint.sharded import (
    remove_folder,
    remove_unfinished,
    writable_folder,
    write_folder,
)
from raysgd.errors import CheckpointError

__all__ = ["CheckpointStore", "Restored"]

logger = logging.getLogger(__name__)

_LATEST = "latest"
_BEST = "best"


class Restored(NamedTuple):
    """What was found in a folder of checkpoints."""

    path: str
    state: dict[str, Any]
    passed_over: list[tuple[str, str]]
    """Those that were tried before it and could not be loaded, in that order, and why. A URL is
    without its password."""

    @property
    def shown(self) -> str:
        """The path in messages: a URL is without its password."""
        return locate(self.path).shown


class CheckpointStore(CheckpointFolder):
    """Saves the checkpoints of one job into a folder, and finds the newest that loads.

    The folder holds ``epoch-00003-step-00000512.ckpt`` and the like, and ``latest``, a text file
    that names the newest; with `monitor` also ``best``, which names the best. A state that workers
    write together is a folder, without ``.ckpt`` in its name. The two text files change when a
    checkpoint is on disk, and only then are older ones removed. If the process is killed, the
    newest checkpoint that loads is the last one that was saved, or the one that was under way.
    One process at a time may save into the folder.

    Args:
        folder: a path, or a URL of any file system that fsspec knows. It is made with the first
            checkpoint.
        keep: how many checkpoints to keep; None for all. With `monitor` the best, and the newest
            besides. If training went back, those of later steps are removed first.
        monitor: name of the metric by which the best are kept; without one the newest are.
        mode: "min" if smaller values of the metric are better, or "max".
        job: name of the job; a folder with checkpoints of another one is refused.

    Raises:
        ValueError: if an argument has a value that is not allowed.
        CheckpointError: if the folder is a URL that no installed package can open.
    """

    _pattern = re.compile(r"epoch-[0-9]{5,}-step-[0-9]{8,}(\.ckpt)?")

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        job: str,
    ) -> None:
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise ValueError(
                f"CheckpointStore(keep={keep!r}): must be at least 1, or None for all."
            )
        if mode not in ("min", "max"):
            raise ValueError(f'CheckpointStore(mode={mode!r}): must be "min" or "max".')
        if not isinstance(job, str) or not job:
            raise ValueError(f"CheckpointStore(job={job!r}): must be the name of the job.")
        super().__init__(folder, keep, monitor, mode)
        self._job = job
        self._made = False
        self._best_named: str | None = None

    def save(
        self,
        state: Mapping[str, Any],
        metrics: Mapping[str, Any] | None = None,
        world_size: int = 1,
        operator: str = "",
        of_training: bool = False,
    ) -> str:
        """Write a checkpoint, name it the newest, and remove what is not to be kept.

        Args:
            state: what a trainer's ``state_dict`` returned, or that of a divided model whose
                tensors its workers have written into `tensors_folder`.
            metrics: what was measured with it; the numbers in it are kept in the file.
            world_size: number of workers.
            operator: name of the operator.
            of_training: whether `metrics` are those of training alone. Such a checkpoint is kept
                after those with metrics of a validation, however good its own metric is.

        Returns:
            The path of the checkpoint, or its URL.

        Raises:
            ValueError: if `metrics` lacks the monitored metric, or it is no number.
            CheckpointError: if it cannot be written, or the folder belongs to another job.
        """
        numbers = _numbers(metrics or {})
        self._check_monitored(numbers, metrics or {})
        if not self._made:
            self._folder.make_folder()
            self._made = True
        self._learn(self._names())
        name = f"epoch-{state['epoch']:05d}-step-{state.get('global_step', 0):08d}"
        manifest = Manifest(
            world_size=world_size,
            operator=operator,
            job=self._job,
            metrics=numbers,
            of_training=of_training,
        )
        if "tensors" in state:
            path = write_folder(state, writable_folder(self._folder.child(name)), manifest)
        else:
            name += ".ckpt"
            path = write_file(state, self._folder.child(name).name, manifest)
        self._point_to(name)
        self._manifests[name] = manifest
        best = self._best_of(name)
        if best is not None and best != self._best_named:
            self._point_to(best, _BEST)
        self._best_named = best
        self._tidy(name)
        return path

    @property
    def is_local(self) -> bool:
        """Whether it is a path, and no URL."""
        return self._folder.is_local

    @property
    def tensors_folder(self) -> Path:
        """The folder in which workers write the tensors of a state before `save` gets it.

        Raises:
            CheckpointError: if the store's is a URL, or cannot be made.
        """
        return writable_folder(self._folder)

    @property
    def best(self) -> str | None:
        """The path or URL of the checkpoint whose monitored metric is best.

        None without `monitor`, or if no checkpoint has that metric.

        Raises:
            CheckpointError: if the folder belongs to another job, or cannot be reached.
        """
        self._learn(self._names())
        best = self._best_of(self._pointed_to()[0])
        return None if best is None else self._folder.child(best).name

    def restore(self) -> Restored | None:
        """Load the newest intact checkpoint.

        Those of later steps than ``latest`` names are tried last: training went back to an older
        one, or started again.

        Returns:
            Its path, its state, and the newer ones that were passed over, with the reason; None
            if the folder is empty or missing.

        Raises:
            CheckpointError: if there are checkpoints and none can be loaded, if the folder belongs
                to another job, or if it cannot be reached.
        """
        names = self._names()
        newest, problem = self._pointed_to()
        passed_over = [] if problem is None else [(self._folder.child(_LATEST).shown, problem)]
        if newest is not None:
            names = [newest, *(name for name in names if name != newest)]
            names.sort(key=lambda name: is_given_up(name, newest))  # keeps the order otherwise
        if not names and problem is None:
            return None
        name, state, _ = self._load_first(names, read_checkpoint, passed_over)
        return Restored(self._folder.child(name).name, state, passed_over)

    # ---- helpers

    def _names(self) -> list[str]:
        files = (name for name in super()._names() if name.endswith(".ckpt"))
        return sorted([*files, *self._folders(whole=True)], key=position_of, reverse=True)

    def _folders(self, whole: bool) -> list[str]:
        """Return the names of folders that hold a checkpoint, or only parts of one."""
        if not self.is_local:
            return []
        return [
            path.name
            for path in Path(self._folder.name).glob("epoch-*")
            if self._pattern.fullmatch(path.name) and not path.suffix
            if path.is_dir() and (path / STATE).is_file() is whole
        ]

    def _check(self, name: str, manifest: Manifest) -> None:
        if manifest.job != self._job:
            error = CheckpointError(
                f"{self._folder.shown} holds checkpoints of job {manifest.job!r} ({name}), and "
                f"this is job {self._job!r}. Give each job a folder of its own."
            )
            # a note, because the command has no such call and leaves it out
            error.add_note(
                "To start from that one's state, call "
                f"trainer.load({self._folder.child(name).shown!r})."
            )
            raise error

    def _check_monitored(self, numbers: Mapping[str, float], metrics: Mapping[str, Any]) -> None:
        if self._monitor is None or self._monitor in numbers:
            return
        problem = f"there is no such metric. There are: {', '.join(numbers) or 'none'}."
        if self._monitor in metrics:
            problem = f"it must be a number, but it is {metrics[self._monitor]!r}."
        raise ValueError(f"CheckpointStore(monitor={self._monitor!r}): {problem}")

    def _point_to(self, name: str, pointer: str = _LATEST) -> None:
        def fill(file: IO[bytes]) -> None:
            file.write(_pointer_to(name))

        self._folder.child(pointer).write(fill)

    def _pointed_to(self) -> tuple[str | None, str | None]:
        """Return the name in ``latest``, if there is one, or what is wrong with that file."""
        if _LATEST not in self._folder.file_names():
            return None, None
        try:
            with self._folder.child(_LATEST).open(whole=False) as file:
                text = file.read(1000)
        except UnreachableError:
            raise
        except CheckpointError as error:
            return None, str(error)
        name = text.split(b"\n")[0].decode(errors="replace")
        if not self._pattern.fullmatch(name) or text != _pointer_to(name):
            return None, "It is damaged: it names no checkpoint."
        return name, None

    def _tidy(self, newest: str) -> None:
        """Remove what is not to be kept. An error is logged, because the checkpoint is saved."""
        try:
            for name in self._surplus(newest):
                self._remove(name)
                del self._manifests[name]
            for name in self._folders(whole=False):  # left by a killed process
                self._remove(name)
            outdated = None if self._best_of(newest) else _BEST
            for name in self._folder.file_names():
                unfinished = TEMPORARY_NAME.fullmatch(name)  # its writer was killed
                target = unfinished[1] if unfinished else ""
                is_ours = target in (_LATEST, _BEST) or self._pattern.fullmatch(target)
                if is_ours or name == outdated:
                    self._folder.child(name).remove()
            if self.is_local:
                remove_unfinished(Path(self._folder.name))
        except CheckpointError as error:
            logger.warning("Saved %s, but could not remove older ones: %s", newest, error)

    def _remove(self, name: str) -> None:
        file = self._folder.child(name)
        if name.endswith(".ckpt"):
            file.remove()
        else:
            remove_folder(Path(file.name))

    def _best_of(self, newest: str | None) -> str | None:
        """Return the best of those that have the monitored metric."""
        rated = (name for name in self._ranked(newest) if not math.isnan(self._value_of(name)))
        return next(rated, None)


def _pointer_to(name: str) -> bytes:
    return f"{name}\nsha256 {hashlib.sha256(name.encode()).hexdigest()}\n".encode()


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    numbers = {}
    for name, value in metrics.items():
        try:
            if not isinstance(value, str | bytes):
                numbers[name] = float(value.item() if hasattr(value, "item") else value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            continue
    return numbers
