"""What a worker does when it enters a generation, and what it gets from the leader.

The leader is the worker whose state counts. It first sends the small entries of the state in one
message, then the models and optimizers if they differ, then buffers. Shards come from all workers.
The others load them in this order:

================================  ====================================  ==========
entry of the state                loaded by                             on
================================  ====================================  ==========
``batching``                      `DataSources.set_batch_size`          all others
``why_not_split``                 `MicroBatching`                       all others
shards                            `StepFeature.receive`                 all
schedulers, optimizers, models,   `SavedState.copy_from`                followers
and the entries of features
buffers                           `StepFeature.receive`                 followers
``operator``                      the operator's ``load_state_dict``    followers
``is_damaged``                    `UpdateTransaction`                   followers
``module_modes``                  `SavedState.set_module_modes`         followers
``data``, ``global_step``         `TrainState.move_to`                  all others
``call``                          `CallProgress.continue_call`          all others
``fingerprint``, ``batching``     `DataSources`, after the hook         all others
                                  ``on_world_change``
================================  ====================================  ==========

New workers follow the leader. If models are replicated, all others do. Otherwise, survivors keep
their own models. The leader does not send snapshots, generators of random numbers, and metrics,
except those that equal bits share. A restart from a snapshot loads ``operator`` first, see
`OperatorRunner.load_state_dict`. `raysgd.loop.state_schema` lists what each entry contains.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysgd._internal.context import WorkerContext
from raysgd.loop.loop import Loop
from raysgd.loop.state_schema import state_for


def enter_generation(loop: Loop, context: WorkerContext, leader_rank: int) -> None:
    """Enter a generation with the state of the leader. Every rank must call this."""
    train_state, position = loop.train_state, loop.train_state.position()
    train_state.begin_generation(context)
    state = _load_from_leader(loop, leader_rank) if context.distributed else None
    train_state.is_new = False
    has_moved = train_state.position() != position
    if has_moved or loop.source is None or loop.source.is_partitioned:
        loop.forget_iteration()  # otherwise, the loop continues to read the same batches
    if not train_state.holdings.complete:
        loop.snapshots.clear()
    loop.operator.on_world_change()
    if state is not None:  # the hook may register the data of the leader
        train_state.data.check_like(state["fingerprint"])
        train_state.data.set_batch_size(state["batching"])
    train_state.data.warn_of_stale_ranks()


def _load_from_leader(loop: Loop, leader_rank: int) -> Mapping[str, Any] | None:
    """Load the state of the leader, and return it. Return None on the leader."""
    train_state = loop.train_state
    is_leader = train_state.context.world_rank == leader_rank
    state: Mapping[str, Any] = train_state.collectives.broadcast(
        lambda: state_for("replacement", loop), leader_rank
    )
    if not is_leader:
        train_state.data.set_batch_size(state["batching"])
        if why := state["why_not_split"]:
            train_state.micro_batching.refuse(why)
    follows = train_state.replication.follows(is_leader, train_state.is_new)
    loop.saved_state.copy_from(leader_rank, follows)
    if follows:
        loop.operator.load_state_dict(state["operator"])
        train_state.transaction.is_damaged = state["is_damaged"]
        loop.saved_state.set_module_modes(state["module_modes"])
    if is_leader:
        return None
    train_state.move_to(state["data"], state["global_step"])
    loop.call_progress.continue_call(state["call"])
    return state
