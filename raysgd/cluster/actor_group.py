"""Starts and stops the workers of a trainer."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeAlias

from raysgd.cluster.clock import Clock
from raysgd.cluster.group_options import GroupOptions
from raysgd.cluster.host_monitor import HostMonitor
from raysgd.cluster.preemption_notices import PreemptionNotice, PreemptionNotices
from raysgd.cluster.worker import WORK_METHODS, Worker, WorkerLocation
from raysgd.cluster.worker_handle import ActorHandle, LocalHandle, WorkerHandle

if TYPE_CHECKING:  # it imports Ray, which a worker in the driver's process does not need
    from raysgd.cluster.reservation import Reservation, Slot

AnySlot: TypeAlias = "Slot | LocalSlot"
_CONTROL_THREADS = 4
_TEARDOWN_S = 5.0


class ActorGroup:
    """The members in rank order, and their resources in the cluster."""

    def __init__(self, options: GroupOptions, clock: Clock | None = None) -> None:
        self.options = options
        self.clock = clock or Clock()
        self.members: list[WorkerHandle] = []
        self.notices = PreemptionNotices(self.clock)
        self._reservation: Reservation | None = None
        self._local_slot: LocalSlot | None = None
        self._slots: dict[WorkerHandle, AnySlot] = {}
        self._monitor: HostMonitor | None = None
        self._shutdown_lock = threading.RLock()
        self._is_wanted = True

    def reserve(self) -> None:
        """Reserve resources. Raise if ``min_workers`` have none after ``start_timeout_s``."""
        options = self.options
        self._is_wanted = True
        if options.use_local:
            self._local_slot = LocalSlot()
        if not options.is_inline:
            min_remote = max(1, options.min_workers - options.use_local)
            self._reservation = self._reserve(self._num_remote, min_remote)

    def watch_hosts(self, driver_grace_s: float, interrupts_calls: bool) -> None:
        """Watch the hosts of workers that start after this call. See `HostMonitor`."""

        def is_any_reachable() -> bool:
            return any(worker.is_reachable for worker in list(self._slots))

        self._monitor = HostMonitor(driver_grace_s, interrupts_calls, is_any_reachable)

    def is_cut_off(self) -> bool:
        """Return whether the driver's own host has lost its network connection. Log it once."""
        watches = [member.watch for member in self.members]
        return self._monitor is not None and self._monitor.is_cut_off(watches)

    def _reserve(self, num_workers: int, min_workers: int) -> Reservation:
        """Reserve resources for workers. Simulated clusters override this method."""
        from raysgd.cluster import ray_session, reservation

        ray_session.connect()
        ray_session.check_runtime_env()
        self.notices.poll_ray()
        return reservation.reserve(
            self.options.bundle,
            num_workers=num_workers,
            min_workers=min_workers,
            timeout_s=self.options.start_timeout_s,
            placement_strategy=self.options.placement_strategy,
            is_wanted=lambda: self._is_wanted,
        )

    def reserve_more(self, num_workers: int) -> list[Slot]:
        """Reserve resources for further workers, and return their slots."""
        more = self._reserve(num_workers, num_workers)
        if self._reservation is None:  # another thread has ended the group
            more.release()
            raise RuntimeError("The workers are shut down.")
        self._reservation.include(more)
        return more.slots

    def start_worker(self, slot: AnySlot) -> WorkerHandle:
        """Start a worker in a slot. It does not join the group."""
        options = self.options
        worker: WorkerHandle
        if isinstance(slot, LocalSlot) and options.is_inline:
            worker = LocalHandle()
        elif isinstance(slot, LocalSlot):
            import ray

            worker = LocalHandle(has_thread=True)
            worker.location = WorkerLocation(
                node_id=ray.get_runtime_context().get_node_id(),
                node_ip=ray.util.get_node_ip_address(),
                is_in_driver=True,
            )
        else:
            resources = dict(options.resources)
            actor_class = _actor_class().options(
                scheduling_strategy=slot.scheduling_strategy,
                num_cpus=options.num_cpus,
                num_gpus=options.num_gpus,
                memory=resources.pop("memory", None),
                resources=resources or None,
            )
            actor = actor_class.remote(catches_sigterm=True, hides_gpus=not options.num_gpus)
            worker = ActorHandle(actor, self._monitor)
        self._slots[worker] = slot
        return worker

    def node_traits(self) -> dict[str, set[str]]:
        """Return the labels, accelerator types, and resources of the live nodes, by node ID."""
        from raysgd.cluster.ray_session import node_traits

        return node_traits()

    def preempted(self) -> dict[WorkerHandle, PreemptionNotice]:
        """Return the members that will be preempted."""
        return self.notices.preempted(self.members)

    def find_vacant_slots(self) -> list[AnySlot]:
        """Return slots without a worker, on nodes that will not be preempted."""
        slots: list[AnySlot] = [] if self._local_slot is None else [self._local_slot]
        if (reservation := self._reservation) is not None:
            slots += reservation.slots
        excluded = [*self._slots.values(), *self._find_unsafe_slots()]
        return [slot for slot in slots if slot not in excluded]

    def _find_unsafe_slots(self) -> list[Slot]:
        """Return slots without a worker, on nodes that will be preempted."""
        taken, nodes = list(self._slots.values()), self.notices.nodes
        slots = [] if self._reservation is None else self._reservation.slots
        left = [slot for slot in slots if slot.last_node_id in nodes and slot not in taken]
        return [slot for slot in left if slot.node_id in (None, *nodes)]

    def request_slots(self, only_if_lost: bool = False) -> None:
        """Request missing slots, and spare ones for slots that may soon be lost.

        Lost resources may never return. With `only_if_lost`, request slots only after such a loss.
        """
        if (reservation := self._reservation) is None:
            return
        num_before = len(reservation.slots)
        reservation.drop_lost(list(self._slots.values()))
        may_request = not only_if_lost or len(reservation.slots) < num_before
        num_spare = len(self._find_unsafe_slots()) + len(self.preempted())
        while may_request and len(reservation.slots) < self._num_remote + num_spare:
            may_request = reservation.request_slot(self.options.bundle) is not None

    @property
    def _num_remote(self) -> int:
        return self.options.num_workers - self.options.use_local

    def cancel_extra_requests(self) -> None:
        """Remove unneeded requests before the autoscaler starts nodes for them."""
        taken = list(self._slots.values())
        if self._reservation is not None:
            extra = self._reservation.slots[self._num_remote :]  # the newest requests
            self._reservation.drop_pending([slot for slot in extra if slot not in taken])

    def slot_of(self, worker: WorkerHandle) -> AnySlot | None:
        return self._slots.get(worker)

    def describe_demand(self) -> str:
        """Describe the resources that a worker needs and that the cluster has."""
        from raysgd.cluster import reservation

        return reservation.describe_demand(self.options.bundle)

    def discard(self, *workers: WorkerHandle) -> None:
        """Stop workers and free their slots."""
        for worker in workers:
            if not worker.is_remote:
                worker.submit_control(Worker.interrupt)
                self.clock.wait([worker.submit_work(Worker.teardown)], _TEARDOWN_S)
            worker.kill()
            if (slot := self._slots.pop(worker, None)) is not None:
                slot.last_node_id = worker.location.node_id or None
            if worker in self.members:
                self.members.remove(worker)

    def sort_by_node(self, members: Sequence[WorkerHandle]) -> list[WorkerHandle]:
        """Return the workers grouped by node. Within a node, keep their order."""
        nodes = list(dict.fromkeys(member.location.node_id for member in members))
        return sorted(members, key=lambda member: nodes.index(member.location.node_id))

    def shutdown(self, force: bool = False, patience_s: float = _TEARDOWN_S) -> None:
        """Stop all workers, and release their resources.

        Unless `force`, processes have `patience_s` for teardown, and another `patience_s` to exit.
        """
        self._is_wanted = False
        self.notices.stop()
        with self._shutdown_lock:  # another thread may be ending the group
            self._shutdown(force, patience_s)

    def _shutdown(self, force: bool, patience_s: float) -> None:
        everyone = list(dict.fromkeys([*self.members, *self._slots]))
        exiting: dict[WorkerHandle, Future[bool]] = {}
        try:
            pending = []
            for member in self.members:
                if not member.is_remote:  # the driver's process continues to run and must be clean
                    member.submit_control(Worker.interrupt)
                if not member.is_remote or (member.can_be_called and not force):
                    pending.append(member.submit_work(Worker.teardown))
            if self.clock.wait(pending, patience_s) or force:
                return  # at least one member hangs
            for member in self.members:
                if member.is_remote and member.can_be_called:
                    with contextlib.suppress(Exception):  # the process may be gone already
                        exiting[member] = member.exit_process(patience_s)
            self.clock.wait(list(exiting.values()), patience_s)
        finally:  # also if Ctrl-C ends the wait
            self.members.clear()
            self._slots.clear()
            for member in everyone:
                future = exiting.get(member)
                if future and not (future.done() and not future.exception() and future.result()):
                    member.kill_process()  # Ray considers the worker dead already
                else:
                    member.kill()
            reservation, self._reservation, self._local_slot = self._reservation, None, None
            if self._monitor is not None:
                self._monitor.close()
            if reservation is not None:
                reservation.release()


class LocalSlot:
    """The slot of the worker in the driver's process."""

    is_ready = True
    last_node_id: str | None = None


@functools.cache
def _actor_class() -> Any:
    import ray

    # Ray Client does not support concurrency groups per call.
    for name, method in inspect.getmembers(Worker, inspect.isfunction):
        if not name.startswith("_"):
            ray.method(concurrency_group="work" if name in WORK_METHODS else "control")(method)
    remote: Any = ray.remote  # the type stubs lack concurrency_groups
    return remote(concurrency_groups={"work": 1, "control": _CONTROL_THREADS})(Worker)
