"""Cluster resources that a group of workers has reserved, as one slot per worker."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

SETTLE_S = 1.0
"""Minimum lifetime of a request, in seconds. Ray 2.60 can lose resources permanently if a request
is removed while Ray grants it."""
POLL_S = 0.02


class Slot:
    """Resources for one worker, and for its replacement if the worker is lost.

    `index` is the index of a bundle of the placement group, or -1 for any free bundle.
    """

    def __init__(self, group: PlacementGroup, index: int) -> None:
        self.group = group
        self._index = index
        self.last_node_id: str | None = None
        """Node of the last worker that left this slot."""

    @property
    def strategy(self) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=self._index
        )

    @property
    def node_id(self) -> str | None:
        """Node of the slot. None if it has no node or Ray does not report it."""
        if self._index < 0:
            return self.last_node_id
        table = placement_group_table(self.group)
        # While Ray replaces the bundles of a lost node, the other bundles stay reserved.
        if table.get("state") not in ("CREATED", "RESCHEDULING"):
            return None
        nodes: dict[int, str] = table.get("bundles_to_node_id", {})
        return nodes.get(self._index) or None

    @property
    def is_ready(self) -> bool:
        """Whether the slot has a node. Ray may assign another node after a node failure."""
        return is_created(self.group) if self._index < 0 else self.node_id is not None


def is_created(group: PlacementGroup) -> bool:
    return bool(placement_group_table(group).get("state") == "CREATED")


def _num_lost(group: PlacementGroup) -> int:
    """Return how many bundles of a group Ray is rescheduling."""
    table = placement_group_table(group)
    # Single requests cannot replace bundles with a strict placement strategy.
    if table.get("state") != "RESCHEDULING" or table.get("strategy", "").startswith("STRICT_"):
        return 0
    return sum(not node for node in table.get("bundles_to_node_id", {}).values())


def _is_free(group: PlacementGroup) -> bool:
    state = placement_group_table(group).get("state", "REMOVED")
    # While a group holds resources, Ray lists them under names that end in the group's ID.
    held = group.id.hex()
    return state == "REMOVED" and not any(name.endswith(held) for name in ray.available_resources())


class Reservation:
    """Resources for workers: own placement groups, or the caller's group, as in a Tune trial."""

    def __init__(self, group: PlacementGroup, indexes: Iterable[int], owned: bool) -> None:
        self._owned = owned
        self.groups = [group] if owned else []
        """Placement groups that raysgd requested."""
        self.slots = [Slot(group, index) for index in indexes]
        self._waiting_since: dict[PlacementGroup, float] = {}
        """Time when Ray began to reschedule several lost bundles of a group."""
        self._is_released = False
        unreleased.add(self)

    def request_slot(self, bundle: Mapping[str, float]) -> Slot | None:
        """Request a slot for one more worker. Return None if the group is the caller's."""
        if not self._owned:
            return None
        group = placement_group([dict(bundle)], "SPREAD")
        self.groups.append(group)
        if self._is_released:  # another thread has just called `release`
            remove_placement_group(group)
            return None
        slot = Slot(group, 0)
        self.slots.append(slot)
        return slot

    def drop_pending(self, requested: Iterable[Slot]) -> None:
        """Remove the pending requests for single slots."""
        for slot in requested:
            if not slot.is_ready:
                self.slots.remove(slot)
                self.groups.remove(slot.group)
                remove_placement_group(slot.group)

    def drop_lost(self, taken: Collection[Any]) -> None:
        """Remove placement groups of several bundles if all bundles are lost and none is in use.

        Ray reschedules the lost bundles of a group together, and serves no other request meanwhile.
        If other jobs have taken some of the resources, Ray never finishes.
        """
        if not self._owned:
            return
        in_use, now = {getattr(slot, "group", None) for slot in taken}, time.monotonic()
        sizes = Counter(slot.group for slot in self.slots)
        lost = [
            group
            for group, size in sizes.items()
            if size > 1 and group not in in_use and _num_lost(group) == size
        ]
        self._waiting_since = {group: self._waiting_since.get(group, now) for group in lost}
        for group, since in self._waiting_since.items():
            if now - since >= SETTLE_S:
                self.slots = [slot for slot in self.slots if slot.group != group]
                self.groups.remove(group)
                remove_placement_group(group)

    def include(self, other: Reservation) -> None:
        self.groups += other.groups
        self.slots += other.slots

    def release(self, timeout_s: float = 10.0) -> None:
        """Release the resources, and wait until they are free."""
        unreleased.discard(self)
        self._is_released = True
        if not ray.is_initialized():
            return
        with contextlib.suppress(Exception):  # a cluster that is gone holds nothing
            for group in self.groups:
                remove_placement_group(group)
            deadline = time.monotonic() + timeout_s
            while time.monotonic() < deadline and not all(map(_is_free, self.groups)):
                time.sleep(POLL_S)


unreleased: weakref.WeakSet[Reservation] = weakref.WeakSet()
"""Reservations of this process that were not released."""
