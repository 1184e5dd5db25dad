"""Reserves resources for workers, as one slot per worker, and reports which are missing."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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

from raysgd.cluster import process
from raysgd.cluster.group_options import START_ADVICE, workers_that_fit
from raysgd.cluster.ray_session import is_own_cluster
from raysgd.errors import InsufficientResourcesError

logger = logging.getLogger(__name__)

SETTLE_S = 1.0
"""Minimum lifetime of a request, in seconds. Ray 2.60 can lose resources permanently if a request
is removed while Ray grants it."""
POLL_S = 0.02
_LOG_EVERY_S = 10.0
_ADVICE = "Earlier trainers keep their resources until you call shutdown()."


class Slot:
    """Resources for one worker, and for its replacement if the worker is lost.

    `index` is the index of a bundle of the placement group, or -1 for any free bundle.
    """

    def __init__(self, group: PlacementGroup, index: int) -> None:
        self.placement_group = group
        self.scheduling_strategy = PlacementGroupSchedulingStrategy(group, index)
        self._index = index
        self.last_node_id: str | None = None  # node of the last worker that left this slot

    @property
    def node_id(self) -> str | None:
        """Node of the slot. None if it has no node or Ray does not report it."""
        if self._index < 0:
            return self.last_node_id
        table = placement_group_table(self.placement_group)
        # While Ray replaces the bundles of a lost node, the other bundles stay reserved.
        if table.get("state") not in ("CREATED", "RESCHEDULING"):
            return None
        nodes: dict[int, str] = table.get("bundles_to_node_id", {})
        return nodes.get(self._index) or None

    @property
    def is_ready(self) -> bool:
        """Whether the slot has a node. Ray may assign another node after a node failure."""
        return _is_created(self.placement_group) if self._index < 0 else self.node_id is not None


def _is_created(group: PlacementGroup) -> bool:
    return bool(placement_group_table(group).get("state") == "CREATED")


def _is_lost(group: PlacementGroup) -> bool:
    """Return whether Ray is rescheduling all bundles of a group."""
    table = placement_group_table(group)
    return table.get("state") == "RESCHEDULING" and not any(table["bundles_to_node_id"].values())


def _is_free(group: PlacementGroup) -> bool:
    state = placement_group_table(group).get("state", "REMOVED")
    # While a group holds resources, Ray lists them under names that end in the group's ID.
    suffix = group.id.hex()
    return state == "REMOVED" and not any(
        name.endswith(suffix) for name in ray.available_resources()
    )


class Reservation:
    """Resources for workers: own placement groups, or the caller's group, as in a Tune trial."""

    def __init__(
        self, group: PlacementGroup, indexes: Iterable[int], is_owned: bool, is_strict: bool = False
    ) -> None:
        # Single requests cannot add or replace bundles with a strict placement strategy.
        self._may_grow = is_owned and not is_strict
        self.placement_groups = [group] if is_owned else []  # those that raysgd requested
        self.slots = [Slot(group, index) for index in indexes]
        self._rescheduled_since: dict[PlacementGroup, float] = {}
        self._is_released = False

    def request_slot(self, bundle: Mapping[str, float]) -> Slot | None:
        """Request a slot for one more worker. Return None if the group cannot grow."""
        if not self._may_grow:
            return None
        group = placement_group([dict(bundle)], "SPREAD")
        self.placement_groups.append(group)
        if self._is_released:  # another thread has just called `release`
            remove_placement_group(group)
            return None
        slot = Slot(group, 0)
        self.slots.append(slot)
        return slot

    def drop_pending(self, requested: Iterable[Slot]) -> None:
        for slot in requested:
            if not slot.is_ready:
                self.slots.remove(slot)
                self.placement_groups.remove(slot.placement_group)
                remove_placement_group(slot.placement_group)

    def drop_lost(self, taken: Collection[Any]) -> None:
        """Remove placement groups of several bundles if all bundles are lost and none is in use.

        Ray reschedules the lost bundles of a group together, and serves no other request meanwhile.
        If other jobs have taken some of the resources, Ray never finishes.
        """
        if not self._may_grow:
            return
        in_use, now = {getattr(slot, "placement_group", None) for slot in taken}, time.monotonic()
        sizes = Counter(slot.placement_group for slot in self.slots)
        lost = [g for g, size in sizes.items() if size > 1 and g not in in_use and _is_lost(g)]
        self._rescheduled_since = {group: self._rescheduled_since.get(group, now) for group in lost}
        for group, since in self._rescheduled_since.items():
            if now - since >= SETTLE_S:
                self.slots = [slot for slot in self.slots if slot.placement_group != group]
                self.placement_groups.remove(group)
                remove_placement_group(group)

    def include(self, other: Reservation) -> None:
        self.placement_groups += other.placement_groups
        self.slots += other.slots

    def release(self, timeout_s: float = 10.0) -> None:
        """Release the resources, and wait until they are free."""
        self._is_released = True
        if not ray.is_initialized():
            return
        with contextlib.suppress(Exception):  # a cluster that is gone holds nothing
            for group in self.placement_groups:
                remove_placement_group(group)
            deadline = time.monotonic() + timeout_s
            while time.monotonic() < deadline and not all(map(_is_free, self.placement_groups)):
                time.sleep(POLL_S)


def reserve(
    bundle: Mapping[str, float],
    *,
    num_workers: int,
    min_workers: int,
    timeout_s: float,
    placement_strategy: str = "SPREAD",
    is_wanted: Callable[[], bool] = lambda: True,
) -> Reservation:
    """Reserve resources for `min_workers` up to `num_workers` workers, as many as fit.

    Inside a placement group that captures child tasks, as in a Tune trial, the workers use the
    resources of its bundles that the caller does not use. A trainer on a worker of raysgd reserves
    its own resources, because the workers use the bundles.

    Wait up to `timeout_s` for `min_workers`, while `is_wanted` returns True. Raise immediately if
    this process has started the cluster, and the cluster is too small.
    """
    if (current := get_current_placement_group()) is not None and not process.is_worker:
        context: Any = ray.get_runtime_context()
        if context.should_capture_child_tasks_in_placement_group:
            return _reserve_within(current, bundle, num_workers, min_workers)
    deadline = time.monotonic() + timeout_s
    capacity = workers_that_fit(ray.cluster_resources(), bundle)
    if capacity < min_workers and is_own_cluster():
        raise _no_room_error("", bundle, min_workers, num_workers)
    largest, sizes = max(min_workers, min(num_workers, capacity)), [min_workers]
    is_strict = placement_strategy.startswith("STRICT_")
    if is_strict:  # the group cannot grow later
        sizes = list(range(largest, min_workers - 1, -1))
    elif min_workers < num_workers == largest:
        sizes = [num_workers, min_workers]
    for size in sizes:
        # Spend the remaining time on the minimum.
        wait_s = max(deadline - time.monotonic() if size == min_workers else 0.0, SETTLE_S)
        group = _request_group([dict(bundle)] * size, placement_strategy, wait_s, is_wanted)
        if group is not None:
            reservation = Reservation(group, range(size), is_owned=True, is_strict=is_strict)
            return _extend(reservation, bundle, num_workers)
    raise _no_room_error(f"within {timeout_s:g} s ", bundle, min_workers, num_workers)


def _extend(reservation: Reservation, bundle: Mapping[str, float], num_workers: int) -> Reservation:
    """Request slots for the missing workers, and wait briefly for them."""
    size = len(reservation.slots)
    if size == num_workers:
        return reservation
    try:
        free = workers_that_fit(ray.available_resources(), bundle)
        for _ in range(min(num_workers - size, free)):
            reservation.request_slot(bundle)
        requested = reservation.slots[size:]
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline and not all(slot.is_ready for slot in requested):
            time.sleep(POLL_S)
        reservation.drop_pending(requested)
        where = f"The cluster has {_format(ray.cluster_resources(), bundle)}, and"
        _warn_of_missing(len(reservation.slots), num_workers, bundle, where)
    except BaseException:  # most likely Ctrl-C
        reservation.release()
        raise
    return reservation


def _request_group(
    bundles: list[dict[str, float]],
    placement_strategy: str,
    timeout_s: float,
    is_wanted: Callable[[], bool],
) -> PlacementGroup | None:
    """Request a placement group and wait for it. After `timeout_s`, remove it and return None."""
    group: PlacementGroup = placement_group(bundles, placement_strategy)
    is_granted = False
    try:
        started = mentioned = time.monotonic()
        # The wait() of a placement group supports whole seconds only.
        while not (is_granted := _is_created(group)):
            now = time.monotonic()
            if not is_wanted():
                raise RuntimeError("The workers are shut down.")
            if now - started >= timeout_s:
                return None
            if now - mentioned >= (SETTLE_S if mentioned == started else _LOG_EVERY_S):
                mentioned = now
                what = describe_demand(bundles[0], len(bundles))
                left_s = timeout_s - (now - started)
                logger.warning("Waiting up to %.0f s for %s. %s", left_s, what, _ADVICE)
            time.sleep(POLL_S)
        return group
    finally:
        if not is_granted:
            remove_placement_group(group)


def _no_room_error(
    when: str, bundle: Mapping[str, float], min_workers: int, num_workers: int
) -> InsufficientResourcesError:
    sentences = [f"No room {when}for {describe_demand(bundle, min_workers)}."]
    if min_workers < num_workers:
        sentences.append(f"Training can start with that many of up to {_plural(num_workers)}.")
    sentences.append(
        "Request less (num_workers, num_cpus_per_worker, use_gpu, resources_per_worker), or add "
        "nodes."
    )
    if when:
        sentences += [_ADVICE, START_ADVICE]
    return InsufficientResourcesError(" ".join(sentences))


def _reserve_within(
    group: PlacementGroup, bundle: Mapping[str, float], num_workers: int, min_workers: int
) -> Reservation:
    """Reserve resources in the placement group of the caller, which never grows."""
    held = ray.get_runtime_context().worker.core_worker.resource_ids()
    unused = _unused_resources(group.bundle_specs, held)
    num_fitting = sum(workers_that_fit(each, bundle) for each in unused)
    if num_fitting < min_workers:
        raise InsufficientResourcesError(
            f"No room for {_plural(min_workers)} with {_format(bundle)} each in the placement "
            f"group of this trainer, which has room for {num_fitting} next to the caller. Give the "
            "group a bundle for each worker. In Ray Tune, pass trainer.as_trainable() to the "
            "Tuner, or wrap your function in tune.with_resources(...)."
        )
    _warn_of_missing(num_fitting, num_workers, bundle, "The placement group of this trainer has")
    return Reservation(group, [-1] * min(num_fitting, num_workers), is_owned=False)


def _warn_of_missing(number: int, wanted: int, bundle: Mapping[str, float], where: str) -> None:
    if number < wanted:
        text = "Starting with %d of %d workers, each with %s. %s no room for more now."
        logger.warning(text, number, wanted, _format(bundle), where)


def _unused_resources(
    bundles: Iterable[Mapping[str, float]], held: Mapping[str, Sequence[tuple[int, float]]]
) -> list[dict[str, float]]:
    """Return the resources of each bundle of a placement group that a process does not hold.

    The name of a resource of the process, such as ``CPU_group_2_ID``, has the index of its bundle.
    """
    unused = [dict(bundle) for bundle in bundles]
    for name, amounts in held.items():
        # Ignore the resource ``bundle``, which may belong to another bundle.
        match = re.fullmatch(r"(?!bundle_)(.+)_group_(\d+)_[0-9a-f]+", name)
        if match is not None:
            unused[int(match[2])][match[1]] -= sum(amount for _, amount in amounts)
    return unused


def describe_demand(bundle: Mapping[str, float], size: int = 1) -> str:
    return (
        f"{_plural(size)} with {_format(bundle)} each: the cluster has "
        f"{_format(ray.cluster_resources(), bundle)}, of which "
        f"{_format(ray.available_resources(), bundle)} are free"
    )


def _plural(num_workers: int) -> str:
    return f"{num_workers} worker{'s' * (num_workers > 1)}"


def _format(resources: Mapping[str, float], names: Mapping[str, float] | None = None) -> str:
    shown = resources if names is None else {name: resources.get(name, 0) for name in names}
    return ", ".join(f"{amount:g} {name}" for name, amount in shown.items()) or "nothing"
