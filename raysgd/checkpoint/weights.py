"""Model weights for use in other programs."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from raysgd._internal.imports import import_extra
from raysgd._internal.nonfinite import nonfinite_arrays
from raysgd.checkpoint.location import Location
from raysgd.errors import CheckpointError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


def check_suffix(path: Any) -> None:
    """Raise ValueError if a name is that of another format."""
    others = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".h5", ".keras", ".npz", ".onnx")
    if str(path).lower().endswith(others):
        raise ValueError(
            f"save_model({str(path)!r}) writes safetensors, so the name must end with "
            ".safetensors. For another format, save the weights of trainer.get_model() yourself."
        )


def save_model(
    models: torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, Any],
    path: str | os.PathLike[str],
    left_out: Collection[str] = (),
) -> str:
    """Write the weights of models to a ``.safetensors`` file, completely or not at all.

    ``safetensors.torch.load_model(model, path)`` reads the file. The file has each tensor once. Its
    metadata maps other names of a tensor to the name in the file. A warning names a NaN.

    Args:
        models: a PyTorch model; or several models, whose keys begin with ``0.``, ``1.``, …; or the
            weights of one model, as arrays by name.
        path: where to write: a path, or a URL for fsspec.
        left_out: names of tensors of PyTorch models that the file shall not have.

    Returns:
        The absolute path, or the URL.

    Raises:
        CheckpointError: if the file cannot be written.
        ValueError: if the name ends like that of another format, such as ``.pt``.
        ImportError: if safetensors is not installed.
    """
    check_suffix(path)
    import_extra("save_model", "safetensors", "torch")

    def fill(file: IO[bytes]) -> None:
        if isinstance(models, Mapping):
            import numpy as np
            from safetensors.numpy import save

            # safetensors writes the elements of a transposed array in another order.
            arrays = {name: np.asarray(array, order="C") for name, array in models.items()}
            _warn_of_nan(arrays)
            file.write(save(arrays, metadata={"format": "np"}))
        else:
            file.write(_serialize(models, left_out))

    return Location(path).write(fill)


def _serialize(
    models: torch.nn.Module | Sequence[torch.nn.Module], left_out: Collection[str]
) -> bytes:
    import torch
    from safetensors.torch import save

    module = models if isinstance(models, torch.nn.Module) else torch.nn.ModuleList(models)
    names: dict[Any, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    metadata = {"format": "pt"}
    kept = ((n, tensor) for n, tensor in module.state_dict().items() if n not in left_out)
    for name, tensor in kept:
        is_tensor = isinstance(tensor, torch.Tensor) and not tensor.is_quantized
        if not is_tensor or tensor.dtype is torch.complex128:
            kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise CheckpointError(
                f"save_model() cannot write {name} of the model: safetensors has no {kind}. Save "
                "trainer.get_model().state_dict() with torch.save."
            )
        bits = tensor.is_conj(), tensor.is_neg()  # which the memory lacks
        identity = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, *bits)
        if tensor.numel() and (first := names.setdefault(identity, name)) != name:
            metadata[name] = first  # tied
            continue
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        whole = tensor.untyped_storage()
        is_view = tensor.nbytes < whole.nbytes() or names.setdefault(whole.data_ptr(), name) != name
        tensors[name] = tensor.clone() if is_view else tensor  # they must not share memory
    _warn_of_nan(tensors)
    return save(tensors, metadata)


def _warn_of_nan(arrays: Mapping[str, Any]) -> None:
    for name in nonfinite_arrays(arrays):
        if (arrays[name] != arrays[name]).any():  # infinity may be meant, as in a mask
            logger.warning("save_model() writes NaN, because %s of the model has it.", name)
            return
