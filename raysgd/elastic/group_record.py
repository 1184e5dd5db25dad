"""What the driver knows of a group: policy, ranks, generation, status, and events."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from raysgd._internal.paths import without_secrets
from raysgd._internal.worker_status import StateStatus, WorkerStatus
from raysgd.cluster.actor_group import ActorGroup
from raysgd.cluster.worker_handle import WorkerHandle, cause_of
from raysgd.elastic.call import Call
from raysgd.elastic.events import Event, EventKind
from raysgd.elastic.policies import RecoveryPolicy, newest_status
from raysgd.errors import WorkerLostError

logger = logging.getLogger(__name__)

_WARNINGS = {
    "lost": "Lost %(names)s: %(cause)s",
    "replacement_failed": "A replacement worker failed before it joined: %(cause)s",
    "out_of_memory": "Worker %(workers)s ran out of memory after step %(step)d. From now on, each "
    "batch is split into %(num_splits)d micro-batches that make one update: %(cause)s",
    "waiting": "%(cause)s. Waiting %(seconds).1f s for workers.",
    "regrouped": "Training continues with %(num_workers)d of %(max_workers)d workers, no step "
    "lost.",
    "grown": "Worker %(workers)s joined: %(num_workers)d of %(max_workers)d.",
    "drained": "Worker %(workers)s joined: %(num_workers)d of %(max_workers)d; %(cause)s.",
    "restarted": "The workers restarted: %(num_workers)d of %(max_workers)d.",
    "draining": "Workers will be preempted%(within)s (%(cause)s): %(names)s.",
}
"""Messages of the events that are logged as warnings."""
_OTHER = (
    "Workers %(workers)s %(kind)s: %(num_workers)d of %(max_workers)d, generation %(generation)d, "
    "step %(step)d, %(seconds).2f s. %(cause)s"
)
"""Message of the other events."""


def list_ranks(ranks: Mapping[WorkerHandle, int], members: Iterable[WorkerHandle]) -> str:
    """Return the ranks of workers, in order. A worker that has not joined has no rank.

    >>> list_ranks({"a": 10, "b": 2}, "abc")
    '2, 10, (new)'
    """
    in_order = sorted(ranks.get(member, math.inf) for member in members)
    return ", ".join("(new)" if rank == math.inf else str(rank) for rank in in_order)


class GroupRecord:
    """What trainers and components read of a group. `Controller` decides what follows."""

    def __init__(self, group: ActorGroup, policy: RecoveryPolicy) -> None:
        self.group, self.policy = group, policy
        self.ranks: dict[WorkerHandle, int] = {}
        """Ranks of the members of the newest generation, including lost ones."""
        self.generation = 0
        """Number of the newest generation. Only `GroupBuilder` sets it and the ranks."""
        self.newest_status = WorkerStatus()
        """The newest known status of a worker. Only `set_newest_status` sets it."""
        self.events: list[Event] = []
        """The events, oldest first. Only `add_event` adds some."""
        self._interruption = ""  # until the next event
        self.on_event: Callable[[], Callable[[], None] | None] = lambda: None
        """Returns what to call after each event, such as a ``weakref.WeakMethod``."""
        self.begin_call(Call())

    def begin_call(self, call: Call) -> None:
        """Set the running call, or an empty one at its end. Only `CallExecutor` does so."""
        self.call = call
        # It counts, even if a later step of the call has damaged the state.
        self.status_before = self.newest_status._replace(state_status=StateStatus())

    def interrupt_call(self) -> None:
        self._interruption = "interrupted by Ctrl-C"

    def assign_ranks(self, members: Sequence[WorkerHandle]) -> None:
        self.ranks = {member: rank for rank, member in enumerate(members)}

    @property
    def has_shards(self) -> bool:
        return not self.newest_status.state_status.is_complete

    @property
    def num_required(self) -> int:
        """Number of workers that the running call needs."""
        return 1 if self.call.allows_any_size else self.group.options.min_workers

    def describe_shortage(self) -> str:
        number = len(self.group.members)
        left = f"{number} worker{'s' * (number != 1)} left"
        return f"{left}, but min_workers={self.num_required}"

    @property
    def is_first_start(self) -> bool:
        """Whether no group has formed yet."""
        return all(event.kind != "started" for event in self.events)

    def set_newest_status(self, *reported: WorkerStatus | None) -> None:
        """Set the status to the newest of those that are reported, if there are any."""
        known = [each for each in reported if each is not None]
        self.newest_status = newest_status(known) if known else self.newest_status

    def add_event(
        self,
        kind: EventKind,
        members: Sequence[WorkerHandle],
        *,
        cause: str = "",
        **values: Any,
    ) -> None:
        """Add an event with further `values` of `Event`, and log it."""
        if kind in ("regrouped", "restarted"):
            cause = cause or self._interruption
        self._interruption = ""
        num_workers, max_workers = len(self.group.members), self.group.options.num_workers
        names = [f"worker {self.ranks.get(member, -1)} on {member.node_name}" for member in members]
        if kind == "lost":  # the lost worker is still a member
            num_workers = num_workers - 1 if self.policy.survivors_stay else 0
            self.call.losses.causes.append(f"{names[0]}: {cause}")
        event = Event(
            kind=kind,
            generation=self.generation,
            ranks=tuple(self.ranks.get(member, -1) for member in members),
            node_ids=tuple(member.location.node_id for member in members),
            step=self.newest_status.position.global_step,
            cause=without_secrets(cause),  # events are written to files and sent to servers
            num_workers=num_workers,
            **values,
        )
        self.events.append(event)
        shown = {
            **vars(event),
            "workers": list_ranks(self.ranks, members),
            "max_workers": max_workers,
            "names": ", ".join(names),
            "within": f" within {event.seconds:.0f} s" if event.seconds else "",
        }
        if kind in _WARNINGS and (kind != "regrouped" or num_workers < max_workers):
            logger.warning(_WARNINGS[kind], shown)
        else:
            logger.info(_OTHER, shown)
        if (notify := self.on_event()) is not None:
            notify()

    def make_error(
        self,
        why: str,
        member: WorkerHandle | None = None,
        cause: BaseException | None = None,
    ) -> WorkerLostError:
        """Return the error that ends the call, with the causes of its losses."""
        if not self.group.members:  # a restart in this call may have begun before it
            self.set_newest_status(self.newest_status, self.status_before)
        name = self.call.name
        what = f"The call of {name}() failed" if name else "The workers did not start"
        error = WorkerLostError(
            "\n".join([f"{what}: {why.rstrip('.')}.", *self.call.losses.causes]),
            rank=-1 if member is None else self.ranks.get(member, -1),
            node_id="" if member is None else member.location.node_id,
            cause="" if cause is None else cause_of(member, cause),
        )
        error.__cause__ = cause
        return error
