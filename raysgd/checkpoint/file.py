"""One state in one file: written whole or not at all, and read without running code from it."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raysgd.errors import CheckpointError
from raysgd.trees import map_leaves

__all__ = ["check_writable", "read_file", "write_file"]

_ALLOW = (
    "Turn it into numbers, strings, lists, dicts or torch tensors, or allow its type with "
    "torch.serialization.add_safe_globals([...]) before saving and before loading."
)


def check_writable(path: str | os.PathLike[str]) -> Path:
    """Return `path` as an absolute one, if a file can be written there.

    Raises:
        CheckpointError: if its folder is missing or not writable, or it is a folder itself.
    """
    target = Path(path).expanduser().resolve()  # a link stays one, and its target is replaced
    folder = target.parent
    if target.is_dir():
        problem = "it is a folder; give the name of a file in it"
    elif target.exists() and not target.is_file():
        problem = "it is no regular file"
    elif not folder.is_dir():
        problem = f"the folder {folder} does not exist; create it first"
    elif not os.access(folder, os.W_OK | os.X_OK):
        problem = f"there is no permission to write into {folder}"
    else:
        return target
    raise CheckpointError(f"Cannot save to {target}: {problem}.")


def write_file(state: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write a state to `path`, replacing a file there, and return the absolute path.

    The state goes to a temporary name in the same folder, to the disk, and only then to its
    own name: whenever the process or the machine stops, `path` holds the old state or the new.

    Raises:
        CheckpointError: if it cannot be written, or the user's part of it could not be loaded.
    """
    target = check_writable(path)
    # numpy's numbers do not load without being allowed, and Python's do
    state = map_leaves(dict(state), lambda x: x.item() if isinstance(x, np.generic) else x)
    _check_loadable(state.get("operator"), target)
    try:
        descriptor, name = tempfile.mkstemp(prefix=".saving-", dir=target.parent)
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, target)
            _sync_folder(target.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    # torch.save reports a full disk as RuntimeError, and what cannot be pickled as the others
    except (OSError, RuntimeError, pickle.PicklingError, AttributeError, TypeError) as error:
        raise CheckpointError(f"Cannot save to {target}: {error}") from error
    return target


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a state that `write_file`, or ``torch.save`` of an older library, wrote.

    Raises:
        CheckpointError: if the file is missing, damaged, not a state, or holds objects that
            ``torch.load(weights_only=True)`` refuses.
    """
    source = Path(path).expanduser().absolute()
    if not source.is_file():
        problem = "it is a folder" if source.is_dir() else "there is no such file"
        raise CheckpointError(f"Cannot load {source}: {problem}.")
    try:
        if zipfile.is_zipfile(source):
            # torch does not look at the checksums
            with zipfile.ZipFile(source) as archive:
                if (damaged := archive.testzip()) is not None:
                    raise ValueError(f"{damaged} has another checksum")
        state = torch.load(source, map_location="cpu", weights_only=True)
    except PermissionError as error:
        raise CheckpointError(f"Cannot load {source}: {error}") from error
    except Exception as error:
        if "weights_only" in str(error) and "GLOBAL" in str(error):
            raise CheckpointError(
                f"Cannot load {source}: it holds objects of a type that is not allowed, and "
                f"loading never runs code from a file. {_ALLOW}\n{_first_line(error)}"
            ) from error
        # torch's own words advise to load without protection
        said = "" if "weights_only" in str(error) else f": {_first_line(error)}"
        raise CheckpointError(
            f"Cannot load {source}: the file is damaged or is not a checkpoint "
            f"({type(error).__name__}{said})."
        ) from error
    missing = [
        key
        for key in ("models", "optimizers", "epoch")
        if not isinstance(state, dict) or key not in state
    ]
    if missing:
        raise CheckpointError(
            f"Cannot load {source}: it is no state of a trainer, {', '.join(missing)} missing. "
            "Write one with trainer.save(path)."
        )
    result: dict[str, Any] = state
    return result


def _check_loadable(user_state: Any, target: Path) -> None:
    """Check that the user's own state will load again: find out now, not when it is needed."""
    if user_state is None:
        return
    buffer = io.BytesIO()
    try:
        torch.save(user_state, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"Cannot save to {target}: what the operator's state_dict() returned could not be "
            f"loaded again. {_ALLOW}\n{_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _umask() -> int:
    """Return the process's umask; there is no way to read it but to set it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    """Write the folder's entries to disk, so that the new name survives a power failure."""
    with contextlib.suppress(OSError):  # some file systems cannot
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
