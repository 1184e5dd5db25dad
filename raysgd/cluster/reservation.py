"""Room that a group of workers has reserved in the cluster, as slots for one worker each."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import psutil
import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from raysgd.cluster.group_sizes import workers_that_fit

__all__ = [
    "POLL_S",
    "SETTLE_S",
    "OpenSlot",
    "Reservation",
    "Slot",
    "end_owner",
    "is_created",
    "new_owner",
    "request_group",
    "unreleased",
]

SETTLE_S = 1.0
"""Least seconds that a request stays. The free resources that Ray reports lag behind. And Ray 2.60
can lose resources for good if a request is removed in the moment in which Ray grants it."""
POLL_S = 0.02


class Slot:
    """Room for one worker, and for its successor if it is lost.

    Args:
        group: a placement group.
        index: of a bundle in it; -1: any that is free.
        labels: label selector of its node.
    """

    label_selector: Mapping[str, str] | None = None
    """Label selector of the worker's own request: none, because the bundle has one."""

    def __init__(
        self, group: PlacementGroup, index: int, labels: Mapping[str, str] | None = None
    ) -> None:
        self.group = group
        self.labels = dict(labels or {})
        self._index = index
        self.last_node_id: str | None = None
        """Node of the worker that left it."""

    @property
    def strategy(self) -> PlacementGroupSchedulingStrategy:
        """How to schedule a worker there."""
        return PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=self._index
        )

    @property
    def node_id(self) -> str | None:
        """Its node; None if it has none, or Ray does not report it."""
        if self._index < 0:
            return self.last_node_id
        table = placement_group_table(self.group)
        # while Ray replaces the bundles of a lost node, the others stay
        if table.get("state") not in ("CREATED", "RESCHEDULING"):
            return None
        nodes: dict[int, str] = table.get("bundles_to_node_id", {})
        return nodes.get(self._index) or None

    @property
    def is_ready(self) -> bool:
        """Whether it has a node. It loses a node that is lost, and may get another."""
        return is_created(self.group) if self._index < 0 else self.node_id is not None


class OpenSlot:
    """Room without a reservation: a worker there waits for free resources.

    Args:
        bundle: resources that the worker needs.
        labels: label selector of its node.
    """

    strategy = "SPREAD"
    last_node_id: str | None = None

    def __init__(self, bundle: Mapping[str, float], labels: Mapping[str, str]) -> None:
        self.labels = self.label_selector = dict(labels)
        self._bundle = bundle

    @property
    def node_id(self) -> str | None:
        """Node of the worker that left it. The next one may be on another node."""
        return self.last_node_id

    @property
    def is_ready(self) -> bool:
        """Whether a node has these resources free."""
        free = available_resources_per_node()
        return any(
            workers_that_fit(free.get(node["NodeID"], {}), self._bundle)
            for node in ray.nodes()
            if node["Alive"] and _match(node["Labels"], self.labels)
        )


def _match(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Return whether labels of a node match a selector, in Ray's syntax: ``!in(a, b)``."""

    def is_one(label: str | None, wanted: str) -> bool:
        name = wanted.removeprefix("!")
        given = name[3:-1].split(",") if name.startswith("in(") else [name]
        return (label in [each.strip() for each in given]) != wanted.startswith("!")

    return all(is_one(labels.get(key), wanted) for key, wanted in selector.items())


# ---- placement groups


class _Owner:
    """A detached actor that makes the placement groups of another actor or task, and ends with it.

    Ray releases the groups of a driver and of a detached actor when it ends. It keeps those of
    other actors and of tasks until the job ends.
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


def new_owner() -> Any:
    """Start an `_Owner` on this node; return None if this process is a driver."""
    context = ray.get_runtime_context()
    if context.worker.mode != ray.WORKER_MODE:
        return None
    here = NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False)
    remote: Any = ray.remote  # its types lack these options
    owner_cls = remote(num_cpus=0, lifetime="detached", scheduling_strategy=here)(_Owner)
    return owner_cls.remote(os.getpid())


def end_owner(owner: Any) -> None:
    """End what `new_owner` returned."""
    if owner is not None:
        ray.kill(owner)


def request_group(
    owner: Any,
    bundles: Sequence[Mapping[str, float]],
    strategy: str,
    labels: Sequence[Mapping[str, str]],
) -> PlacementGroup:
    """Request a placement group, by an owner if there is one; does not wait for it."""
    asked = [dict(bundle) for bundle in bundles]
    selectors = [dict(selector) for selector in labels] or None
    group: PlacementGroup
    if owner is None:
        group = placement_group(asked, strategy=strategy, bundle_label_selector=selectors)
    else:
        group = ray.get(owner.request.remote(asked, strategy, selectors))
    return group


def is_created(group: PlacementGroup) -> bool:
    """Return whether a placement group holds its resources."""
    return bool(placement_group_table(group).get("state") == "CREATED")


def _num_lost(group: PlacementGroup) -> int:
    """Return how many bundles of a group Ray tries to place again, all at the same time."""
    table = placement_group_table(group)
    # single requests cannot replace bundles that must share a node, or must not
    if table.get("state") != "RESCHEDULING" or table.get("strategy", "").startswith("STRICT_"):
        return 0
    return sum(not node for node in table.get("bundles_to_node_id", {}).values())


def _is_free(group: PlacementGroup) -> bool:
    state = placement_group_table(group).get("state", "REMOVED")
    # while a group holds resources, the cluster shows them under names that end in its id
    held = group.id.hex()
    return state == "REMOVED" and not any(name.endswith(held) for name in ray.available_resources())


# ---- reservations


class Reservation:
    """Room for workers: placement groups of our own, or the caller's group, as in a Tune trial."""

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
        """Placement groups of our own."""
        self._labels = labels
        self._owners = [owner]
        self.slots: list[Slot | OpenSlot] = [
            Slot(group, index, labels[place] if labels else None)
            for place, index in enumerate(indexes)
        ]
        self._waiting_since: dict[PlacementGroup, float] = {}
        """When Ray began to place several lost bundles of a group again."""
        self._blocked: list[Slot] | None = None
        """Vacant slots while Ray serves no requests, because it places several lost bundles; None
        while Ray serves them."""
        self._is_released = False
        unreleased.add(self)

    def request_slot(
        self, bundle: Mapping[str, float], instead_of: Collection[Any] = ()
    ) -> Slot | OpenSlot | None:
        """Request room for one more worker; return None if the room is the caller's.

        Args:
            bundle: resources that the worker needs.
            instead_of: slots that stay, and whose label selectors the new one may have.
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
        group = request_group(self._owners[0], [bundle], "SPREAD", vacant[:1])
        self.groups.append(group)
        if self._is_released:  # by another thread meanwhile
            remove_placement_group(group)
            return None
        slot = Slot(group, 0, vacant[0] if vacant else None)
        self.slots.append(slot)
        return slot

    def drop_pending(self, requested: Iterable[Slot | OpenSlot]) -> None:
        """Remove those requests for single slots that Ray has not granted."""
        for slot in requested:
            if isinstance(slot, OpenSlot):
                self.slots.remove(slot)
            elif not slot.is_ready:
                self.slots.remove(slot)
                self.groups.remove(slot.group)
                remove_placement_group(slot.group)

    def drop_lost(self, taken: Collection[Any]) -> int:
        """Remove requests for several places if all of these are lost and none is in use.

        Ray places several lost bundles of a group together, and serves no other request
        meanwhile. If others have taken some of the room, that never ends.

        Args:
            taken: the slots that are in use.

        Returns:
            How many slots are vacant for that reason, because a group in use cannot be removed.
            Further requests then use no placement group.
        """
        if not self._owned:
            return 0
        in_use, now = {getattr(slot, "group", None) for slot in taken}, time.monotonic()
        sizes = Counter(slot.group for slot in self.slots if isinstance(slot, Slot))
        waiting = [g for g, size in sizes.items() if size > 1 and _num_lost(g) > 1]
        self._waiting_since = {group: self._waiting_since.get(group, now) for group in waiting}
        settled = [g for g in waiting if now - self._waiting_since[g] >= SETTLE_S]
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
        """Release the room, and wait until Ray counts it as free."""
        unreleased.discard(self)
        self._is_released = True
        if not ray.is_initialized():
            return
        with contextlib.suppress(Exception):  # a cluster that is gone holds nothing
            for group in self.groups:
                remove_placement_group(group)
            for owner in self._owners:
                end_owner(owner)
            deadline = time.monotonic() + timeout_s
            while time.monotonic() < deadline and not all(map(_is_free, self.groups)):
                time.sleep(POLL_S)


unreleased: weakref.WeakSet[Reservation] = weakref.WeakSet()
"""Reservations of this process that are not released."""
