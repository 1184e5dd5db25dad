"""The state of a trainer: its keys, and how workers read, send, check, and load it.

A file has the state between calls. A snapshot, from which new workers restart, also has the
unfinished call. In a new generation, the leader sends its state. The numbers are the order in which
`load_state` loads the entries of both, and `load_from_leader` receives and applies them:

===============================  ====  =======  =======  ===========================================
entries                          file  arrives  applied  loaded by
===============================  ====  =======  =======  ===========================================
``shards``                       1 s                     `merge_shards`
``operator``                     2     1        3        the operator's ``load_state_dict``
models, optimizers, schedulers,  3     2        1        `StateAccess.load`, or `copy_from`
``requires_grad``, ``layers``,
``trainable``, of features
buffers                          3     3        2        `StateAccess.load`, `UpdateFeature.receive`
shards of models, optimizers     4     4        0 a      `StatePlacement.load_shards`, the same hook
``why_not_split``                      1        0 a      `MicroBatching.refuse_split`
``is_damaged``                         1        4        `TrainState.is_damaged`
``call``                         5 s   1        7 a      `MetricsRecorder.continue_call`
``batching``                     6 s   1        0, 8 a   `DataSources.set_batch_size`
``module_modes``                 7 s   1        5        `StateAccess.set_module_modes`
``data``, ``global_step``        8     1        6 a      `TrainState.load_position`
``data["rng"]``                  9 f                     `RandomGenerators.set`
``fingerprint``                        1        9 a      compared by `DataSources`
``parameters``, ``frozen``       0                       compared by `StateAccess.check`
`DRIVER_KEYS`                    f                       the driver
===============================  ====  =======  =======  ===========================================

f, s: only files or snapshots have it. Applied 0: on arrival. a: also workers that keep their own
models apply it, and for shards the leader. States of RaySGD have ``epoch`` instead of ``data``.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

from raysgd._internal.nested import load_or_restore, map_leaves, try_copy
from raysgd.checkpoint.file import REQUIRED_KEYS
from raysgd.checkpoint.shards import SHARDS, merge_shards
from raysgd.cluster.large_values import IncomingValue
from raysgd.errors import CheckpointError
from raysgd.loop.loop import Loop


def entries_for_workers(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what workers load of a state: all without the entries of the driver and of a call."""
    return with_models_last(without_call(state, *DRIVER_KEYS))


def without_call(state: Mapping[str, Any], *more: str) -> dict[str, Any]:
    """Return a state without the call of a snapshot, and without `more` keys."""
    of_call = ("call", "batching", "module_modes")
    return {key: value for key, value in state.items() if key not in (*of_call, *more)}


def with_models_last(state: dict[str, Any]) -> dict[str, Any]:
    """Sort a state, because workers receive the last entries in the memory of their own."""
    last = {key: state.pop(key) for key in ("optimizers", "models") if key in state}
    return state | last


def read_state(loop: Loop, is_snapshot: bool = False, frozen: bool = True) -> dict[str, Any]:
    """Return the state for a file or a snapshot, with tensors on their device.

    If the state is sharded, only rank 0 adds more than its shards.
    """
    train_state, data = loop.train_state, loop.train_state.data
    state: dict[str, Any] = {"global_step": train_state.position.global_step}
    if shards := train_state.placement.shards_to_save():
        state[SHARDS] = shards
        if train_state.context.world_rank != 0:
            return state
    state |= {"operator": loop.operator.state_dict(), "data": train_state.position_to_save()}
    state["epoch"] = train_state.position.epoch + (train_state.position.offset > 0)
    if not is_snapshot:
        state["data"]["loaders"] = data.loader_summaries
        return with_models_last(state | loop.state_access.read(frozen))
    # Other batch sizes follow from the new number of workers.
    sizes = data.batching().items()
    batching = {name: (size, follows) for name, (size, follows) in sizes if not follows}
    state |= {"call": loop.recorder.export_call(), "batching": batching}
    state["module_modes"] = loop.state_access.module_modes()
    return with_models_last(state | loop.state_access.read_for_workers())


def _small_entries(loop: Loop) -> dict[str, Any]:
    """Return what the leader of a new generation sends first."""
    train_state = loop.train_state
    return {
        "global_step": train_state.position.global_step,
        "operator": loop.operator.state_dict(),
        "data": train_state.position_to_save(),
        "call": loop.recorder.export_call(),
        "batching": train_state.data.batching(),
        "module_modes": loop.state_access.module_modes(),
        "fingerprint": train_state.data.fingerprint(),
        "why_not_split": train_state.micro_batching.why_not_split,
        "is_damaged": train_state.is_damaged,
    }


def load_from_leader(loop: Loop, leader_rank: int) -> Mapping[str, Any] | None:
    """Load the state of the leader, and return its small entries. Return None on the leader.

    The small entries arrive first, in one message of the leader. Models and optimizers follow if
    they differ, then buffers, and last shards, from all workers. ``batching``, ``why_not_split``,
    and shards are applied on arrival. The others are applied when all have arrived, because the
    leader may be lost meanwhile. `OperatorRunner.rejoin` does 8 and 9 after ``on_world_change``.

    New workers follow the leader. If models are replicated, all others do. Otherwise, survivors
    keep their own models. The leader does not send snapshots, generators of random numbers, and
    metrics, except those that equal bits share.
    """
    train_state, collectives = loop.train_state, loop.train_state.collectives
    is_leader = train_state.context.world_rank == leader_rank
    state: dict[str, Any] = collectives.broadcast(lambda: _small_entries(loop), leader_rank)
    if not is_leader:
        train_state.data.set_batch_size(state["batching"])
        if why := state["why_not_split"]:
            train_state.micro_batching.refuse_split(why)
    follows = not is_leader and (train_state.lacks_state or train_state.placement.replicates)
    loop.state_access.copy_from(leader_rank, follows)
    if follows:
        loop.operator.load_state_dict(state["operator"])
        train_state.is_damaged = state["is_damaged"]
        loop.state_access.set_module_modes(state["module_modes"])
    if is_leader:
        return None
    train_state.load_position(state["data"], state["global_step"])
    loop.recorder.continue_call(state["call"])
    return state


def load_state(loop: Loop, state: dict[str, Any], incoming: IncomingValue | None) -> None:
    """Load a state. Receive its large arrays late, in the memory of the training state."""
    train_state, state_access, operator = loop.train_state, loop.state_access, loop.operator
    if SHARDS in state:  # of all workers, in a snapshot
        if incoming is not None:
            incoming.receive()
        state = merge_shards(state)
    if train_state.context.is_in_driver and incoming is None:
        # Copy the state, because training would change the caller's tensors.
        state = map_leaves(state, try_copy)
    state_access.check(state)
    if incoming is not None:
        state = state_access.reuse_memory(state, incoming)
        incoming.receive(stops_at_target=True)
    position = state.get("data") or {"epoch": state["epoch"], "offset": 0}
    if position.get("trains_on", "train") == "train":
        train_state.data.source_or_missing("train").check_resume_info(position.get("stream", {}))
    context, generators = train_state.context, train_state.generators
    random_states = generators.loadable_states(position.get("rng", ()), context.world_size)
    with contextlib.ExitStack() as undoing:
        if "operator" in state:
            old, new = map_leaves(operator.state_dict(), train_state.copy_leaf), state["operator"]
            undoing.enter_context(load_or_restore(operator, old, new, "operator"))
        if incoming is not None and incoming.targets:
            train_state.is_damaged = True
            incoming.receive()
        state_access.load(state)
        train_state.is_damaged = True  # until the shards of these models are loaded
        train_state.placement.load_shards(state)
    train_state.is_damaged = False
    loop.source.discard_unread()
    loop.snapshots.clear()
    train_state.data.warn_of_another_part(position)
    if "call" in state:  # the state is a snapshot, from which the call continues
        loop.recorder.continue_call(state["call"])
        train_state.data.set_batch_size(state["batching"])
        state_access.set_module_modes(state["module_modes"])
    else:
        train_state.data.warn_of_other_steps(position)
    train_state.load_position(position, state.get("global_step", 0))
    if random_states:
        generators.set(random_states[context.world_rank])


# ---- checks


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**62:
        raise CheckpointError(f"The state's {name} must be a count, but it is {value!r}.")


def _check_dict(name: str, value: Any) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise CheckpointError(f"state[{name!r}] must be a dict, but it is {value!r}.")


def _check_position(name: str, position: Any) -> None:
    if not position:  # a state of RaySGD has only the epoch
        return
    _check_dict(name, position)
    optional = [key for key in ("validation_offset", "seed", "split") if key in position]
    for key in ("epoch", "offset", *optional):
        _check_count(f"{name}[{key!r}]", position.get(key))
    if position.get("split") == 0:
        raise CheckpointError(f"The state's {name}['split'] must be at least 1.")
    _check_dict("loader_seeds", seeds := position.get("loader_seeds", {}))
    for loader, seed in seeds.items():
        _check_count(f"{name}['loader_seeds'][{loader!r}]", seed)


DRIVER_KEYS = ("callbacks", "config", "validation_due", "provenance", "parent")
"""Dicts that only the driver loads."""


def check_state(state: Mapping[str, Any]) -> None:
    """Check the entries of a state, except what the operator, framework, or a feature checks.

    Raises:
        CheckpointError: if an entry is missing or wrong.
    """
    missing = [k for k in REQUIRED_KEYS if not isinstance(state, Mapping) or k not in state]
    if missing:
        raise CheckpointError(f"This is not a trainer state: it lacks {', '.join(missing)}.")
    checks = dict.fromkeys(("epoch", "global_step"), _check_count) | {"data": _check_position}
    checks |= dict.fromkeys(("bad_steps", *DRIVER_KEYS), _check_dict)
    for key, check in checks.items():
        if key in state:
            check(key, state[key])
