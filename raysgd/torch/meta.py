"""Initialization of models on PyTorch's ``meta`` device, module by module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from raysgd.torch.tensors import version_of

__all__ = ["Init", "checked_init", "make_whole", "materialize", "move_to_device", "on_meta"]

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
    """Return the function that initializes a module; None if no model is on the meta device.

    Raises:
        TypeError: if `init` is not callable.
        ValueError: if meta models do not fit the other arguments, or cannot be initialized.
    """
    if init is not None and not callable(init):
        raise TypeError(
            f"register(sharding_args={{'init_fn': {init!r}}}): must be a function of a module."
        )
    empty = [model for model in models if on_meta(model)]
    if not empty:
        if init is not None:
            raise ValueError(
                "register(sharding_args={'init_fn': ...}) is for models on the meta device, and "
                "these have content. Make them in `with torch.device('meta'):`, or leave it out."
            )
        return None
    if sharding != "full":
        raise ValueError(
            f"register(models=...): {type(empty[0]).__name__} is on the meta device, and has no "
            'content. Pass sharding="full", with which each worker makes its part, or make the '
            "model on a device."
        )
    if any(
        isinstance(value, torch.Tensor) and value.is_meta
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
    ):
        raise ValueError(
            f"register(optimizers=...): {type(optimizers[0]).__name__} has state of parameters on "
            "the meta device, which has no content. Use an optimizer that makes its state in its "
            "first step, or make the model on a device."
        )
    if init is not None:
        found: Init = init
        return found
    for module in (module for model in empty for module in model.modules()):
        if _own_parameters(module) and not hasattr(module, "reset_parameters"):
            raise ValueError(
                f"register(models=...): {type(module).__name__} has parameters on the meta device "
                "and no method reset_parameters that would fill them. Pass a function that fills "
                "the parameters and buffers that a module has itself: "
                "sharding_args={'init_fn': function}."
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

    If the caller releases each content, memory holds only one module's own parameters, and those
    that modules share. The parameters stay on the meta device. The buffers of the models get their
    content.

    Args:
        models: models with parameters or buffers on the meta device.
        init: fills the parameters and buffers that a module owns directly.
        device: device of the buffers.

    Raises:
        ValueError: if `init` leaves a tensor unfilled, or changes its shape or dtype.
    """
    modules = list(dict.fromkeys(module for model in models for module in model.modules()))
    places = Counter(p for module in modules for p in _own_parameters(module).values())
    shared: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in modules:
        own, buffers = _own_parameters(module), _own_buffers(module)
        if not own and not buffers:
            continue
        empty: dict[str, torch.Tensor] = {n: _unfilled(buffer) for n, buffer in buffers.items()}
        for name, buffer in empty.items():
            setattr(module, name, buffer)
        for name, parameter in own.items():
            content = shared.get(parameter)
            if content is None:
                content = torch.nn.Parameter(_unfilled(parameter), parameter.requires_grad)
                empty[name] = content
            if places[parameter] > 1:
                shared[parameter] = content
            setattr(module, name, content)
        try:
            with torch.no_grad():
                init(module)
        finally:
            filled = {name: getattr(module, name) for name in own}
            for name, parameter in own.items():
                setattr(module, name, parameter)
        for name in buffers:
            found = _checked(module, name, empty[name], getattr(module, name))
            setattr(module, name, found.to(device))
        for name, parameter in own.items():
            content = _checked(module, name, empty.get(name), filled[name])
            if content.shape != parameter.shape or content.dtype != parameter.dtype:
                raise ValueError(
                    f"{type(module).__name__}.{name} is of shape {tuple(content.shape)} and "
                    f"{content.dtype} after the function that fills what a module has itself, and "
                    f"was of {tuple(parameter.shape)} and {parameter.dtype}."
                )
            if places[parameter] == 1:
                yield parameter, content.detach()
            elif content is not shared[parameter]:  # init replaced the object
                shared[parameter].detach().copy_(content)
    for parameter, content in shared.items():
        yield parameter, content.detach()


def _unfilled(like: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor filled with a marker, to detect functions that do not write to it."""
    return torch.full(like.shape, _mark(like.dtype), dtype=like.dtype)


def _mark(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.nan
    return False if dtype == torch.bool else torch.iinfo(dtype).max


def _checked(module: torch.nn.Module, name: str, empty: torch.Tensor | None, found: Any) -> Any:
    """Return the content of a tensor, if it was filled.

    Args:
        module: the module, for the message.
        name: name of the tensor.
        empty: result of `_unfilled`; None if the tensor had content before.
        found: the current value.
    """
    is_filled = isinstance(found, torch.Tensor) and not found.isnan().any()
    if is_filled and empty is not None and found is empty and empty.numel():
        # A bool cannot hold a marker, but its version shows whether it was written.
        is_written = empty.dtype == torch.bool and version_of(empty)
        is_filled = bool(is_written or (empty != _mark(empty.dtype)).any())
    if not is_filled:
        raise ValueError(
            f"{type(module).__name__}.{name} has no content, or NaN, after the function that fills "
            "what a module has itself (init_fn, or reset_parameters)."
        )
    return found


def make_whole(models: Sequence[torch.nn.Module], init: Init, device: torch.device) -> None:
    """Initialize models completely. The parameter objects stay the same."""
    for parameter, content in list(materialize(models, init, device)):
        whole = torch.nn.Parameter(content.to(device), parameter.requires_grad)
        torch.utils.swap_tensors(parameter, whole)


def _own_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the meta-device parameters of a module, without those of its submodules."""
    own = module.named_parameters(recurse=False, remove_duplicate=False)
    return {name: parameter for name, parameter in own if parameter.is_meta}


def _own_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    own = module.named_buffers(recurse=False, remove_duplicate=False)
    return {name: buffer for name, buffer in own if buffer.is_meta}
