"""Wrap models in DistributedDataParallel, and rebuild the wrappers for another group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from raysgd.torch.strategies.ddp_model import ReplicatedModel, is_trainable, uncompiled


def wrap(
    model: torch.nn.Module,
    device: torch.device,
    arguments: Mapping[str, Any],
    is_criterion: bool = False,
) -> torch.nn.Module:
    """Wrap a model, unless user code has wrapped it or it has no trainable parameter."""
    if isinstance(model, DistributedDataParallel) or not any(
        parameter.requires_grad for parameter in model.parameters()
    ):
        return model  # DistributedDataParallel rejects a model without trainable parameters
    ddp_arguments = {"device_ids": None if device.index is None else [device.index], **arguments}
    replica = ReplicatedModel(model, **ddp_arguments)
    # A criterion may run several times in a step, and a broadcast would modify its buffers.
    stays = is_criterion or only_running_statistics(model)
    if stays and not ddp_arguments.keys() & {"broadcast_buffers", "forward_sync_buffers"}:
        # The argument of the constructor would also turn off the first broadcast before
        # PyTorch 2.13.
        replica.broadcast_buffers = False
    return replica


def only_running_statistics(model: torch.nn.Module) -> bool:
    """Return whether all buffers of `model` are running statistics of batch normalization.

    Ranks may differ in such buffers until a call ends, which saves a broadcast in each forward
    pass.
    """
    return all(
        isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm)
        for module in model.modules()
        if any(True for _ in module.buffers(recurse=False))
    )


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside of DistributedDataParallel, or `model` itself."""
    module: torch.nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return module


def plain(model: torch.nn.Module) -> torch.nn.Module:
    """Return the user's module, without DistributedDataParallel and torch.compile."""
    return uncompiled(unwrap(model))


def is_compiled(model: torch.nn.Module) -> bool:
    """Return whether ``torch.compile``, or ``compile()`` of a module, compiles parts of `model`."""
    has_own = any(module._compiled_call_impl is not None for module in model.modules())
    return has_own or plain(model) is not unwrap(model)


def running_statistics(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the buffers of batch normalization in `model`.

    Other buffers may be caches, whose sizes depend on each worker's batches.
    """
    return [
        buffer
        for module in model.modules()
        if isinstance(module, _BatchNorm)
        for buffer in module.buffers(recurse=False)
    ]


def is_ddp(model: torch.nn.Module) -> bool:
    return isinstance(model, DistributedDataParallel)


def rebuild(model: DistributedDataParallel, required: dict[str, bool]) -> str:
    """Rebuild the reducer of a wrapper, in place, for the current process group.

    Every rank must rebuild. A survivor orders its buckets by the gradients of its first step, and a
    replacement worker does not. With the old reducer, these workers would silently add up gradients
    of different parameters. `required` is the result of `averaged_parameters`. Return a warning if
    a communication hook was removed, or "".
    """
    group, comm_hooks = model.process_group, model._comm_hooks
    before = required_gradients(model.module)
    require_gradients(model.module, {**before, **required})
    try:
        model.__setstate__({})  # sets up a wrapper as after unpickling, and keeps its attributes
    finally:
        require_gradients(model.module, before)
    if isinstance(model, ReplicatedModel):
        model._passes.trained_last_update = False  # as on a replacement worker
    model._static_graph_delay_allreduce_enqueued = False
    # Set these flags as on a replacement worker, because a forward pass without gradients or
    # synchronization has changed them.
    model.require_forward_param_sync = model.require_backward_grad_sync = True
    model._comm_hooks, warning = [], ""
    for hook, state in comm_hooks:
        if state is None or state is group:
            model.register_comm_hook(None if state is None else model.process_group, hook)
        else:
            warning = (
                f"raysgd removed the communication hook {getattr(hook, '__name__', hook)!r}, "
                f"because workers left or joined. Its state, a {type(state).__name__}, differs "
                "between workers. Register it again in on_world_change(self) of the operator."
            )
    return warning


def require_gradients(module: torch.nn.Module, required: Mapping[str, bool]) -> None:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(required.get(name, parameter.requires_grad))


def required_gradients(module: torch.nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in module.named_parameters()}


def averaged_parameters(model: DistributedDataParallel) -> dict[str, bool]:
    """Return a dict from each parameter name to whether the wrapper averages its gradient."""
    named = dict(model.module.named_parameters())
    if isinstance(model, ReplicatedModel):
        reduced = set(model._passes.reduced)
        return {name: parameter in reduced for name, parameter in named.items()}
    required = required_gradients(model.module)
    averaged = [name for name, is_set in required.items() if is_set]
    num_averaged = model._get_ddp_logging_data()["num_parameter_tensors"]
    if len(set(averaged) - model.parameters_to_ignore) == num_averaged:
        return required
    # User code wrapped the model and froze parameters later, so any parameter may be averaged.
    return {name: is_trainable(parameter) for name, parameter in named.items()}
