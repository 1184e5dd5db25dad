"""Checkpoints of training functions."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import cloudpickle

from raysgd._internal.arguments import as_int, check_choice
from raysgd._internal.paths import as_path
from raysgd.checkpoint.file import read_pickle

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
        self._path = None if path is None else as_path("checkpoint", path)
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

    @property
    def path(self) -> str | None:
        """Path of the checkpoint's folder or file. None if the checkpoint is in memory."""
        return None if self._path is None else str(self._path)

    def to_dict(self) -> dict[str, Any]:
        """Return the values. Raise CheckpointError if the file is missing or damaged.

        A folder that `to_directory` did not write becomes ``{"_files": {name: bytes}}``.
        """
        if self._data is not None:
            return dict(self._data)
        if self._path is None:
            return {} if self._blob is None else dict(pickle.loads(self._blob))
        if not self._path.is_dir():
            state = load_checkpoint_from_path(self._path)
            if not isinstance(state, Mapping):
                raise TypeError(f"{self} has a {type(state).__name__}: it must have a dict.")
            return state
        files = _read_folder(self._path)
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
        if self._path is not None and self._path.is_dir():
            yield str(self._path)
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
        where = "in memory" if self._path is None else f"path={str(self._path)!r}"
        return f"Checkpoint({where})"

    def __reduce__(self) -> Any:
        return Checkpoint, (self.to_dict(),)


def _read_folder(folder: Path) -> dict[str, bytes]:
    """Return the contents of the files of a folder, by relative name. Follow links."""
    folders = os.walk(folder, followlinks=True)
    paths = [Path(parent, name) for parent, _, names in folders for name in names]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
