"""Model weights for use in other programs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from raysgd._internal.imports import import_extra
from raysgd.checkpoint.location import Location

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

    def fill(file: IO[bytes]) -> None:
        if isinstance(models, Mapping):
            import numpy as np
            from safetensors.numpy import save

            # safetensors writes the elements of a transposed array in another order.
            arrays = {name: np.asarray(array, order="C") for name, array in models.items()}
            file.write(save(arrays, metadata={"format": "np"}))
        else:
            file.write(_of_modules(models))

    return Location(path).write(fill)


def _of_modules(models: torch.nn.Module | Sequence[torch.nn.Module]) -> bytes:
    import torch
    from safetensors.torch import save

    module = models if isinstance(models, torch.nn.Module) else torch.nn.ModuleList(models)
    names: dict[Any, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    metadata = {"format": "pt"}
    for name, tensor in module.state_dict().items():
        bits = tensor.is_conj(), tensor.is_neg()  # which the memory lacks
        identity = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, *bits)
        if tensor.numel() and (first := names.setdefault(identity, name)) != name:
            metadata[name] = first  # tied
            continue
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        is_view = tensor.nbytes < tensor.untyped_storage().nbytes()
        tensors[name] = tensor.clone() if is_view else tensor  # they must not share memory
    return save(tensors, metadata)
