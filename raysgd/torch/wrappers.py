"""The modules of users in wrappers: DistributedDataParallel, and those of ``torch.compile``."""

import torch
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
