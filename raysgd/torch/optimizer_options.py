"""Change the options of optimizers in a state that is loaded under another config.

Population based training does this. Options that differ between the configs follow the new config,
and keep the changes that schedulers made since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raysgd.torch.operator import TrainingOperator

Options = list[list[dict[str, Any]]]
"""Options that are numbers or lists of numbers, by optimizer and parameter group."""

Owners = Sequence[int | None]
"""Index of the optimizer of each scheduler, or None if it has no registered optimizer."""


def inspect(operator: TrainingOperator) -> tuple[bool, Options, Owners]:
    """Return whether a validation loader exists, the options, and the owners of schedulers."""
    state = operator._train_state
    options = [[_plain(group) for group in each.param_groups] for each in state.optimizers]
    owners = [_owner(scheduler, state.optimizers) for scheduler in state.schedulers]
    return state.data.has("validation"), options, owners


def with_options(
    state: dict[str, Any], then: Options, now: Options, owners: Owners = ()
) -> dict[str, Any]:
    """Change the state of a trainer, in place, from the initial options `then` to `now`.

    Changes by schedulers stay in proportion: a learning rate that is a tenth of its first value
    becomes a tenth of the new first value.
    """
    for optimizer, groups_then, groups_now in zip(state["optimizers"], then, now, strict=True):
        for group, old, new in zip(optimizer["param_groups"], groups_then, groups_now, strict=True):
            for name in old.keys() & new.keys() & group.keys():
                if old[name] != new[name]:
                    group[name] = _move(group[name], old[name], new[name])
    for scheduler, owner in zip(state.get("schedulers", ()), owners, strict=True):
        if owner is not None:
            _move_scheduler(scheduler, _rates(then[owner]), _rates(now[owner]))
    return state


def _owner(scheduler: Any, optimizers: Sequence[Any]) -> int | None:
    # Compare the groups, which a wrapper shares with its optimizer.
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", None)
    return next((i for i, o in enumerate(optimizers) if o.param_groups is groups), None)


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    options = {}
    for name, value in group.items():
        values = list(value) if isinstance(value, list | tuple) else [value]
        if name != "params" and all(isinstance(v, int | float) for v in values):
            options[name] = values if isinstance(value, list | tuple) else value
    return options


def _move(value: Any, old: Any, new: Any) -> Any:
    """Return `value` scaled by the change of the initial value from `old` to `new`."""
    if isinstance(new, list):
        return type(value)(map(_move, value, old, new))
    if isinstance(new, bool) or value == old or not old:
        return new
    return value / old * new


def _rates(groups: list[dict[str, Any]]) -> list[Any]:
    return [group.get("initial_lr", group.get("lr")) for group in groups]


def _move_scheduler(state: Any, old: list[Any], new: list[Any]) -> None:
    for name, value in state.items():
        if name in ("base_lrs", "_last_lr"):
            state[name] = _move(value, old, new)  # inner schedulers may share the list
        for inner in value if name == "_schedulers" else ():
            _move_scheduler(inner, old, new)
