"""Write the tensors of a sharded state into one file, although no process holds all of them.

Each worker writes its rows into a distributed checkpoint of PyTorch, which consolidates them in one
``.safetensors`` file. Loading maps that file into memory and runs no code.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from raysgd._internal.files import sync_folder
from raysgd.checkpoint.file import TENSORS_FILE
from raysgd.checkpoint.sharded import UnsharedFolderError
from raysgd.errors import CheckpointError
from raysgd.torch.sharding.pieces import is_divided

if TYPE_CHECKING:
    from raysgd.torch.train_state import TorchTrainState


def write_state(train_state: TorchTrainState, state: dict[str, Any], folder: str) -> str:
    """Move the tensors of this worker's state to a file. Return its hash on rank 0, else ""."""
    if train_state.sharding != "full":
        raise ValueError(
            'save(sharded=True) needs register(sharding="full") in the operator. Leave out sharded.'
        )
    full = train_state.feature("FullyShardedModel")
    if full is None:  # one worker: its state is complete
        write({}, folder)
        return _hash_in(folder)
    for number, *_, values in state.pop("shares")[0]:
        rest = {n: v for n, v in values.items() if not is_divided(v)}
        if "optimizers" in state:
            state["optimizers"][0]["state"].setdefault(number, rest)
    write(full.tensors(), folder)
    return _hash_in(folder)


def write_weights(
    train_state: TorchTrainState, folder: str
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Write the parameters of the sharded models to a file in `folder`.

    Return the other tensors of the models, and a dict from each further name of a tied parameter
    to its name in the file.
    """
    full, count = train_state.feature("FullyShardedModel"), len(train_state.given_models)
    prefixes = [""] if count == 1 else [f"{index}." for index in range(count)]
    first_names: dict[int, str] = {}
    other_names: dict[str, str] = {}
    models = full.models
    for prefix, names in zip(prefixes, models.names, strict=False):
        for name, which in names.items():
            kept = first_names.setdefault(which, prefix + name)
            if kept != prefix + name:
                other_names[prefix + name] = kept
    write({kept: models.rows_as(n, models.local(n)) for n, kept in first_names.items()}, folder)
    rest = {
        f"{prefix}{name}": value
        for prefix, held in zip(prefixes, full.unsharded()[:count], strict=True)
        for name, value in held.state_dict().items()
    }
    return rest, other_names


_SHARE = "All workers need access to it. On several nodes, use a shared file system."


def write(tensors: Mapping[str, Any], folder: str) -> None:
    """Write tensors, or rows of `DTensor`, into one file in a new folder. All ranks call this."""
    path = Path(folder)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    with _reporting(folder):
        if is_first:  # the folder exists if an earlier attempt lost a worker
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
        if dist.is_initialized():
            _check_shared(path)
            _write_rows(tensors, folder)
        else:
            from safetensors.torch import save_file

            save_file(dict(tensors), path / TENSORS_FILE)
        if is_first:
            shutil.rmtree(path / "sharded", ignore_errors=True)
            with (path / TENSORS_FILE).open("rb") as file:
                os.fsync(file.fileno())
            sync_folder(path)


def _hash_in(folder: str) -> str:
    if dist.is_initialized() and dist.get_rank() != 0:
        return ""
    with _reporting(folder), (Path(folder) / TENSORS_FILE).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_shared(path: Path) -> None:
    """Reject a folder that rank 0 created and other ranks cannot see."""
    dist.barrier()
    seen = [False] * dist.get_world_size()
    dist.all_gather_object(seen, path.is_dir())
    if not all(seen):
        raise UnsharedFolderError(
            f"Cannot save to {path}: some workers do not see the folder of rank 0. {_SHARE}"
        )


def _write_rows(tensors: Mapping[str, Any], folder: str) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=True)
    try:
        save(dict(tensors), storage_writer=writer)
    except CheckpointException as error:  # CheckpointException is a BaseException
        raise next(iter(error.failures.values()))[0] from error


@contextlib.contextmanager
def _reporting(folder: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"Cannot save to {folder}: {error}. {_SHARE}") from error


def with_tensors(state: Mapping[str, Any], copy: bool) -> dict[str, Any]:
    """Return a state with the tensors from its file, which are mapped from it without `copy`."""
    if "tensors" not in state:
        return dict(state)
    from safetensors import safe_open

    whole = {key: value for key, value in state.items() if key != "tensors"}
    path = "the tensors of a state"
    try:
        path = state["tensors"]["path"]
        models = [dict(model) for model in state["models"]]
        optimizers = [
            {**each, "state": {number: dict(held) for number, held in each["state"].items()}}
            for each in state["optimizers"]
        ]
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no dict
                kind, index, name = key.split(".", 2)
                tensor = file.get_tensor(key)
                tensor = tensor.clone() if copy else tensor
                if kind == "models":
                    models[int(index)][name] = tensor
                else:
                    number, _, part = name.partition(".")
                    optimizers[int(index)]["state"].setdefault(int(number), {})[part] = tensor
    except Exception as error:  # a damaged or missing file can raise anything
        raise CheckpointError(f"Cannot load {path}: {error}. {_SHARE}") from error
    return {**whole, "models": models, "optimizers": optimizers}
