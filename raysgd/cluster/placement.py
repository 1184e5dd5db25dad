"""Resources for workers in the cluster: placement groups, and what to say when there are none."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from raysgd.cluster.group_options import WAIT_LONGER
from raysgd.cluster.group_sizes import start_sizes, workers_that_fit
from raysgd.cluster.worker import is_worker_process
from raysgd.errors import InsufficientResourcesError

__all__ = [
    "Reservation",
    "Slot",
    "connect",
    "demand",
    "free_cpus",
    "gpus_in_cluster",
    "nodes",
    "overview",
    "reserve",
]

logger = logging.getLogger(__name__)

_SETTLE_S = 1.0
"""How long any request stays: what Ray knows to be free lags behind. And one that is taken back in
the moment in which Ray serves it can cost its resources for good (seen with Ray 2.60): its group is
gone, and what it held is never free again."""
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
    last = _last_cluster()
    try:
        _probe(last if given is None else given)
    except OSError as error:
        if given is not None:
            raise ConnectionError(
                f"RAY_ADDRESS={given!r}: no Ray cluster answers there ({error}). Start one, unset "
                "RAY_ADDRESS, or set it to 'local' for a Ray of this script's own."
            ) from error
        logger.warning(
            "The cluster that was last started here, at %s, is gone: starting Ray on this machine.",
            last,
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


def free_cpus() -> float:
    """Return how many CPUs of the cluster are free; infinitely many without a cluster."""
    if not ray.is_initialized():
        return math.inf
    return float(ray.available_resources().get("CPU", 0))


def gpus_in_cluster() -> float:
    """Return how many GPUs the cluster has. Ray is asked: the driver may have none."""
    return float(ray.cluster_resources().get("GPU", 0))


def nodes() -> set[str]:
    """Return the ids of the nodes of the cluster."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


class Slot:
    """Room for one worker; a worker that is lost leaves it to its successor.

    Args:
        group: a placement group.
        index: of a bundle in it; -1: any that is free.
        labels: what the labels of its node have to be.
    """

    label_selector: Mapping[str, str] | None = None
    """What a worker's own request says of labels: nothing, as that of the bundle has said it."""

    def __init__(
        self, group: PlacementGroup, index: int, labels: Mapping[str, str] | None = None
    ) -> None:
        self.group = group
        self.labels = dict(labels or {})
        self._index = index
        self.last_node_id: str | None = None
        """Ray's id of the node of the worker that has left it."""

    @property
    def strategy(self) -> PlacementGroupSchedulingStrategy:
        """How to schedule a worker there."""
        return PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=self._index
        )

    @property
    def node_id(self) -> str | None:
        """Ray's id of the node that it is on; None where it is on none, or that is not known."""
        if self._index < 0:
            return self.last_node_id
        table = placement_group_table(self.group)
        # while Ray looks for room in place of a node that was lost, what is on the others stays
        if table.get("state") not in ("CREATED", "RESCHEDULING"):
            return None
        nodes: dict[int, str] = table.get("bundles_to_node_id", {})
        return nodes.get(self._index) or None

    @property
    def is_ready(self) -> bool:
        """Whether the room is there; it goes with a node that is lost, and comes with another."""
        return _is_created(self.group) if self._index < 0 else self.node_id is not None


class OpenSlot:
    """Room that nobody has reserved: a worker there waits for what is free.

    Args:
        bundle: what the worker needs.
        labels: what the labels of its node have to be.
    """

    strategy = "SPREAD"
    last_node_id: str | None = None
    """Ray's id of the node of the worker that has left it."""

    def __init__(self, bundle: Mapping[str, float], labels: Mapping[str, str]) -> None:
        self.labels = self.label_selector = dict(labels)
        self._bundle = bundle

    @property
    def node_id(self) -> str | None:
        """Ray's id of the node of the worker that has left it; it may be another the next time."""
        return self.last_node_id

    @property
    def is_ready(self) -> bool:
        """Whether a node has so much to spare."""
        free = available_resources_per_node()
        return any(
            workers_that_fit(free.get(node["NodeID"], {}), self._bundle)
            for node in ray.nodes()
            if node["Alive"] and _are_as_asked(node["Labels"], self.labels)
        )


def _are_as_asked(labels: Mapping[str, str], asked: Mapping[str, str]) -> bool:
    """Whether labels of a node are those of a selector, in Ray's words: ``!in(a, b)``."""

    def is_one(label: str | None, wanted: str) -> bool:
        name = wanted.removeprefix("!")
        given = name[3:-1].split(",") if name.startswith("in(") else [name]
        return (label in [each.strip() for each in given]) != wanted.startswith("!")

    return all(is_one(labels.get(key), wanted) for key, wanted in asked.items())


class _Owner:
    """Makes the placement groups of an actor or a task, and ends when the process of that has.

    Ray gives a driver's groups up with the driver. Those of an actor or a task it keeps until the
    job ends, unless it is a detached actor that has made them, as this one is.
    """

    def __init__(self, pid: int) -> None:
        threading.Thread(target=self._end_with, args=(pid,), daemon=True).start()

    def request(
        self, bundles: list[dict[str, float]], strategy: str, labels: Any
    ) -> PlacementGroup:
        group: PlacementGroup = placement_group(
            bundles, strategy=strategy, bundle_label_selector=labels
        )
        return group

    def _end_with(self, pid: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait()
        os._exit(0)


def _new_owner() -> Any:
    """Start an `_Owner` on this node; returns None where this process is a driver."""
    context = ray.get_runtime_context()
    if context.worker.mode != ray.WORKER_MODE:
        return None
    here = NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False)
    remote: Any = ray.remote  # its types do not know all that it takes
    owner_cls = remote(num_cpus=0, lifetime="detached", scheduling_strategy=here)(_Owner)
    return owner_cls.remote(os.getpid())


def _end(owner: Any) -> None:
    if owner is not None:
        ray.kill(owner)


def _requested(
    owner: Any,
    bundles: Sequence[Mapping[str, float]],
    strategy: str,
    labels: Sequence[Mapping[str, str]],
) -> PlacementGroup:
    asked = [dict(bundle) for bundle in bundles]
    selectors = [dict(selector) for selector in labels] or None
    group: PlacementGroup
    if owner is None:
        group = placement_group(asked, strategy=strategy, bundle_label_selector=selectors)
    else:
        group = ray.get(owner.request.remote(asked, strategy, selectors))
    return group


class Reservation:
    """Room for workers: placement groups of our own, or the caller's (Tune's)."""

    def __init__(
        self,
        group: PlacementGroup,
        indexes: Iterable[int],
        owned: bool,
        labels: Sequence[Mapping[str, str]] = (),
        owner: Any = None,
    ) -> None:
        self._owned = owned
        self.groups = [group] if owned else []
        """Those of our own."""
        self._labels = labels
        self._owners = [owner]
        self.slots: list[Slot | OpenSlot] = [
            Slot(group, index, labels[place] if labels else None)
            for place, index in enumerate(indexes)
        ]
        self._waiting_since: dict[PlacementGroup, float] = {}
        """Since when Ray has looked for room in place of nodes that were lost."""
        self._blocked: list[Slot] | None = None
        """What is vacant while Ray serves no requests, since it looks for several places at once;
        None while it serves them."""
        self._is_released = False
        _reservations.add(self)

    def request_slot(
        self, bundle: Mapping[str, float], instead_of: Collection[Any] = ()
    ) -> Slot | OpenSlot | None:
        """Request room for one more worker; None where the room is the caller's.

        Args:
            bundle: what it needs.
            instead_of: slots that stay here, and in place of which more are requested.
        """
        if not self._owned:
            return None
        vacant, instead = list(self._labels), [*instead_of, *(self._blocked or ())]
        for labels in [slot.labels for slot in self.slots if slot not in instead]:
            if labels in vacant:
                vacant.remove(labels)
        if self._blocked is not None:
            self.slots.append(OpenSlot(bundle, vacant[0] if vacant else {}))
            return self.slots[-1]
        group = _requested(self._owners[0], [bundle], "SPREAD", vacant[:1])
        self.groups.append(group)
        if self._is_released:  # by another thread meanwhile
            remove_placement_group(group)
            return None
        slot = Slot(group, 0, vacant[0] if vacant else None)
        self.slots.append(slot)
        return slot

    def drop_pending(self, requested: Iterable[Slot | OpenSlot]) -> None:
        """Take back those of some requests for single slots that have not been granted."""
        for slot in requested:
            if isinstance(slot, OpenSlot):
                self.slots.remove(slot)
            elif not slot.is_ready:
                self.slots.remove(slot)
                self.groups.remove(slot.group)
                remove_placement_group(slot.group)

    def drop_lost(self, taken: Collection[Any]) -> int:
        """Take back requests for several places at once of which none is left, nor in use.

        Ray looks again and again for room for all that is lost of these at once, and serves no
        other request meanwhile, not even for a single place. Where others have got some of the room
        that there is, that would never end.

        Args:
            taken: the slots that are in use.

        Returns:
            How many slots are vacant for that reason, since a request that is in use cannot be
            taken back. What is requested from now on goes without a placement group.
        """
        if not self._owned:
            return 0
        in_use, now = {getattr(slot, "group", None) for slot in taken}, time.monotonic()
        sizes = Counter(slot.group for slot in self.slots if isinstance(slot, Slot))
        waiting = [g for g, size in sizes.items() if size > 1 and _num_lost(g) > 1]
        self._waiting_since = {group: self._waiting_since.get(group, now) for group in waiting}
        settled = [g for g in waiting if now - self._waiting_since[g] >= _SETTLE_S]
        for group in [g for g in settled if g not in in_use and _num_lost(g) == sizes[g]]:
            settled.remove(group)
            self.slots = [slot for slot in self.slots if getattr(slot, "group", None) != group]
            self.groups.remove(group)
            remove_placement_group(group)
        self._blocked = None
        if settled:
            pending = [slot for slot in self.slots if isinstance(slot, Slot) and slot not in taken]
            self._blocked = [slot for slot in pending if not slot.is_ready]
        return len(self._blocked or ())

    def include(self, other: Reservation) -> None:
        """Take over the room of another reservation."""
        self.groups += other.groups
        self.slots += other.slots
        self._owners += other._owners

    def release(self, timeout_s: float = 10.0) -> None:
        """Give the room back, and wait until Ray counts it as free."""
        _reservations.discard(self)
        self._is_released = True
        if not ray.is_initialized():
            return
        with contextlib.suppress(Exception):  # a cluster that is gone holds nothing
            for group in self.groups:
                remove_placement_group(group)
            for owner in self._owners:
                _end(owner)
            deadline = time.monotonic() + timeout_s
            while time.monotonic() < deadline and not all(map(_is_free, self.groups)):
                time.sleep(_POLL_S)


_reservations: weakref.WeakSet[Reservation] = weakref.WeakSet()
"""Those of this process that have not been released."""


def _is_created(group: PlacementGroup) -> bool:
    return bool(placement_group_table(group).get("state") == "CREATED")


def _num_lost(group: PlacementGroup) -> int:
    """Return for how many places of a group Ray looks for room anew, for all of them at once."""
    table = placement_group_table(group)
    # what has to be on one node, or each on another, single requests would not keep to
    if table.get("state") != "RESCHEDULING" or table.get("strategy", "").startswith("STRICT_"):
        return 0
    return sum(not node for node in table.get("bundles_to_node_id", {}).values())


def _is_free(group: PlacementGroup) -> bool:
    state = placement_group_table(group).get("state", "REMOVED")
    # while a group holds resources, the cluster shows them under names that end in its id
    held = group.id.hex()
    return state == "REMOVED" and not any(name.endswith(held) for name in ray.available_resources())


def reserve(
    bundle: Mapping[str, float],
    *,
    num_workers: int,
    min_workers: int,
    timeout_s: float,
    strategy: str = "SPREAD",
    label_selectors: Sequence[Mapping[str, str]] = (),
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
        timeout_s: how long to wait for room for these. There is no wait where the cluster is this
            process's own, and too small.
        strategy: how Ray shall place them, such as "SPREAD" or "PACK".
        label_selectors: what the labels of each worker's node have to be; empty for whatever.
        is_wanted: whether to go on waiting.

    Raises:
        RuntimeError: if it is not wanted any more.
        InsufficientResourcesError: if there is no room for `min_workers` within `timeout_s`.
    """
    current = get_current_placement_group()
    if current is not None and not is_worker_process():
        return _reserve_within(current, bundle, num_workers, min_workers)
    deadline = time.monotonic() + timeout_s
    capacity = workers_that_fit(ray.cluster_resources(), bundle)
    free = workers_that_fit(ray.available_resources(), bundle)
    if capacity < min_workers and _is_own_cluster():
        raise _no_room("", bundle, min_workers, num_workers)
    owner = _new_owner()
    try:
        for size in start_sizes(num_workers, min_workers, capacity, free):
            # the last one is the least that will do
            left = deadline - time.monotonic() if size == min_workers else 0.0
            wait_s = max(left, _SETTLE_S)
            labels = label_selectors[:size]
            group = _granted(owner, [bundle] * size, strategy, wait_s, is_wanted, labels)
            if group is not None:
                room = Reservation(
                    group, range(size), owned=True, labels=label_selectors, owner=owner
                )
                return _topped_up(room, bundle, num_workers, strategy)
        raise _no_room(
            f"within {timeout_s:g} s ", bundle, min_workers, num_workers, label_selectors
        )
    except BaseException:
        _end(owner)
        raise


def _topped_up(
    reservation: Reservation, bundle: Mapping[str, float], num_workers: int, strategy: str
) -> Reservation:
    """Request room for the workers that are missing, and give what is free a moment to come.

    How many fit was counted as if all resources were on one node. What has to be on one node, or
    each on another, is left as it is: single slots would be anywhere.
    """
    size = len(reservation.slots)
    if size == num_workers:
        return reservation
    try:
        requested: list[Slot | OpenSlot] = []
        if not strategy.startswith("STRICT_"):
            free = workers_that_fit(ray.available_resources(), bundle)
            slots = [reservation.request_slot(bundle) for _ in range(min(num_workers - size, free))]
            requested += [slot for slot in slots if slot is not None]
        deadline = time.monotonic() + _SETTLE_S
        while time.monotonic() < deadline and not all(slot.is_ready for slot in requested):
            time.sleep(_POLL_S)
        reservation.drop_pending(requested)
        num_ready = len(reservation.slots)
        if num_ready < num_workers:
            logger.warning(
                "Starting with %d of %d workers, each with %s: the cluster has %s, and no room "
                "for more now.",
                num_ready,
                num_workers,
                _described(bundle),
                _described(ray.cluster_resources(), bundle),
            )
    except BaseException:  # Ctrl-C, most likely
        reservation.release()
        raise
    return reservation


def _is_own_cluster() -> bool:
    """Whether this process has started the cluster, which then gets no further nodes."""
    with contextlib.suppress(psutil.NoSuchProcess):  # one that ends just now
        return any(child.name() == "gcs_server" for child in psutil.Process().children())
    return False


def _granted(
    owner: Any,
    bundles: Sequence[Mapping[str, float]],
    strategy: str,
    timeout_s: float,
    is_wanted: Callable[[], bool],
    labels: Sequence[Mapping[str, str]],
) -> PlacementGroup | None:
    """Request room and wait for it; returns None where it does not come in time.

    The request is taken back then, and also where the wait ends by an exception, such as Ctrl-C.
    """
    group = _requested(owner, bundles, strategy, labels)
    is_granted = False
    try:
        started = mentioned = time.monotonic()
        # its own wait() knows whole seconds alone
        while not (is_granted := _is_created(group)):
            now = time.monotonic()
            if not is_wanted():
                raise RuntimeError("The workers are shut down.")
            if now - started >= timeout_s:
                return None
            if now - mentioned >= (_SETTLE_S if mentioned == started else _LOG_EVERY_S):
                mentioned = now
                left = timeout_s - (now - started)
                what = " ".join([demand(bundles[0], len(bundles)), *_advice()])
                logger.warning("Waiting up to %.0f s for %s", left, what)
            time.sleep(_POLL_S)
        return group
    finally:
        if not is_granted:
            remove_placement_group(group)


def _advice() -> list[str]:
    """Say what holds resources that the caller has some say in."""
    advice = []
    groups = [group for kept in list(_reservations) for group in kept.groups if _is_created(group)]
    held = _sum(bundle for group in groups for bundle in group.bundle_specs)
    if held:
        advice.append(
            f"Trainers that were made before and are not shut down hold {_described(held)}: call "
            "their shutdown(), or make them in a with block."
        )
    if is_worker_process():
        advice.append(
            "The workers on one of which this trainer is made keep their resources meanwhile: "
            "leave room beside them."
        )
    return advice


def _no_room(
    when: str,
    bundle: Mapping[str, float],
    min_workers: int,
    num_workers: int,
    labels: Sequence[Mapping[str, str]] = (),
) -> InsufficientResourcesError:
    total = ray.cluster_resources()
    said = [f"No room {when}for {demand(bundle, min_workers)}"]
    if min_workers < num_workers:
        said.append(f"This is the least to start with, of up to {_plural(num_workers)}.")
    if labels:
        told = "; ".join(dict.fromkeys(str(dict(selector)) for selector in labels))
        said.append(f"Of the nodes only those count whose labels are {told} (label_selector).")
    if when:
        said += _advice()
    said.append(
        "Use fewer workers or less for each (num_workers, num_cpus_per_worker, use_gpu, "
        "resources_per_worker), or add nodes."
    )
    if when:
        said.append(WAIT_LONGER)
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
    held = ray.get_runtime_context().worker.core_worker.resource_ids()
    left = _left_beside(group.bundle_specs, held)
    num_beside = sum(workers_that_fit(each, bundle) for each in left)
    if num_beside < min_workers:
        raise InsufficientResourcesError(
            f"No room for {_plural(min_workers)} with {_described(bundle)} each in the placement "
            f"group that this trainer runs in: its bundles hold {num_beside} beside the caller. "
            "Give it a bundle for each worker.",
            requested=bundle,
            total=_sum(group.bundle_specs),
            available=_sum(left),
        )
    if num_beside < num_workers:
        logger.warning(
            "Starting with %d of %d workers, each with %s: there is no room for more in the "
            "placement group that this trainer runs in.",
            num_beside,
            num_workers,
            _described(bundle),
        )
    # Ray knows which bundles are free
    return Reservation(group, [-1] * min(num_beside, num_workers), owned=False)


def _left_beside(
    bundles: Iterable[Mapping[str, float]], held: Mapping[str, Sequence[tuple[int, float]]]
) -> list[dict[str, float]]:
    """Return what a process leaves of the bundles of its placement group.

    Ray's names of what it holds, ``CPU_group_2_ID``, say of which bundle that is. A process that
    asked for no certain bundle may have CPUs of one and GPUs of another; what is called ``bundle``
    may be of a third, and says nothing.
    """
    left = [dict(bundle) for bundle in bundles]
    for name, parts in held.items():
        match = re.fullmatch(r"(?!bundle_)(.+)_group_(\d+)_[0-9a-f]+", name)
        if match is not None:
            left[int(match[2])][match[1]] -= sum(amount for _, amount in parts)
    return left


def _sum(bundles: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0) + amount
    return total


def demand(bundle: Mapping[str, float], size: int = 1) -> str:
    """Say what workers need and what is free, for messages."""
    return (
        f"{_plural(size)} with {_described(bundle)} each: the cluster has "
        f"{_described(ray.cluster_resources(), bundle)}, of which "
        f"{_described(ray.available_resources(), bundle)} are free."
    )


def _plural(num_workers: int) -> str:
    return f"{num_workers} worker{'s' * (num_workers > 1)}"


def _described(resources: Mapping[str, float], names: Mapping[str, float] | None = None) -> str:
    shown = resources if names is None else {name: resources.get(name, 0) for name in names}
    return ", ".join(f"{amount:g} {name}" for name, amount in shown.items()) or "nothing"
