"""The driver's snapshot of the state, for the case that all workers are lost."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from raysgd._internal.context import Progress
from raysgd.cluster.worker_group import WorkerGroup
from raysgd.cluster.worker_handle import WorkerHandle
from raysgd.elastic.call import RestartStateRequest
from raysgd.elastic.commands import Commands


class SnapshotKeeper:
    """Fetches snapshots during training, and keeps the newest one.

    The driver keeps the snapshot, because a worker's objects in the Ray store die with the worker.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._pickled: list[bytes] = []
        self._state: Mapping[str, Any] | None = None
        self._step = -1
        self._coming: tuple[int, list[Future[bytes | None]]] | None = None

    def set(self, state: Mapping[str, Any], step: int = -1) -> None:
        """Store a state. Only snapshots with more than `step` committed steps replace it."""
        self._state, self._pickled, self._coming = state, [], None
        self._step = step

    def outdate(self) -> None:
        """Fetch the next snapshot even if it has the same step."""
        self._step, self._coming = -1, None

    def poll(self, progress: Mapping[WorkerHandle, Progress]) -> None:
        """Fetch a newer snapshot from the members, without waiting.

        The shards of a sharded state must be of one step, so they are fetched together.
        """
        self._receive()
        if not progress:
            return
        member, newest = next(iter(progress.items()))
        step = newest.snapshot
        if step is None:  # the last snapshot of the member is outdated
            self._step = -1
        elif self._coming is None and step > self._step:
            if not newest.divided:
                if member.remote:
                    self._coming = (step, [member.control("snapshot")])
            elif [p.snapshot for p in progress.values()] == [step] * len(self._group.members):
                self._coming = (step, [each.control("snapshot", step) for each in progress])

    def rescue(self, commands: Commands) -> Progress | None:
        """Store the state of a member that answers, and return its progress, if there is one."""
        reached = commands.ask_progress()
        remote = [member for member in reached if member.remote]
        each = [[m] for m in sorted(remote, key=lambda m: -reached[m].global_step)]
        is_divided = any(p.divided for p in reached.values())
        for members in [list(reached)] if is_divided else each:
            states = commands.ask_all(members, RestartStateRequest(num_workers=len(members)))
            if states and len({state.get("global_step") for state in states}) == 1:
                self.set(with_shares(states), reached[members[0]].global_step)
                return reached[members[0]]
        return None

    def state(self) -> Mapping[str, Any] | None:
        self._receive()
        if self._pickled:
            return with_shares([pickle.loads(each) for each in self._pickled])
        return self._state

    def _receive(self) -> None:
        if self._coming is None or not all(future.done() for future in self._coming[1]):
            return
        step, futures = self._coming
        self._coming = None
        if any(future.exception() is not None for future in futures):
            return
        pickled = [each for future in futures if (each := future.result()) is not None]
        if len(pickled) == len(futures):
            self._pickled, self._step = pickled, step


def with_shares(states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the state of rank 0 with the shards of all ranks."""
    state = states[0]
    if not isinstance(state, Mapping) or "shares" not in state:
        return state
    return {**state, "shares": [each["shares"] for each in states]}
