"""Whether a state fits what it is loaded into: found out before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import lr_scheduler

__all__ = ["state_problem"]

_TAKEN_OUT: dict[Any, str] = {
    lr_scheduler.LambdaLR.load_state_dict: "lr_lambdas",
    lr_scheduler.MultiplicativeLR.load_state_dict: "lr_lambdas",
    lr_scheduler.SequentialLR.load_state_dict: "_schedulers",
    lr_scheduler.ChainedScheduler.load_state_dict: "_schedulers",
    lr_scheduler.CyclicLR.load_state_dict: "_scale_fn_custom",
}
"""What torch's ways to load a scheduler take out of its state, and fail without."""


def state_problem(held: Any, state: Mapping[str, Any]) -> str:
    """Say why a model, an optimizer or a scheduler cannot take a state; nothing if it can."""
    if isinstance(held, torch.nn.Module):
        return _model_problem(held.state_dict(), state)
    if isinstance(held, torch.optim.Optimizer):
        return _optimizer_problem(held, state)
    return _scheduler_problem(held, state)


def _model_problem(held: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    missing, unknown = held.keys() - state.keys(), state.keys() - held.keys()
    if missing or unknown:
        return _differing(missing, unknown)
    for key, value in held.items():
        found = state[key].shape if isinstance(state[key], torch.Tensor) else None
        if isinstance(value, torch.Tensor) and found != value.shape:
            shape = "no tensor" if found is None else f"of shape {tuple(found)}"
            return f"{key} is {shape}, not of shape {tuple(value.shape)}"
    return ""


def _optimizer_problem(held: torch.optim.Optimizer, state: Mapping[str, Any]) -> str:
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not isinstance(state.get("state"), Mapping):
        return "it has no 'param_groups' and 'state'"
    if not all(isinstance(g, Mapping) and isinstance(g.get("params"), list) for g in groups):
        return "its 'param_groups' have no lists of 'params'"
    sizes = [len(group["params"]) for group in groups]
    expected = [len(group["params"]) for group in held.param_groups]
    if sizes != expected:
        return f"groups of {sizes} parameters, not of {expected}"
    for own, group in zip(held.param_groups, groups, strict=True):
        if problem := _kind_problem(held, own, group):
            return f"groups {problem}"
    return ""


def _kind_problem(
    held: torch.optim.Optimizer, own: Mapping[str, Any], group: Mapping[str, Any]
) -> str:
    """Find a group of another kind of optimizer: torch loads it, and fails when it steps.

    Options that are missing do not make it one alone: a later release may have added them, or a
    wrapper such as Lookahead, and whoever did fills them in. Flags come and go. So a kind whose
    options are all among the other's, as those of SparseAdam are among Adam's, is not found.
    """
    # a wrapper may not have called what sets its defaults
    needed = {name for name, value in getattr(held, "defaults", {}).items() if _is_measure(value)}
    missing, unknown = (needed & own.keys()) - group.keys(), group.keys() - own.keys()
    return _differing(missing, unknown) if missing and unknown else ""


def _scheduler_problem(held: Any, state: Any) -> str:
    """Find what torch would fail on; for the rest, what is in a state is the scheduler's affair."""
    # by the method and not by the class: a subclass may load in a way of its own
    key = _TAKEN_OUT.get(getattr(type(held), "load_state_dict", None))
    if key is None:
        return ""
    if not isinstance(state, Mapping) or key not in state:
        return f"it has no {key!r}"
    if key != "_schedulers":
        return ""
    inner = state[key]
    if not isinstance(inner, list | tuple) or len(inner) != len(held._schedulers):
        count = len(inner) if isinstance(inner, list | tuple) else "no"
        return f"it has {count} schedulers in it, not {len(held._schedulers)}"
    for index, (scheduler, saved) in enumerate(zip(held._schedulers, inner, strict=True)):
        if problem := _scheduler_problem(scheduler, saved):
            return f"in the {type(scheduler).__name__} {key}[{index}], {problem}"
    return ""


def _is_measure(value: Any) -> bool:
    return isinstance(value, int | float | tuple | list) and not isinstance(value, bool)


def _differing(missing: set[Any], unknown: set[Any]) -> str:
    return _named("without", missing) + ", " * bool(missing and unknown) + _named("with", unknown)


def _named(how: str, keys: set[Any]) -> str:
    shown = sorted(map(str, keys))[:3]
    more = f" and {len(keys) - len(shown)} more" if len(keys) > len(shown) else ""
    return f"{how} {', '.join(shown)}{more}" if keys else ""
