"""Checks whether an optimizer can step with a state, without memory for tensors."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from raysgd._internal.nested import map_leaves

__all__ = ["step_problem"]

_KERNELS = ("capturable", "foreach", "fused")
"""Options that select a kernel and do not change the algorithm."""


def step_problem(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> str:
    """Return the error of a step after loading a state; an empty text if none is known.

    PyTorch loads an optimizer's state unchecked and fails in the next step. Therefore a copy of the
    optimizer, with tensors on the meta device, loads the state and steps. A few optimizers need
    tensor content and cannot step with their own state either; their errors do not count.
    Optimizers outside of ``torch.optim`` are not checked, because they may raise for other reasons.
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
    """Load `state` into a copy on the meta device, and step."""
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
    # loading has moved single numbers to the meta device as well; use any value
    for of_parameter in twin.state.values():
        for name, value in of_parameter.items():
            if isinstance(value, torch.Tensor) and value.is_meta and not value.dim():
                of_parameter[name] = torch.full_like(value, 0.5, device="cpu")
    for group in twin.param_groups:
        for shadow in group["params"]:
            shadow.grad = torch.zeros_like(shadow)
    twin.step()


def _whole_shadow(parameter: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor for a parameter, of the full shape if the parameter is sharded."""
    if not parameter.dim():
        return parameter.detach().cpu().clone()
    shape, stride = parameter.shape, parameter.stride()
    return torch.empty_strided(shape, stride, dtype=parameter.dtype, device="meta")


def _shadow(leaf: Any) -> Any:
    """Return a meta tensor like `leaf`, or a copy of a single number."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.to("meta") if leaf.dim() else leaf.cpu().clone()
