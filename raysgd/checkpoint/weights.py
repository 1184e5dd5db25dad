"""Model weights for use in other programs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raysgd._internal.imports import import_extra
from raysgd.checkpoint.location import locate
from raysgd.errors import CheckpointError

if TYPE_CHECKING:
    import torch


def save_model(
    models: torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, Any],
    path: str | os.PathLike[str],
) -> str:
    """Write the weights of models to a ``.safetensors`` file, completely or not at all.

    ``safetensors.torch.load_model(model, path)`` reads the file. The file has each tensor once. Its
    metadata maps other names of a tensor to the name in the file.

    Args:
        models: a PyTorch model; or several models, whose keys begin with ``0.``, ``1.``, …; or the
            weights of one model, as arrays by name.
        path: where to write: a path, or a URL for fsspec.

    Returns:
        The absolute path, or the URL.

    Raises:
        CheckpointError: if the file cannot be written.
        ImportError: if safetensors is not installed.
    """
    import_extra("save_model", "safetensors", "torch")
    target = locate(path)
    try:
        content = _of_arrays(models) if isinstance(models, Mapping) else _of_modules(models)
    except Exception as error:
        raise CheckpointError(f"Cannot save to {target.shown}: {error}") from error
    return target.write(content)


def _of_arrays(arrays: Mapping[str, Any]) -> bytes:
    from safetensors.numpy import save

    return save(dict(arrays), metadata={"format": "np"})


def _of_modules(models: torch.nn.Module | Sequence[torch.nn.Module]) -> bytes:
    import torch
    from safetensors.torch import save

    module = models if isinstance(models, torch.nn.Module) else torch.nn.ModuleList(models)
    tensors, other_names = _deduplicated(module)
    return save(tensors, metadata={"format": "pt", **other_names})


def _deduplicated(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return each tensor once, without shared memory, and the other names of tied tensors."""
    kept: dict[tuple[object, ...], str] = {}
    tensors: dict[str, torch.Tensor] = {}
    other_names: dict[str, str] = {}
    storages: set[int] = set()
    for name, tensor in module.state_dict().items():
        storage = tensor.untyped_storage()._cdata
        identity = (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if identity in kept:
            other_names[name] = kept[identity]
            continue
        kept[identity] = name
        tensor = tensor.detach().cpu().contiguous()
        # safetensors refuses views of the same memory
        tensors[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return tensors, other_names
