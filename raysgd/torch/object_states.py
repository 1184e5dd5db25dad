"""States of models, optimizers, and schedulers: read, check, load, and adapt them."""

import copy
import functools
import inspect
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import lr_scheduler

from raysgd._internal.arguments import is_number
from raysgd.cluster.large_values import IncomingValue
from raysgd.torch.tensors import ELEMENTWISE, as_bytes, can_copy, inner_optimizers, nested_tensors

_INNER = "raysgd_inner"
"""Entry of an optimizer's state: states of the optimizers in it, by number."""


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of an optimizer, and of the optimizers in it if its own state lacks them."""
    state = dict(optimizer.state_dict())
    if inner := list(map(optimizer_state, inner_optimizers(optimizer))):
        saved = set(map(id, nested_tensors(state, set())))
        state[_INNER] = {
            number: each
            for number, each in enumerate(inner)
            if not saved.issuperset(map(id, nested_tensors(each, set()))) or not each.get("state")
        }
    return state


def load_optimizer(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any], is_exact: bool
) -> None:
    """Load an `optimizer_state`. ``load_state_dict`` casts tensors to the parameters' dtypes.

    If it `is_exact`, tensors keep their dtypes.
    """
    if "param_groups" in state and (problem := _groups_problem(optimizer, state)):
        raise ValueError(problem)
    inner = inner_optimizers(optimizer)
    shared: list[tuple[Any, Any, Any]]
    shared = [(each, each.param_groups, each.state) for each in (optimizer, *inner)]
    optimizer.load_state_dict({key: state[key] for key in state if key != _INNER})
    for number, of_inner in state.get(_INNER, {}).items():
        load_optimizer(inner[number], of_inner, is_exact)
    for each, groups, entries in shared:  # keep the objects, which a wrapper may share
        for group, loaded in (*zip(groups, each.param_groups, strict=False), (entries, each.state)):
            if group is not loaded:
                group.clear()
                group.update(loaded)
        if "param_groups" in vars(each):  # otherwise, they are properties
            each.param_groups, each.state = groups, entries
    entries = state.get("state", {})  # a wrapper may have another format
    for group, saved in zip(optimizer.param_groups, state.get("param_groups", ()), strict=False):
        for parameter, key in zip(group["params"], saved["params"], strict=True):
            if is_exact and parameter in optimizer.state and key in entries:
                optimizer.state[parameter] = _in_dtypes_of(entries[key], optimizer.state[parameter])


def _in_dtypes_of(saved: Any, loaded: Any) -> Any:
    """Return the loaded value, with tensors in the dtypes of the saved value."""
    if isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device, copy=True)
    if isinstance(loaded, dict) and isinstance(saved, Mapping):
        for key in loaded.keys() & saved.keys():
            loaded[key] = _in_dtypes_of(saved[key], loaded[key])
    elif type(loaded) in (list, tuple) and isinstance(saved, list | tuple):
        return type(loaded)(map(_in_dtypes_of, saved, loaded))
    return loaded


def scheduler_state(scheduler: Any) -> Any:
    """Return the state of a scheduler, with states in place of the schedulers in it."""
    state = scheduler.state_dict()
    inner = {name: list(map(scheduler_state, held)) for name, held in _inner_schedulers(state)}
    return {**state, **inner} if inner else state


def load_scheduler(scheduler: Any, state: Any) -> None:
    """Load a `scheduler_state`. The schedulers in it stay the same, and keep their optimizer."""
    own_state = scheduler.state_dict()
    for name, inner in _inner_schedulers(own_state):
        for each, saved in zip(inner, state[name], strict=True):
            load_scheduler(each, saved)
        state = {**state, name: own_state[name]}
    scheduler.load_state_dict(state)


def _inner_schedulers(state: Any) -> list[tuple[str, list[Any]]]:
    """Return the schedulers by the names of the entries that hold one, or a list of them."""
    entries = [(n, x if isinstance(x, list) else [x]) for n, x in getattr(state, "items", tuple)()]
    return [(n, xs) for n, xs in entries if xs and hasattr(xs[0], "optimizer")]


def reuse_memory(state: Any, into: Any, incoming: IncomingValue) -> Any:
    """Return `state` with own tensors for incoming ones of the same shape, dtype, and device."""
    addresses = incoming.addresses
    adopted: dict[int, torch.Tensor] = {}  # by the address of the other tensor

    def walk(state: Any, into: Any) -> Any:
        if isinstance(state, dict) and isinstance(into, Mapping):
            changed = copy.copy(state)
            changed |= {key: walk(state[key], into[key]) for key in state if key in into}
            return changed
        if isinstance(state, list) and isinstance(into, list) and len(state) == len(into):
            return list(map(walk, state, into))
        if not _can_receive(state, into) or state.data_ptr() not in addresses:
            return state
        return adopted.setdefault(state.data_ptr(), into)

    result = walk(state, into)
    incoming.targets = {at: as_bytes(tensor).numpy() for at, tensor in adopted.items()}
    return result


def _can_receive(tensor: Any, into: Any) -> bool:
    return (
        all(isinstance(t, torch.Tensor) and t.layout is torch.strided for t in (tensor, into))
        and into.is_contiguous()
        and not (into.is_conj() or into.is_neg())
        and (into.shape, into.dtype, into.device) == (tensor.shape, tensor.dtype, tensor.device)
    )


# ---- checks before anything changes


def state_problem(registered: Any, state: Mapping[str, Any]) -> str:
    """Return why an object cannot load a state. Return "" if no reason is known.

    Optimizers and schedulers of PyTorch load a wrong state, and fail in the next step.
    """
    if isinstance(registered, torch.nn.Module):
        own = tuple(name and f"{name}." for name, m in registered.named_modules() if _converts(m))
        states = (registered.state_dict(), state)
        return model_problem(*({k: s[k] for k in s if not k.startswith(own)} for s in states))
    if isinstance(registered, torch.optim.Optimizer):
        try:
            return _optimizer_problem(registered, state)
        except (AttributeError, KeyError, TypeError):
            return "it is not the state of an optimizer"
    return _scheduler_problem(registered, state)


def _converts(module: torch.nn.Module) -> bool:
    """Return whether a module loads states of other shapes and names, such as an observer."""
    is_plain = type(module)._load_from_state_dict.__module__.startswith("torch.nn.")
    return not is_plain or bool(module._load_state_dict_pre_hooks)


def model_problem(registered: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    """Return why named tensors cannot be loaded, or an empty string."""
    missing, unknown = registered.keys() - state.keys(), state.keys() - registered.keys()
    if missing or unknown:
        return _describe_difference("it", missing, unknown)
    for key, value in registered.items():
        if not isinstance(value, torch.Tensor):
            continue
        if not can_copy(state[key], value):
            return f"its {key} is not a {str(value.layout).removeprefix('torch.')} tensor"
        if state[key].shape != value.shape:
            return f"its {key} has shape {tuple(state[key].shape)}, not {tuple(value.shape)}"
    return ""


def _optimizer_problem(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> str:
    usual = {"state", "param_groups"}
    if not (usual <= state.keys() or usual <= (whole := optimizer.state_dict()).keys()):
        missing, unknown = (
            one.keys() - other.keys() - {_INNER} for one, other in ((whole, state), (state, whole))
        )
        return _describe_difference("it", missing, unknown) if missing or unknown else ""
    groups, _ = state["param_groups"], state["state"].items()
    if problem := _groups_problem(optimizer, state):
        return problem
    if type(optimizer) in ELEMENTWISE and (problem := _entries_problem(optimizer, state)):
        return problem
    # Releases of PyTorch add and remove flags.
    defaults = getattr(optimizer, "defaults", {}).items()
    options = {name for name, value in defaults if not isinstance(value, bool | None)}
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        # Accept missing options if no option is unknown, because wrappers such as Lookahead fill in
        # their options.
        missing, unknown = (own.keys() & options) - group.keys(), group.keys() - own.keys()
        if (missing and unknown) or "lr" in missing:
            return _describe_difference("a group", missing, unknown)
        if problem := _number_problem({name: own[name] for name in own.keys() & options}, group):
            return f"in a group, {problem}"
    return ""


def _groups_problem(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> str:
    sizes = [len(group["params"]) for group in state["param_groups"]]
    expected = [len(group["params"]) for group in optimizer.param_groups]
    if sizes == expected:
        return ""
    return (
        f"its groups have {sizes} parameters, not {expected}. Create all groups in setup, also "
        "those that train later: freeze their parameters until then"
    )


def _entries_problem(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> str:
    """Return which entry of a parameter is missing or has another shape, or an empty string."""
    for own, group in zip(optimizer.param_groups, state["param_groups"], strict=True):
        entries = [state["state"].get(number) or {} for number in group["params"]]
        names = set().union(*entries)
        for parameter, number, saved in zip(own["params"], group["params"], entries, strict=True):
            if saved and (missing := names - saved.keys()):
                return _describe_difference(f"the state of parameter {number}", missing, set())
            for name, value in saved.items():
                shape, expected = tuple(getattr(value, "shape", ())), tuple(parameter.shape)
                if math.prod(shape) > 1 and shape != expected:
                    return f"{name} of parameter {number} has shape {shape}, not {expected}"
    return ""


def _scheduler_problem(scheduler: Any, state: Any) -> str:
    if type(scheduler).__module__ != lr_scheduler.__name__:
        return ""
    if not isinstance(state, Mapping):
        return f"it is a {type(state).__name__}, not a dict"
    if problem := _number_problem(vars(scheduler), state):
        return problem
    # Releases of PyTorch and user code add and remove other attributes.
    others = _scheduler_arguments() & (state.keys() - vars(scheduler).keys())
    if unknown := {name for name in others if _is_number(state[name])}:
        return _describe_difference("it", set(), unknown)
    inner, saved = getattr(scheduler, "_schedulers", []), state.get("_schedulers", [])
    if not isinstance(saved, list | tuple) or len(saved) != len(inner):
        return f"it does not have {len(inner)} inner schedulers"
    return next(filter(None, map(_scheduler_problem, inner, saved)), "")


@functools.cache
def _scheduler_arguments() -> set[str]:
    kinds = lr_scheduler.LRScheduler.__subclasses__()
    of_pytorch = (kind for kind in kinds if kind.__module__ == lr_scheduler.__name__)
    return {name for kind in of_pytorch for name in inspect.signature(kind).parameters}


def _number_problem(registered: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    """Return which number or list of numbers does not fit, or an empty string."""
    for name in sorted(registered.keys() & state.keys()):
        own, saved = registered[name], state[name]
        if not _fits(own, saved):
            return f"its {name!r} is {saved!r}, but the registered {name!r} is {own!r}"
    return ""


def _fits(own: Any, saved: Any) -> bool:
    if isinstance(own, Counter):  # the milestones of MultiStepLR
        return isinstance(saved, Mapping) and all(map(_is_number, saved))
    if isinstance(own, list | tuple) and own and all(map(_is_number, own)):
        return isinstance(saved, list | tuple) and list(map(_is_number, saved)) == [True] * len(own)
    return _is_number(saved) or not _is_number(own)


def _is_number(value: Any) -> bool:
    return is_number(value) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _describe_difference(what: str, missing: set[Any], unknown: set[Any]) -> str:
    differences = [
        f"{verb} {', '.join(sorted(map(str, keys))[:3])}{', …' * (len(keys) > 3)}"
        for verb, keys in (("lacks", missing), ("has unknown", unknown))
        if keys
    ]
    return f"{what} {', and '.join(differences)}"


# ---- states that were saved under another config, as in population based training

Hyperparameters = list[list[dict[str, Any]]]
"""Options that are numbers or lists of numbers, by optimizer and parameter group."""


def initial_hyperparameters(train_state: Any) -> Hyperparameters:
    """Return the options after ``setup``."""
    groups = [optimizer.param_groups for optimizer in train_state.optimizers]
    return [[_numbers_of(group) for group in each] for each in groups]


def rescale_hyperparameters(train_state: Any, then: Hyperparameters, now: Hyperparameters) -> None:
    """Change the options of a loaded state from the initial options `then` to `now`.

    Changes by schedulers stay in proportion: a learning rate that is a tenth of its first value
    becomes a tenth of the new first value.
    """
    for optimizer, groups_then, groups_now in zip(train_state.optimizers, then, now, strict=True):
        groups = optimizer.param_groups
        for group, old, new in zip(groups, groups_then, groups_now, strict=True):
            for name in old.keys() & new.keys() & group.keys():
                if old[name] != new[name]:
                    group[name] = _rescale(group[name], old[name], new[name])
        for scheduler in itertools.chain.from_iterable(map(_flatten, train_state.schedulers)):
            # Compare the groups, which a wrapper shares with its optimizer.
            scheduled = getattr(scheduler, "optimizer", None)
            if getattr(scheduled, "param_groups", None) is groups:
                rates = _rates(groups_then), _rates(groups_now)
                names = ("base_lrs", "max_lrs", "_last_lr")
                for name in filter(functools.partial(hasattr, scheduler), names):
                    setattr(scheduler, name, _rescale(getattr(scheduler, name), *rates))


def _numbers_of(group: Mapping[str, Any]) -> dict[str, Any]:
    options = {}
    for name, value in group.items():
        if math.prod(getattr(value, "shape", [0])) == 1:  # a tensor, or a number of NumPy
            value = value.item()
        values = list(value) if isinstance(value, list | tuple) else [value]
        if name != "params" and all(isinstance(v, int | float) for v in values):
            options[name] = values if isinstance(value, list | tuple) else value
    return options


def _rescale(value: Any, old: Any, new: Any) -> Any:
    """Return `value` scaled by the change of the initial value from `old` to `new`."""
    if isinstance(new, list):
        return type(value)(map(_rescale, value, old, new))
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, _rescale(value.item(), old, new))
    if isinstance(new, bool) or value == old or not old:
        return new
    return value / old * new


def _rates(groups: list[dict[str, Any]]) -> list[Any]:
    return [group.get("initial_lr", group.get("lr")) for group in groups]


def _flatten(scheduler: Any) -> Iterator[Any]:
    """Yield a scheduler and the schedulers in it, also in a wrapper such as that of Accelerate."""
    yield scheduler
    inner = getattr(scheduler, "scheduler", None)
    for each in getattr(scheduler, "_schedulers", [] if inner is None else [inner]):
        yield from _flatten(each)
