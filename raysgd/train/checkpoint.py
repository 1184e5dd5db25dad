"""Checkpoints of training functions."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import cloudpickle

from raysgd._internal.arguments import as_int, check_choice
from raysgd._internal.paths import as_path
from raysgd.checkpoint.file import read_pickle, write_pickle
from raysgd.checkpoint.location import Location
from raysgd.checkpoint.manifest import Manifest
from raysgd.checkpoint.store import CheckpointFolder, name_numbers
from raysgd.train.constants import TIMESTAMP
from raysgd.train.result_queue import TrainingResult

logger = logging.getLogger(__name__)

_FILES = "_files"
"""Key of a packed folder: contents by relative file name."""
_DICT = "dict_checkpoint.pkl"
_METADATA = ".metadata.json"  # the file of Ray


def load_checkpoint_from_path(checkpoint_file_path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a checkpoint. Unpickling can run code from the file: read only files that you trust.

    Raise CheckpointError if the file is missing or damaged.
    """
    state: dict[str, Any] = pickle.loads(read_pickle(checkpoint_file_path)[0])
    return state


@dataclass
class CheckpointConfig:
    """Which checkpoints of a run stay on disk."""

    num_to_keep: int | None = None
    """Number of the best checkpoints to keep. None keeps all, 0 writes none. During the run, the
    newest checkpoint is kept in addition, because a restart needs it."""
    checkpoint_score_attribute: str | None = "_timestamp"
    """Name of the number that rates a checkpoint, in the checkpoint or else in its report. NaN is
    the worst rating. A checkpoint without this number raises ValueError. None: newer is better."""
    checkpoint_score_order: Literal["max", "min"] = "max"
    """Whether larger or smaller numbers are better."""

    def __post_init__(self) -> None:
        name, order = type(self).__name__, self.checkpoint_score_order
        if self.num_to_keep is not None:
            self.num_to_keep = as_int(name, "num_to_keep", self.num_to_keep, 0)
        check_choice(name, "checkpoint_score_order", order, ("max", "min"))


CheckpointStrategy = CheckpointConfig  # older name


class Checkpoint:
    """Values by name, or the files of a folder. Each form converts to the other.

    Create one with `from_dict`, `from_directory`, or a path. A file loads on first access. Reading
    unpickles data, which can run code: read only checkpoints that you trust.
    """

    def __init__(
        self,
        data: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        path: str | os.PathLike[str] | None = None,
        blob: bytes | None = None,
    ) -> None:
        if isinstance(data, str | os.PathLike):  # as in Ray
            data, path = None, data
        self._data = data
        self.path = None if path is None else str(as_path("checkpoint", path))
        """Path of the folder or file. None if the checkpoint is in memory."""
        self._blob = blob

    # ---- create

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Checkpoint:
        """Create a checkpoint of values by name."""
        if not isinstance(data, Mapping):
            raise TypeError(f"Checkpoint.from_dict({data!r}): must be a dict.")
        return cls(data=dict(data))

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Create a checkpoint of a folder, which must exist until it is reported."""
        if not Path(path).expanduser().is_dir():
            raise ValueError(
                f"Checkpoint.from_directory({os.fspath(path)!r}): must be an existing folder."
            )
        return cls(path=path)

    @classmethod
    def from_any(cls, checkpoint: Any) -> Checkpoint:
        """Return the checkpoint for a dict, a path, or a Ray checkpoint (a folder)."""
        if isinstance(checkpoint, Checkpoint):
            return checkpoint
        if hasattr(checkpoint, "as_directory"):  # of Ray, which is no usable path
            with checkpoint.as_directory() as folder:
                return cls(cls(folder).to_dict())
        if isinstance(checkpoint, Mapping | str | os.PathLike):
            return cls(checkpoint)
        raise TypeError(
            f"checkpoint={checkpoint!r}: must be a dict, a Checkpoint, or the path of a checkpoint."
        )

    # ---- read

    def to_dict(self) -> dict[str, Any]:
        """Return the values. Raise CheckpointError if the file is missing or damaged.

        A folder that `to_directory` did not write becomes ``{"_files": {name: bytes}}``.
        """
        if self._data is not None:
            return dict(self._data)
        if self.path is None:
            return {} if self._blob is None else dict(pickle.loads(self._blob))
        if not os.path.isdir(self.path):
            state = load_checkpoint_from_path(self.path)
            if not isinstance(state, Mapping):
                raise TypeError(f"{self} has a {type(state).__name__}: it must have a dict.")
            return state
        files = _read_folder(self.path)
        return pickle.loads(files[_DICT]) if files.keys() == {_DICT} else {_FILES: files}

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Write the checkpoint into a folder, by default a new temporary one. Return its path.

        Values go into one pickled file. Empty folders and permissions of files are not kept.
        """
        target = Path(path or tempfile.mkdtemp(prefix="checkpoint_")).expanduser()
        target.mkdir(parents=True, exist_ok=True)
        data = self.to_dict()
        files = data[_FILES] if data.keys() == {_FILES} else {_DICT: cloudpickle.dumps(data)}
        for name, content in files.items():
            file = target / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        return str(target)

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """Yield the path of the checkpoint as a folder. Remove a temporary folder afterwards."""
        if self.path is not None and os.path.isdir(self.path):
            yield self.path
            return
        with tempfile.TemporaryDirectory(prefix="checkpoint_", ignore_cleanup_errors=True) as path:
            yield self.to_directory(path)

    # ---- metadata of the trainer and of user code

    def get_metadata(self) -> dict[str, Any]:
        """Return the metadata."""
        state = self.to_dict()
        text = state.get(_FILES, {}).get(_METADATA)
        return dict(state.get("_metadata", {}) if text is None else json.loads(text))

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replace the metadata, until the checkpoint is reported in memory only."""
        state = self.to_dict()
        if state.keys() == {_FILES}:
            self._data = {_FILES: {**state[_FILES], _METADATA: json.dumps(metadata).encode()}}
        else:
            self._data = {**state, "_metadata": dict(metadata)}

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Add or change metadata."""
        self.set_metadata({**self.get_metadata(), **metadata})

    def __repr__(self) -> str:
        where = "in memory" if self.path is None else f"path={self.path!r}"
        return f"Checkpoint({where})"

    def __reduce__(self) -> Any:
        return Checkpoint, (self.to_dict(),)


def _read_folder(folder: str) -> dict[str, bytes]:
    """Return the contents of the files of a folder, by relative name. Follow links."""
    folders = os.walk(folder, followlinks=True)
    paths = [Path(parent, name) for parent, _, names in folders for name in names]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


class RunCheckpoints(CheckpointFolder):
    """Keeps the newest checkpoint of a run in memory, and the selection of the strategy on disk.

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
        if result.nonfinite_array:
            logger.warning(
                "A checkpoint is not kept, because its %s has NaN or infinity. The last finite "
                "checkpoint stays.",
                result.nonfinite_array,
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
            write_pickle(blob, self._folder.child(name).path, manifest)
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
        return Path(self._folder.child(name).path)
