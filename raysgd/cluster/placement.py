"""Room for workers in the cluster: placement groups, and what to say when there is none."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raysgd.cluster.worker import group_size_here
from raysgd.elastic.policies import start_sizes, workers_that_fit
from raysgd.errors import InsufficientResourcesError

__all__ = [
    "Queue",
    "Reservation",
    "Slot",
    "connect",
    "free_resources",
    "gpus_in_cluster",
    "reserve",
]

logger = logging.getLogger(__name__)

_SETTLE_S = 1.0
"""How long a group that should fit may take: what Ray knows to be free lags behind."""
_LOG_EVERY_S = 10.0
_POLL_S = 0.02
_PROBE_S = 5.0


def connect() -> None:
    """Connect to Ray, starting it on this machine where there is none.

    Raises:
        ConnectionError: if ``RAY_ADDRESS`` names a cluster that does not answer.
    """
    if ray.is_initialized():
        return
    # as ray.init() looks for one; of its own it would try for minutes where one has gone
    given = os.environ.get("RAY_ADDRESS")
    try:
        _probe(given if given is not None else _last_cluster())
    except OSError as error:
        if given is not None:
            raise ConnectionError(
                f"RAY_ADDRESS={given!r}: no Ray cluster answers there ({error}). Start one, unset "
                "RAY_ADDRESS, or set it to 'local' for a Ray of this script's own."
            ) from error
        logger.warning(
            "The cluster that was last started here, at %s, is gone: starting Ray on this machine.",
            _last_cluster(),
        )
        ray.init("local")
        return
    ray.init()


def _last_cluster() -> str:
    """Return the address that ``ray start`` left on this machine; empty if there is none."""
    folder = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray"
    with contextlib.suppress(OSError):
        return (folder / "ray_current_cluster").read_text().strip()
    return ""


def _probe(address: str) -> None:
    """Raise OSError if `address` has a port and nobody listens there."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    if host and port.isdecimal():
        with socket.create_connection((host, int(port)), timeout=_PROBE_S):
            pass


def overview(address: str) -> dict[str, tuple[float, float]]:
    """Return how much a cluster has of each resource, and how much of that is free.

    Raises:
        OSError: if there is none at `address`.
    """
    _probe(address)  # Ray itself would try for minutes
    ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        total, free = ray.cluster_resources(), ray.available_resources()
        return {
            name: (total[name], free.get(name, 0.0))
            for name in sorted(total)
            if not name.startswith("node:")
        }
    finally:
        ray.shutdown()


def gpus_in_cluster() -> float:
    """Return how many GPUs the cluster has. Ray is asked: the driver may have none."""
    return float(ray.cluster_resources().get("GPU", 0))


class Slot:
    """Room for one worker; a worker that is lost leaves it to its successor."""

    def __init__(self, group: PlacementGroup, index: int) -> None:
        self._group = group
        self._index = index

    @property
    def strategy(self) -> PlacementGroupSchedulingStrategy:
        """How to schedule a worker there."""
        return PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=self._index
        )

    @property
    def node_id(self) -> str | None:
        """Ray's id of the node that it is on; None where that is not one node, or not known."""
        if self._index < 0:
            return None
        nodes: dict[int, str] = placement_group_table(self._group).get("bundles_to_node_id", {})
        return nodes.get(self._index)

    @property
    def is_ready(self) -> bool:
        """Whether the room is there; it goes with a node that is lost, and comes with another."""
        if self._index < 0:
            return _is_created(self._group)
        # while Ray looks for room in place of a node that was lost, what is on the others stays
        table = placement_group_table(self._group)
        nodes: dict[int, str] = table.get("bundles_to_node_id", {})
        return table.get("state") in ("CREATED", "RESCHEDULING") and bool(nodes.get(self._index))


class Reservation:
    """Room for workers: placement groups of our own, or the caller's (Tune's)."""

    def __init__(self, group: PlacementGroup, indexes: Iterable[int], owned: bool) -> None:
        self._owned = [group] if owned else []
        self._is_released = False
        self._thread = threading.get_ident()
        self.slots = [Slot(group, index) for index in indexes]
        _reservations.add(self)

    def held_here(self) -> list[Mapping[str, float]]:
        """Return what it holds if this thread made it, bundle by bundle."""
        if self._thread != threading.get_ident():
            return []
        return [bundle for g in self._owned if _is_created(g) for bundle in g.bundle_specs]

    def request_slot(self, bundle: Mapping[str, float]) -> Slot | None:
        """Request room for one more worker; None where the room is the caller's."""
        if not self._owned:
            return None
        group = _request(bundle, 1)
        self._owned.append(group)
        if self._is_released:  # by another thread meanwhile
            remove_placement_group(group)
            return None
        slot = Slot(group, 0)
        self.slots.append(slot)
        return slot

    def include(self, other: Reservation) -> None:
        """Take over the room of another reservation."""
        self._owned += other._owned
        self.slots += other.slots

    def release(self, timeout_s: float = 10.0) -> None:
        """Give the room back, and wait until Ray counts it as free."""
        _reservations.discard(self)
        self._is_released = True
        if not ray.is_initialized():
            return
        with contextlib.suppress(Exception):  # a cluster that is gone holds nothing
            for group in self._owned:
                remove_placement_group(group)
            deadline = time.monotonic() + timeout_s
            while time.monotonic() < deadline and not all(map(_is_free, self._owned)):
                time.sleep(0.02)


_reservations: weakref.WeakSet[Reservation] = weakref.WeakSet()
"""Those of this process that have not been released."""


def _is_free(group: PlacementGroup) -> bool:
    state = placement_group_table(group).get("state", "REMOVED")
    # while a group holds resources, the cluster shows them under names that end in its id
    held = group.id.hex()
    return state == "REMOVED" and not any(name.endswith(held) for name in ray.available_resources())


class Queue:
    """Keeps a request for room that came to nothing in its place, for the next try.

    Autoscalers add nodes for a request that stays. And one that is taken back in the moment in
    which Ray serves it can cost its resources for good (seen with Ray 2.60): its group is gone, and
    what it held is never free again.
    """

    def __init__(self) -> None:
        self._group: PlacementGroup | None = None

    def take(self, bundle: Mapping[str, float], size: int, strategy: str) -> PlacementGroup:
        """Return a request for room of this kind, the one that waits here if it is for that."""
        group, self._group = self._group, None
        if group is not None and group.bundle_specs == [dict(bundle)] * size:
            return group
        if group is not None:
            remove_placement_group(group)
        return _request(bundle, size, strategy)

    def leave(self, group: PlacementGroup) -> None:
        """Let a request wait here."""
        self._group = group

    def __bool__(self) -> bool:
        """Whether a request waits here."""
        return self._group is not None

    def clear(self) -> None:
        """Take the request back that waits here."""
        group, self._group = self._group, None
        if group is not None and ray.is_initialized():
            remove_placement_group(group)


def reserve(
    bundle: Mapping[str, float],
    *,
    num_workers: int,
    min_workers: int,
    timeout_s: float,
    strategy: str = "SPREAD",
    queue: Queue | None = None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> Reservation:
    """Reserve room for as many workers as fit, from `min_workers` up to `num_workers`.

    Inside of a placement group, as Tune makes one a trial, that one's room is used: as many
    workers as its bundles hold beside the caller. Not so on a worker of ours, since the others of
    its group are in those bundles: it reserves room besides.

    Args:
        bundle: what one worker needs.
        num_workers: the most workers.
        min_workers: the fewest.
        timeout_s: how long to wait for room for these.
        strategy: how Ray shall place them, such as "SPREAD" or "PACK".
        queue: where a request for `min_workers` that came to nothing waits for the next try, and
            is found by it. Without one it is taken back.
        is_wanted: whether to go on waiting.

    Raises:
        RuntimeError: if it is not wanted any more.
        InsufficientResourcesError: if there is no room for `min_workers` within `timeout_s`.
    """
    current = get_current_placement_group()
    if current is not None and not group_size_here():
        return _reserve_within(current, bundle, num_workers, min_workers)
    deadline = time.monotonic() + timeout_s
    _check_possible(bundle, min_workers, num_workers)
    sizes = start_sizes(
        num_workers,
        min_workers,
        capacity=workers_that_fit(ray.cluster_resources(), bundle),
        free=workers_that_fit(ray.available_resources(), bundle),
    )
    waiting = Queue() if queue is None else queue
    for size in () if waiting else sizes:
        group = _request(bundle, size, strategy)
        if _granted(group, min(_SETTLE_S, timeout_s), is_wanted):
            if size < num_workers:
                logger.warning(
                    "Starting with %d of %d workers, each with %s: the cluster has %s, and no room "
                    "for more now.",
                    size,
                    num_workers,
                    _described(bundle),
                    _described(ray.cluster_resources(), bundle),
                )
            return Reservation(group, range(size), owned=True)
        if size == min_workers:
            waiting.leave(group)
        else:
            remove_placement_group(group)
    group = waiting.take(bundle, min_workers, strategy)
    if _granted(group, deadline - time.monotonic(), is_wanted, log=True):
        reservation = Reservation(group, range(min_workers), owned=True)
        try:
            for more in _granted_now(bundle, num_workers - min_workers, strategy):
                reservation.include(Reservation(more, [0], owned=True))
        except BaseException:  # Ctrl-C, most likely
            reservation.release()
            raise
        return reservation
    waiting.leave(group)
    if queue is None:
        waiting.clear()
    raise _no_room(f"within {timeout_s:g} s ", bundle, min_workers, num_workers)


def _check_possible(bundle: Mapping[str, float], min_workers: int, num_workers: int) -> None:
    """Raise where waiting for room is in vain: nothing that may end in the meantime holds it.

    A cluster that this process started has the nodes that it has. What trainers of this thread
    hold stays theirs while it waits here, and so does what the workers around it hold.
    """
    node = getattr(ray._private.worker, "_global_node", None)
    if not group_size_here() and (node is None or not node.is_head()):
        return
    total, held = ray.cluster_resources(), _sum([_held_here(), _held_around()])
    left = {name: amount - held.get(name, 0) for name, amount in total.items()}
    if workers_that_fit(left, bundle) < min_workers:
        raise _no_room("", bundle, min_workers, num_workers)


def _held_around() -> dict[str, float]:
    """Return what the group holds that this process is a worker of; nothing where it is none."""
    size, group = group_size_here(), get_current_placement_group()
    if not size or group is None:
        return {}
    # its workers may be in several placement groups, of which this one is known here
    own = group.bundle_specs[_own_bundle() or 0]
    inside = _sum(group.bundle_specs)
    return {name: max(amount, size * own.get(name, 0)) for name, amount in inside.items()}


def _held_here() -> dict[str, float]:
    """Return what trainers that this thread made, and has not shut down, hold."""
    return _sum(bundle for kept in list(_reservations) for bundle in kept.held_here())


def _no_room(
    when: str, bundle: Mapping[str, float], min_workers: int, num_workers: int
) -> InsufficientResourcesError:
    total, held = ray.cluster_resources(), _held_here()
    said = [f"No room {when}for {_demand(bundle, min_workers)}"]
    if min_workers < num_workers:
        said.append(f"This is the least to start with, of up to {_plural(num_workers)}.")
    if held and workers_that_fit(total, bundle) >= min_workers:
        said.append(
            f"Trainers that were made before and are not shut down hold {_described(held)}: call "
            "their shutdown(), or make them in a with block."
        )
    if around := _held_around():
        said.append(
            f"The workers on one of which this trainer is made hold {_described(around)}, and "
            "keep them meanwhile: leave room beside them."
        )
    said.append(
        "Use fewer workers or less for each (num_workers, num_cpus_per_worker, use_gpu, "
        "resources_per_worker), or add nodes."
    )
    if when:
        said.append(
            "Or wait longer: SGD_PLACEMENT_GROUP_TIMEOUT_S; with raysgd.train "
            "TRAIN_PLACEMENT_GROUP_TIMEOUT_S."
        )
    return InsufficientResourcesError(
        " ".join(said),
        requested=bundle,
        total=total,
        available=ray.available_resources(),
    )


def _reserve_within(
    group: PlacementGroup, bundle: Mapping[str, float], num_workers: int, min_workers: int
) -> Reservation:
    """Take room in the placement group that the caller runs in, which never gets more."""
    own = _own_bundle()
    if own is None:  # anywhere in the group, as Ray sees fit
        return Reservation(group, [-1] * num_workers, owned=False)
    holds = [dict(held) for held in group.bundle_specs]
    for name, taken in ray.get_runtime_context().get_assigned_resources().items():
        holds[own][name] = holds[own].get(name, 0) - taken
    indexes = [
        index for index, held in enumerate(holds) for _ in range(workers_that_fit(held, bundle))
    ]
    if len(indexes) < min_workers:
        raise InsufficientResourcesError(
            f"No room for {_plural(min_workers)} with {_described(bundle)} each in the placement "
            f"group that this trainer runs in: its bundles hold {len(indexes)} beside the caller. "
            "Give it a bundle for each worker.",
            requested=bundle,
            total=_sum(group.bundle_specs),
            available=_sum(holds),
        )
    if len(indexes) < num_workers:
        logger.warning(
            "Starting with %d of %d workers, each with %s: there is no room for more in the "
            "placement group that this trainer runs in.",
            len(indexes),
            num_workers,
            _described(bundle),
        )
    return Reservation(group, indexes[:num_workers], owned=False)


def _own_bundle() -> int | None:
    """Return the index of the bundle that this process has been given, if it is a certain one."""
    # get_assigned_resources() reads the same, and leaves the index out
    held = ray.get_runtime_context().worker.core_worker.resource_ids()
    for name in held:
        if found := re.search(r"_group_(\d+)_[0-9a-f]+$", name):
            return int(found[1])
    return None


def _sum(bundles: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0) + amount
    return total


def _request(bundle: Mapping[str, float], size: int, strategy: str = "SPREAD") -> PlacementGroup:
    group: PlacementGroup = placement_group([dict(bundle)] * size, strategy=strategy)
    return group


def _granted(
    group: PlacementGroup,
    timeout_s: float,
    is_wanted: Callable[[], bool] = lambda: True,
    log: bool = False,
) -> bool:
    """Wait until there is the room that was requested, and return whether it came in time.

    The request is taken back if the wait ends by an exception, such as Ctrl-C.
    """
    started = mentioned = time.monotonic()
    try:
        # its own wait() knows whole seconds alone
        while not _is_created(group):
            now = time.monotonic()
            if not is_wanted():
                raise RuntimeError("The workers are shut down.")
            if now - started >= timeout_s:
                return False
            if log and (mentioned == started or now - mentioned >= _LOG_EVERY_S):
                mentioned = now
                left = timeout_s - (now - started)
                demand = _demand(group.bundle_specs[0], group.bundle_count)
                logger.warning("Waiting up to %.0f s for %s", left, demand)
            time.sleep(_POLL_S)
    except BaseException:
        remove_placement_group(group)
        raise
    return True


def _granted_now(bundle: Mapping[str, float], most: int, strategy: str) -> list[PlacementGroup]:
    """Return room for further workers, of which each is a group by itself, as far as there is."""
    free = workers_that_fit(ray.available_resources(), bundle)
    groups = [_request(bundle, 1, strategy) for _ in range(min(most, free))]
    deadline = time.monotonic() + _SETTLE_S
    granted: list[PlacementGroup] = []
    try:
        granted = [g for g in groups if _granted(g, max(0.0, deadline - time.monotonic()))]
    finally:
        for group in groups:
            if group not in granted:
                remove_placement_group(group)
    return granted


def _is_created(group: PlacementGroup) -> bool:
    state: str = placement_group_table(group).get("state", "REMOVED")
    return state == "CREATED"


def _demand(bundle: Mapping[str, float], size: int) -> str:
    return (
        f"{_plural(size)} with {_described(bundle)} each: the cluster has "
        f"{_described(ray.cluster_resources(), bundle)}, of which "
        f"{_described(ray.available_resources(), bundle)} are free."
    )


def _plural(num_workers: int) -> str:
    return f"{num_workers} worker{'s' * (num_workers > 1)}"


def free_resources(bundle: Mapping[str, float]) -> str:
    """Say what a worker needs and what is free, for messages."""
    return _demand(bundle, 1)


def _described(resources: Mapping[str, float], names: Mapping[str, float] | None = None) -> str:
    """Return resources as text; with `names`, those of them alone."""
    shown: Mapping[str, Any] = (
        resources if names is None else {name: resources.get(name, 0) for name in names}
    )
    return ", ".join(f"{amount:g} {name}" for name, amount in shown.items()) or "nothing"
