"""Whether an optimizer could step with a state, found out without memory for it."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from raysgd.trees import map_leaves

__all__ = ["step_problem"]


def step_problem(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> str:
    """Say what a step after loading a state fails with; nothing if that is not known.

    torch takes what is in an optimizer's state unseen, and fails when it steps. So a twin, whose
    tensors have shapes and no content (torch's device "meta"), takes it and makes a step. A few
    kinds need content: they cannot step so with a state of their own either. Optimizers that are
    not torch's are not tried, since they may refuse to step for reasons of their own.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        return ""
    try:
        _stepped(optimizer, state)
    except Exception as error:
        try:
            _stepped(optimizer, _stepped(optimizer, optimizer.state_dict()))
        except Exception:
            return ""
        return f"a step with it raises {error!r}"
    return ""


def _stepped(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a twin that has taken `state` and made a step."""
    twin = copy.copy(optimizer)  # without hooks
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**group, "params": [_shadow(each.detach()) for each in group["params"]]}
        for group in optimizer.param_groups
    ]
    # which kernel computes is a matter of the device
    kernels = ("capturable", "foreach", "fused")
    groups = [
        {k: v if k not in kernels or not isinstance(v, bool) else False for k, v in group.items()}
        for group in state["param_groups"]
    ]
    twin.load_state_dict(
        {**state, "state": map_leaves(state["state"], _shadow), "param_groups": groups}
    )
    for group in twin.param_groups:
        for shadow in group["params"]:
            shadow.grad = torch.zeros_like(shadow)
    twin.step()
    return twin.state_dict()


def _shadow(leaf: Any) -> Any:
    """Return a tensor like `leaf` without content, or a copy of a single number."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.to("meta") if leaf.dim() else leaf.cpu().clone()
