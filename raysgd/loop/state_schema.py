"""The keys of the state of a trainer: who receives each, and how it is checked.

Files have the state between calls. A snapshot, from which new workers restart, also has the
unfinished call. A replacement worker gets models and optimizers from the process group, and the
other entries that it needs from the worker whose state counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from raysgd.checkpoint.file import REQUIRED
from raysgd.errors import CheckpointError
from raysgd.loop.train_state import TrainState

Receiver = Literal["file", "snapshot", "replacement"]

_SAVED = frozenset({"file", "snapshot"})
_CALL = frozenset({"snapshot", "replacement"})
_ALL = _SAVED | _CALL
_REPLACEMENT = frozenset({"replacement"})


@dataclass(frozen=True)
class _Worker:
    """Where the entries of a state come from."""

    operator: Any
    train_state: TrainState
    call: Mapping[str, Any]
    """What a process must know to continue the call."""
    receiver: Receiver


@dataclass(frozen=True)
class StateEntry:
    """An entry of a state."""

    key: str
    receivers: frozenset[str]
    read: Callable[[_Worker], Any] | None = None
    """None for entries of `TrainState.training_state` or of the driver."""
    check: Callable[[str, Any], None] | None = None
    """Raises CheckpointError if a loaded value is wrong. The operator, the framework, or a feature
    checks the other entries."""
    is_of_driver: bool = False


def _count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**62:
        raise CheckpointError(f"The state's {name} must be a count, but it is {value!r}.")


def _dict(name: str, value: Any) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise CheckpointError(f"state[{name!r}] must be a dict, but it is {value!r}.")


def _position(name: str, position: Any) -> None:
    if not position:  # a state of RaySGD has only the epoch
        return
    _dict(name, position)
    optional = [key for key in ("validation_offset", "seed", "split") if key in position]
    for key in ("epoch", "offset", *optional):
        _count(f"{name}[{key!r}]", position.get(key))
    if position.get("split") == 0:
        raise CheckpointError(f"The state's {name}['split'] must be at least 1.")
    _dict("loader_seeds", seeds := position.get("loader_seeds", {}))
    for loader, seed in seeds.items():
        _count(f"{name}['loader_seeds'][{loader!r}]", seed)


def _epoch(worker: _Worker) -> int:
    return worker.train_state.epoch + (worker.train_state.offset > 0)


def _shards(worker: _Worker) -> list[Any]:
    """Return this worker's shards of each optimizer."""
    features, optimizers = worker.train_state.sharded_features, worker.train_state.optimizers
    by_optimizer = {id(feature.optimizer): feature.shards() for feature in features}
    return [by_optimizer.get(id(optimizer), []) for optimizer in optimizers]


def _batching(worker: _Worker) -> dict[str, tuple[int, bool]]:
    batching = worker.train_state.data.batching()
    if worker.receiver == "replacement":
        return batching
    # Shares of the global batch follow from the new number of workers.
    return {name: each for name, each in batching.items() if not each[1]}


SCHEMA = (
    StateEntry("epoch", _SAVED, _epoch, _count),
    StateEntry("global_step", _ALL, lambda w: w.train_state.global_step, _count),
    StateEntry("shares", _SAVED, _shards),  # of a sharded state, under the name that files have
    StateEntry("operator", _ALL, lambda w: w.operator.state_dict()),
    StateEntry("data", _ALL, lambda w: w.train_state.position(), _position),
    StateEntry("callbacks", _SAVED, check=_dict, is_of_driver=True),
    StateEntry("config", _SAVED, check=_dict, is_of_driver=True),
    StateEntry("validation_due", _SAVED, check=_dict, is_of_driver=True),
    StateEntry("call", _CALL, lambda w: dict(w.call)),
    StateEntry("batching", _CALL, _batching),
    StateEntry("flags", _CALL, lambda w: w.train_state.flags()),
    StateEntry("fingerprint", _REPLACEMENT, lambda w: w.train_state.data.fingerprint()),
    StateEntry("why_not_split", _REPLACEMENT, lambda w: w.train_state.micro_batching.why_not_split),
    StateEntry("is_partial", _REPLACEMENT, lambda w: w.train_state.transaction.is_partial),
    # `TrainState.training_state` has these, and more keys of features. They travel last, because
    # workers receive them in the memory of the models and optimizers that they have.
    StateEntry("optimizers", _SAVED),
    StateEntry("models", _SAVED),
)
OF_DRIVER = tuple(entry.key for entry in SCHEMA if entry.is_of_driver)
_OF_CALL = tuple(entry.key for entry in SCHEMA if entry.receivers == _CALL)
_OF_SHARD = ("global_step", "shares")


def state_for(receiver: Receiver, operator: Any, call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a worker's state for a receiver, with tensors on their device.

    If the state is sharded, ``shares`` has this worker's shards, and only rank 0 adds the rest.
    """
    train_state: TrainState = operator._train_state
    worker = _Worker(operator, train_state, call, receiver)
    is_sharded = bool(train_state.sharded_features)
    has_rest = not is_sharded or train_state.context.world_rank == 0
    if receiver == "replacement" or has_rest:
        keys = {entry.key for entry in SCHEMA if is_sharded or entry.key != "shares"}
    else:
        keys = set(_OF_SHARD)
    state = {
        entry.key: entry.read(worker)
        for entry in SCHEMA
        if entry.read is not None and entry.key in keys and receiver in entry.receivers
    }
    if receiver != "replacement" and has_rest:
        state |= train_state.training_state()
    return _models_last(state)


def for_workers(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what workers load of a state: all without the entries of the driver and of a call."""
    return _models_last(without_call(state, *OF_DRIVER))


def without_call(state: Mapping[str, Any], *more: str) -> dict[str, Any]:
    """Return a state without the call of a snapshot, and without `more` keys."""
    return {key: value for key, value in state.items() if key not in (*_OF_CALL, *more)}


def check_state(state: Mapping[str, Any], of_driver: bool = False) -> None:
    """Check the entries of a state that workers or, with `of_driver`, the driver load.

    Raises:
        CheckpointError: if an entry is missing or wrong.
    """
    if of_driver:
        missing = [k for k in REQUIRED if not isinstance(state, Mapping) or k not in state]
        if missing:
            raise CheckpointError(f"This is not a trainer state: it lacks {', '.join(missing)}.")
    for entry in SCHEMA:
        is_there = entry.key in state or entry.key == "epoch"
        if entry.check is not None and entry.is_of_driver == of_driver and is_there:
            entry.check(entry.key, state.get(entry.key))


def check_objects(
    name: str, objects: Sequence[Any], saved: Any, problem_of: Callable[[Any, Any], str]
) -> None:
    """Raise CheckpointError if saved states of models, optimizers, or schedulers do not fit.

    `problem_of` returns why an object cannot load a state, or an empty string.
    """
    if not isinstance(saved, list | tuple) or not all(isinstance(s, Mapping) for s in saved):
        raise CheckpointError(f"The state's {name!r} must be a list of state dicts.")
    if len(saved) != len(objects):
        raise CheckpointError(
            f"The state has {len(saved)} {name}, but the operator registered {len(objects)}."
        )
    for index, (own, state) in enumerate(zip(objects, saved, strict=True)):
        if problem := problem_of(own, state):
            raise CheckpointError(
                f"The state's {name}[{index}] does not fit the registered {type(own).__name__}: "
                f"{problem}."
            )


def _models_last(state: dict[str, Any]) -> dict[str, Any]:
    last = {key: state.pop(key) for key in ("optimizers", "models") if key in state}
    return state | last
