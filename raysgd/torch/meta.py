"""Initialization of models on PyTorch's ``meta`` device, module by module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from raysgd.torch.tensors import version_of

Init = Callable[[torch.nn.Module], Any]


def on_meta(model: torch.nn.Module) -> bool:
    """Return whether any tensor of a model is on the meta device."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def move_to_device(
    model: torch.nn.Module, device: torch.device, buffers_alone: bool = False
) -> torch.nn.Module:
    """Move the tensors that have content to a device."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        stays = tensor.is_meta or (buffers_alone and isinstance(tensor, torch.nn.Parameter))
        return tensor if stays else tensor.to(device)

    model._apply(move)
    return model


def checked_init(
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    init: Any,
    sharding: Any,
) -> Init | None:
    """Return the function that initializes a module; None if no model is on the meta device."""
    if init is not None and not callable(init):
        raise TypeError(
            f"register(sharding_args={{'init_fn': {init!r}}}): must be a function that takes a "
            "module."
        )
    empty = [model for model in models if on_meta(model)]
    if not empty:
        if init is not None:
            raise ValueError(
                "register(sharding_args={'init_fn': ...}) is for models on the meta device, but "
                "these models have content. Create them in `with torch.device('meta'):`, or leave "
                "out init_fn."
            )
        return None
    if sharding != "full":
        raise ValueError(
            f"register(models=...): {type(empty[0]).__name__} is on the meta device, so it has no "
            'content. Pass sharding="full", or create the model on another device.'
        )
    if any(
        isinstance(value, torch.Tensor) and value.is_meta
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
    ):
        raise ValueError(
            f"register(optimizers=...): {type(optimizers[0]).__name__} already has state on the "
            "meta device, which has no content. Use an optimizer that creates its state in the "
            "first step, or create the model on another device."
        )
    if init is not None:
        found: Init = init
        return found
    for module in (module for model in empty for module in model.modules()):
        if _own_parameters(module) and not hasattr(module, "reset_parameters"):
            raise ValueError(
                f"register(models=...): {type(module).__name__} has parameters on the meta device, "
                "but no method reset_parameters. Pass sharding_args={'init_fn': function}. The "
                "function must fill the parameters and buffers of a module, without those of its "
                "submodules."
            )
    return _reset


def _reset(module: torch.nn.Module) -> None:
    reset: Any = getattr(module, "reset_parameters", None)
    if reset is not None:
        reset()


def materialize(
    models: Sequence[torch.nn.Module], init: Init, device: torch.device
) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Initialize each parameter on the CPU, and yield it with its content.

    The parameters stay on the meta device. If the caller releases the contents, memory holds only
    the parameters of one module and parameters that modules share. The buffers get their content on
    `device`.

    Raises:
        ValueError: if `init` does not fill a tensor.
    """
    modules = list(dict.fromkeys(module for model in models for module in model.modules()))
    num_left = Counter(p for module in modules for p in _own_parameters(module).values())
    contents: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in modules:
        own = _own_parameters(module)
        buffers = {name: _unfilled(buffer) for name, buffer in _own_buffers(module).items()}
        if not own and not buffers:
            continue
        for parameter in own.values():
            if parameter not in contents:
                content = torch.nn.Parameter(_unfilled(parameter), parameter.requires_grad)
                contents[parameter] = content
        whole = {name: contents[parameter] for name, parameter in own.items()}
        for name, tensor in (whole | buffers).items():
            setattr(module, name, tensor)
        try:
            with torch.no_grad():
                init(module)
        finally:
            for name, parameter in own.items():
                setattr(module, name, parameter)
        for name, empty in buffers.items():
            buffer = getattr(module, name)
            _check_filled(module, name, buffer, is_new=buffer is not empty)
            setattr(module, name, buffer.to(device))
        for name, parameter in own.items():
            num_left[parameter] -= 1
            if not num_left[parameter]:
                content = contents.pop(parameter)
                _check_filled(module, name, content)
                yield parameter, content.detach()


def _unfilled(like: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor for which `_check_filled` raises."""
    is_float = like.is_floating_point() or like.is_complex()
    return torch.full(like.shape, torch.nan if is_float else 0, dtype=like.dtype)


def _check_filled(module: torch.nn.Module, name: str, tensor: Any, is_new: bool = False) -> None:
    is_filled = isinstance(tensor, torch.Tensor) and not tensor.isnan().any()
    if is_filled and not (tensor.is_floating_point() or tensor.is_complex()):
        is_filled = is_new or version_of(tensor) > 0 or tensor.numel() == 0
    if not is_filled:
        raise ValueError(
            f"{type(module).__name__}.{name} has no content, or NaN, after init_fn or "
            "reset_parameters. The function must fill the parameters and buffers of the module in "
            "place."
        )


def make_whole(models: Sequence[torch.nn.Module], init: Init, device: torch.device) -> None:
    """Initialize models completely. The parameter objects stay the same."""
    for parameter, content in list(materialize(models, init, device)):
        whole = torch.nn.Parameter(content.to(device), parameter.requires_grad)
        torch.utils.swap_tensors(parameter, whole)


def _own_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return a module's parameters on the meta device, without parameters of submodules."""
    own = module.named_parameters(recurse=False, remove_duplicate=False)
    return {name: parameter for name, parameter in own if parameter.is_meta}


def _own_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    own = module.named_buffers(recurse=False, remove_duplicate=False)
    return {name: buffer for name, buffer in own if buffer.is_meta}
