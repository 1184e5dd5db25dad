"""Modules of users in wrappers of PyTorch, and their parameters and buffers."""

from collections.abc import Iterable, Mapping

import torch
from torch.nn import SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel


def uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that ``torch.compile`` has wrapped, or `module` itself."""
    wrapped: torch.nn.Module = getattr(module, "_orig_mod", module)
    return wrapped


def without_ddp(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside of DistributedDataParallel, or `model` itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def user_module(model: torch.nn.Module) -> torch.nn.Module:
    """Return the user's module, without DistributedDataParallel and torch.compile."""
    return uncompiled(without_ddp(model))


def is_compiled(model: torch.nn.Module) -> bool:
    """Return whether ``torch.compile``, or ``compile()`` of a module, compiles parts of `model`."""
    has_own = any(module._compiled_call_impl is not None for module in model.modules())
    return has_own or user_module(model) is not without_ddp(model)


def is_ddp(model: torch.nn.Module) -> bool:
    return isinstance(model, DistributedDataParallel)


def can_require_grad(parameter: torch.nn.Parameter) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


def grad_flags(module: torch.nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in module.named_parameters()}


def set_grad_flags(module: torch.nn.Module, required: Mapping[str, bool]) -> None:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(required.get(name, parameter.requires_grad))


def renormalized_weights(models: Iterable[torch.nn.Module]) -> set[torch.Tensor]:
    """Return the weights of embeddings with ``max_norm``, which each forward pass may change."""
    modules = (module for model in models for module in model.modules())
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {each.weight for each in modules if isinstance(each, kinds) and each.max_norm}


def has_only_running_statistics(model: torch.nn.Module) -> bool:
    """Return whether all buffers of `model` are running statistics of batch normalization.

    Ranks may differ in such buffers until a call ends, which saves a broadcast in each forward
    pass.
    """
    return all(
        isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm)
        for module in model.modules()
        if any(True for _ in module.buffers(recurse=False))
    )


def running_statistics(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the buffers of batch normalization in `model`.

    Other buffers may be caches, whose sizes depend on each worker's batches.
    """
    norms = (module for module in model.modules() if isinstance(module, _BatchNorm))
    return [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
