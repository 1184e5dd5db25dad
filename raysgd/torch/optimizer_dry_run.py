"""Whether an optimizer could step with a state, found out without memory for it."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from raysgd._internal.nested import map_leaves

__all__ = ["step_problem"]

_KERNELS = ("capturable", "foreach", "fused")
"""Options that say what computes a step, and not what it is."""


def step_problem(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> str:
    """Say what a step after loading a state fails with; nothing if that is not known.

    torch takes what is in an optimizer's state unseen, and fails when it steps. So a twin, whose
    tensors have shapes and no content (torch's device "meta"), takes it and makes a step. A few
    kinds need content: they cannot step so with their own state, or anew, either. Optimizers that
    are not torch's are not tried, since they may refuse to step for reasons of their own.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        return ""
    try:
        _step(optimizer, state)
        return ""
    except Exception as error:
        problem = f"a step with it raises {error!r}"
    try:
        own = optimizer.state_dict()
        _step(optimizer, own)
        _step(optimizer, {**own, "state": {}})
        return problem
    except Exception:
        return ""


def _step(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Have a twin take `state` and make a step."""
    twin = copy.copy(optimizer)  # without hooks
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**group, "params": [_whole_shadow(each) for each in group["params"]]}
        for group in optimizer.param_groups
    ]
    groups = [
        {**group, **{name: False for name in _KERNELS if group.get(name) is True}}
        for group in state["param_groups"]
    ]
    twin.load_state_dict({"state": map_leaves(state["state"], _shadow), "param_groups": groups})
    # that has moved single numbers, too; any will do
    for of_parameter in twin.state.values():
        for name, value in of_parameter.items():
            if isinstance(value, torch.Tensor) and value.is_meta and not value.dim():
                of_parameter[name] = torch.full_like(value, 0.5, device="cpu")
    for group in twin.param_groups:
        for shadow in group["params"]:
            shadow.grad = torch.zeros_like(shadow)
    twin.step()


def _whole_shadow(parameter: torch.Tensor) -> torch.Tensor:
    """Return such a tensor for a parameter, of all of it where it is divided."""
    if not parameter.dim():
        return parameter.detach().cpu().clone()
    shape, stride = parameter.shape, parameter.stride()
    return torch.empty_strided(shape, stride, dtype=parameter.dtype, device="meta")


def _shadow(leaf: Any) -> Any:
    """Return a tensor like `leaf` without content, or a copy of a single number."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.to("meta") if leaf.dim() else leaf.cpu().clone()
