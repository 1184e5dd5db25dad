"""Room for workers in the cluster: placement groups, and what to say when there is none."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
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

from raysgd.elastic.policies import start_sizes, workers_that_fit
from raysgd.errors import InsufficientResourcesError

__all__ = ["Reservation", "Slot", "connect", "free_resources", "gpus_in_cluster", "reserve"]

logger = logging.getLogger(__name__)

_SETTLE_S = 1.0
"""How long a group that should fit may take: what Ray knows to be free lags behind."""
_LOG_EVERY_S = 10.0
_POLL_S = 0.02


def connect() -> None:
    """Connect to Ray, starting it on this machine where there is none."""
    if not ray.is_initialized():
        ray.init()


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
        return _is_created(self._group)


class Reservation:
    """Room for workers: placement groups of our own, or the caller's (Tune's)."""

    def __init__(self, group: PlacementGroup, num_workers: int, owned: bool) -> None:
        self._owned = [group] if owned else []
        self.slots = [Slot(group, index if owned else -1) for index in range(num_workers)]

    def request_slot(self, bundle: Mapping[str, float]) -> Slot | None:
        """Request room for one more worker; None where the room is the caller's."""
        if not self._owned:
            return None
        group = _request(bundle, 1)
        self._owned.append(group)
        slot = Slot(group, 0)
        self.slots.append(slot)
        return slot

    def release(self, timeout_s: float = 10.0) -> None:
        """Give the room back, and wait until Ray counts it as free."""
        if not ray.is_initialized():
            return
        with contextlib.suppress(Exception):  # a cluster that is gone holds nothing
            for group in self._owned:
                remove_placement_group(group)
            deadline = time.monotonic() + timeout_s
            while time.monotonic() < deadline and not all(map(_is_free, self._owned)):
                time.sleep(0.02)


def _is_free(group: PlacementGroup) -> bool:
    state = placement_group_table(group).get("state", "REMOVED")
    # while a group holds resources, the cluster shows them under names that end in its id
    held = group.id.hex()
    return state == "REMOVED" and not any(name.endswith(held) for name in ray.available_resources())


def reserve(
    bundle: Mapping[str, float], *, num_workers: int, min_workers: int, timeout_s: float
) -> Reservation:
    """Reserve room for as many workers as fit, from `min_workers` up to `num_workers`.

    Inside of a placement group that captures its child tasks, as Tune makes one a trial, that
    one's room is used.

    Raises:
        InsufficientResourcesError: if there is no room for `min_workers` within `timeout_s`.
    """
    current = get_current_placement_group()
    if current is not None:
        return Reservation(current, num_workers, owned=False)
    deadline = time.monotonic() + timeout_s
    sizes = start_sizes(
        num_workers,
        min_workers,
        capacity=workers_that_fit(ray.cluster_resources(), bundle),
        free=workers_that_fit(ray.available_resources(), bundle),
    )
    for size in sizes:
        if (group := _granted(bundle, size, min(_SETTLE_S, timeout_s))) is not None:
            if size < num_workers:
                logger.warning(
                    "Starting with %d of %d workers: the cluster has no room for more now (%s).",
                    size,
                    num_workers,
                    _described(bundle),
                )
            return Reservation(group, size, owned=True)
    # a request that stays is what an autoscaler adds nodes for
    group = _granted(bundle, min_workers, deadline - time.monotonic(), log=True)
    if group is not None:
        return Reservation(group, min_workers, owned=True)
    raise InsufficientResourcesError(
        f"No room within {timeout_s:g} s for {_demand(bundle, min_workers)} Use fewer workers "
        "or less for each, add nodes, or wait longer (SGD_PLACEMENT_GROUP_TIMEOUT_S).",
        requested=bundle,
        total=ray.cluster_resources(),
        available=ray.available_resources(),
    )


def _request(bundle: Mapping[str, float], size: int) -> PlacementGroup:
    group: PlacementGroup = placement_group([dict(bundle)] * size, strategy="SPREAD")
    return group


def _granted(
    bundle: Mapping[str, float], size: int, timeout_s: float, log: bool = False
) -> PlacementGroup | None:
    """Request room and return it if it comes in time; else the request is taken back."""
    group = _request(bundle, size)
    started = mentioned = time.monotonic()
    try:
        # its own wait() knows whole seconds alone
        while not _is_created(group):
            now = time.monotonic()
            if now - started >= timeout_s:
                remove_placement_group(group)
                return None
            if log and (mentioned == started or now - mentioned >= _LOG_EVERY_S):
                mentioned = now
                left = timeout_s - (now - started)
                logger.warning("Waiting up to %.0f s for %s", left, _demand(bundle, size))
            time.sleep(_POLL_S)
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def _is_created(group: PlacementGroup) -> bool:
    state: str = placement_group_table(group).get("state", "REMOVED")
    return state == "CREATED"


def _demand(bundle: Mapping[str, float], size: int) -> str:
    return (
        f"{size} worker{'s' * (size > 1)} with {_described(bundle)} each: the cluster has "
        f"{_described(ray.cluster_resources(), bundle)}, of which "
        f"{_described(ray.available_resources(), bundle)} are free."
    )


def free_resources(bundle: Mapping[str, float]) -> str:
    """Say what a worker needs and what is free, for messages."""
    return _demand(bundle, 1)


def _described(resources: Mapping[str, float], names: Mapping[str, float] | None = None) -> str:
    """Return resources as text; with `names`, those of them alone."""
    shown: Mapping[str, Any] = (
        resources if names is None else {name: resources.get(name, 0) for name in names}
    )
    return ", ".join(f"{amount:g} {name}" for name, amount in shown.items()) or "nothing"
