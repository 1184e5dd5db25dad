"""Change the options of optimizers whose state was saved under another config.

Population based training does this. Options that differ between the configs follow the new config,
and keep the changes that schedulers made since.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from raysgd.torch.operator import TrainingOperator

Options = list[list[dict[str, Any]]]
"""Options that are numbers or lists of numbers, by optimizer and parameter group."""


def initial_options(operator: TrainingOperator) -> Options:
    """Return the options after ``setup``. Runs on a worker."""
    groups = [optimizer.param_groups for optimizer in operator._train_state.registered.optimizers]
    return [[_numbers_of(group) for group in each] for each in groups]


def rescale_options(then: Options, now: Options, operator: TrainingOperator) -> None:
    """Change the options of a loaded state from the initial options `then` to `now`.

    Changes by schedulers stay in proportion: a learning rate that is a tenth of its first value
    becomes a tenth of the new first value.
    """
    registered = operator._train_state.registered
    for optimizer, groups_then, groups_now in zip(registered.optimizers, then, now, strict=True):
        groups = optimizer.param_groups
        for group, old, new in zip(groups, groups_then, groups_now, strict=True):
            for name in old.keys() & new.keys() & group.keys():
                if old[name] != new[name]:
                    group[name] = _rescale(group[name], old[name], new[name])
        for scheduler in itertools.chain.from_iterable(map(_flatten, registered.schedulers)):
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
        if isinstance(value, torch.Tensor) and value.numel() == 1:
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
