"""The driver's snapshot of the state, for the case that all workers are lost."""

import functools
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from raysgd._internal.worker_status import WorkerStatus
from raysgd.checkpoint.shards import collect_shards
from raysgd.cluster.actor_group import ActorGroup
from raysgd.cluster.large_values import Inbox, StorageError, store_copy, unnamed_file
from raysgd.cluster.serialization import PackedValue, pack
from raysgd.cluster.worker import Worker
from raysgd.cluster.worker_handle import WorkerHandle
from raysgd.elastic.call import RestartStateRequest
from raysgd.elastic.group_rpc import GroupRpc
from raysgd.elastic.policies import state_senders
from raysgd.errors import CheckpointError

logger = logging.getLogger(__name__)

_CHANGED_SNAPSHOT_S = 10.0
"""Seconds that a call waits for the snapshot of a change. Large states arrive later."""

ReadState = Callable[[], Any]
"""Returns a stored state."""


class _IncomingSnapshot(NamedTuple):
    """The snapshots of one step that workers are sending, one if the state is not sharded."""

    step: int
    inbox: Inbox
    futures: list[Future[Any]]


class SnapshotKeeper:
    """Fetches snapshots during training, and keeps the newest one.

    The driver keeps the snapshot, because a worker's objects in the Ray store die with the worker.
    """

    def __init__(self, group: ActorGroup) -> None:
        self._group = group
        self._shards: Sequence[ReadState] = ()  # one for each rank if the state is sharded
        self._step = -1
        self._incoming: _IncomingSnapshot | None = None
        self._has_warned = False
        self._num_invalidations = self._num_changes_at_end = 0

    def replace_with(self, *shards: ReadState, step: int = -1) -> None:
        """Keep this state, or none, until there is a snapshot with more than `step` steps."""
        self._shards, self._step = shards, step
        self._cancel_incoming()

    def store(self, state: Mapping[str, Any]) -> None:
        """Keep a copy of a state, in a file if it is large."""
        self.replace_with(self._copy(state))

    def _copy(self, state: Any) -> ReadState:
        packed = state if isinstance(state, PackedValue) else pack(state)
        try:
            return store_copy(packed).unpack
        except StorageError as error:
            self._warn_of_disk(error)
            return functools.partial(packed.unpack, copies=False)  # stays in memory

    def request_newer(self, statuses: Mapping[WorkerHandle, WorkerStatus]) -> None:
        """Fetch a newer snapshot from the members, without waiting."""
        self.store_arrived()
        if len(statuses) < max(len(self._group.members), 1):
            return  # the worker with the snapshot may not have answered
        step, num_invalidations = next(
            iter(statuses.values())
        ).snapshot  # of rank 0, which is first
        if num_invalidations != self._num_invalidations:
            self._step = -1  # fetch it even if it has the same step
            self._cancel_incoming()
            self._num_invalidations = num_invalidations
        if step is None:  # the last snapshot of the member is outdated
            self._step = -1
        elif self._incoming is None and step > self._step:
            senders = {each: statuses[each] for each in state_senders(statuses)[0]}
            are_equal = all(each.snapshot.step == step for each in senders.values())
            if are_equal and any(each.is_remote for each in senders):
                self._fetch(senders, step)

    def _fetch(self, statuses: Mapping[WorkerHandle, WorkerStatus], step: int) -> None:
        """Request the snapshots of workers. Shards must be of one step."""
        only = step if len(statuses) > 1 else None
        try:
            inbox = Inbox([member.location.node_ip for member in statuses], unnamed_file)
        except OSError as error:  # the driver's host has no network
            logger.debug("A snapshot was not requested: %r", error)
            return
        self._incoming = _IncomingSnapshot(step, inbox, [])
        for member, each in statuses.items():
            arguments = only, each.snapshot.num_invalidations, inbox.expect()
            self._incoming.futures.append(member.submit_control(Worker.send_snapshot, *arguments))

    def _cancel_incoming(self) -> None:
        if self._incoming is not None:
            self._incoming.inbox.close()
        self._incoming = None

    def await_changed_snapshot(self) -> None:
        """Wait for a snapshot of what the call has changed, because no restart repeats the call."""
        if self._num_invalidations != self._num_changes_at_end and self._incoming is not None:
            self._group.clock.wait(self._incoming.futures, _CHANGED_SNAPSHOT_S)
        self._num_changes_at_end = self._num_invalidations

    def rescue(self, rpc: GroupRpc) -> WorkerStatus | None:
        """Keep the state of a member that answers, if there is one. Return its status."""
        statuses = rpc.poll_status()
        sets = [each for each in state_senders(statuses) if any(m.is_remote for m in each)]
        for members in sorted(sets, key=lambda each: -statuses[each[0]].position.global_step):
            shards = self._rescue(rpc, members)
            steps = {(read() or {}).get("global_step") for read in shards}
            if len(shards) == len(members) and len(steps) == 1 and None not in steps:
                self.replace_with(*shards, step=statuses[members[0]].position.global_step)
                return statuses[members[0]]
        return None

    def _rescue(self, rpc: GroupRpc, members: Sequence[WorkerHandle]) -> list[ReadState]:
        request = RestartStateRequest(num_workers=len(members))
        for open_file in (unnamed_file, None):  # in memory if the disk is full
            try:
                with Inbox([member.location.node_ip for member in members], open_file) as inbox:
                    outcomes = rpc.send_to_idle(members, request, inbox=inbox).values()
                return [self._copy(inbox.resolve(outcome.payload)) for outcome in outcomes]
            except StorageError as error:
                self._warn_of_disk(error)
        return []

    def load(self) -> Mapping[str, Any] | None:
        if not self.store_arrived():
            return None
        try:
            return collect_shards([read() for read in self._shards])
        except (CheckpointError, OSError) as error:
            raise CheckpointError(
                f"All workers are lost, and the driver cannot read its snapshot: {error} To "
                "continue, load another checkpoint: trainer.load(path)."
            ) from error

    def store_arrived(self) -> bool:
        """Store a snapshot that has arrived. Return whether there is a state to load."""
        if self._incoming is not None and all(a.done() for a in self._incoming.futures):
            (step, inbox, futures), self._incoming = self._incoming, None
            try:
                with inbox:
                    shards = [inbox.resolve(future.result()) for future in futures]
            except StorageError as error:
                self._step = step  # the workers have released it
                self._warn_of_disk(error)
            except Exception as error:  # most likely, a worker was lost
                logger.debug("A snapshot did not arrive: %r", error)
            else:
                if None not in shards:
                    self._shards, self._step = list(map(self._copy, shards)), step
        return bool(self._shards)

    def _warn_of_disk(self, error: StorageError) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The driver cannot store a snapshot in %s: %s. If all workers are lost, training "
                "restarts from the previous snapshot. Set TMPDIR to a folder with more space.",
                tempfile.gettempdir(),
                error,
            )
