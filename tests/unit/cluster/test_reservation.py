"""Reservations of resources for workers."""

from types import SimpleNamespace

import pytest
import ray

from raysgd.cluster import process, reservation
from raysgd.cluster.reservation import Reservation
from raysgd.errors import InsufficientResourcesError
from tests.unit.cluster.clock import ManualClock


@pytest.fixture
def room(monkeypatch):
    """A reservation for three workers. Tests change its placement group in ``room.table``."""
    table = {"state": "CREATED", "strategy": "SPREAD"}
    table["bundles_to_node_id"] = {0: "one", 1: "two", 2: "three"}
    monkeypatch.setattr(reservation, "placement_group_table", lambda group: table)
    monkeypatch.setattr(reservation, "placement_group", lambda *arguments: object())
    monkeypatch.setattr(reservation, "SETTLE_S", 0.0)
    room = Reservation(object(), range(3), is_owned=True)
    room.table = table
    return room


def test_workers_start_in_the_bundle_of_their_slot(room):
    further = room.request_slot({"CPU": 1})
    bundles = [slot.scheduling_strategy.placement_group_bundle_index for slot in room.slots]
    assert bundles == [0, 1, 2, 0]
    assert (room.slots[-1], further.placement_group) == (further, room.placement_groups[-1])


def test_a_slot_keeps_its_node_while_ray_replaces_another(room):
    room.table["state"] = "RESCHEDULING"
    room.table["bundles_to_node_id"] |= {1: ""}
    assert [slot.node_id for slot in room.slots] == ["one", None, "three"]
    assert [slot.is_ready for slot in room.slots] == [True, False, True]


def test_request_is_dropped_if_all_its_bundles_are_lost(room, monkeypatch):
    removed = []
    monkeypatch.setattr(reservation, "remove_placement_group", removed.append)
    (lost,) = room.placement_groups
    room.table["state"] = "RESCHEDULING"
    room.table["bundles_to_node_id"] |= {1: "", 2: ""}
    room.drop_lost([])
    room.table["bundles_to_node_id"] |= {0: ""}
    room.drop_lost([room.slots[0]])
    assert not removed
    room.drop_lost([])
    assert (removed, room.placement_groups, room.slots) == ([lost], [], [])


@pytest.mark.parametrize("captures", [True, False])
def test_workers_use_a_placement_group_that_captures_child_tasks(monkeypatch, captures):
    context = SimpleNamespace(should_capture_child_tasks_in_placement_group=captures)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(reservation, "get_current_placement_group", lambda: "the caller's")
    monkeypatch.setattr(process, "is_worker", False)
    monkeypatch.setattr(reservation, "_reserve_within", lambda *arguments: "within")
    monkeypatch.setattr(reservation, "_request_group", lambda *arguments: "own")
    monkeypatch.setattr(reservation, "Reservation", lambda group, *_, **__: group)
    monkeypatch.setattr(reservation, "_extend", lambda room, *_: room)
    for name in ("cluster_resources", "available_resources"):
        monkeypatch.setattr(ray, name, lambda: {"CPU": 4})
    found = reservation.reserve({"CPU": 1}, num_workers=2, min_workers=2, timeout_s=1)
    assert found == ("within" if captures else "own")


def test_resources_of_the_caller_are_subtracted_from_their_bundle():
    held = {name: [(0, 0.5), (1, 0.5)] for name in ("CPU_group_1_0a", "CPU_group_0a")}
    held |= {"bundle_group_0_0a": [(0, 0.001)]}
    left = reservation._unused_resources([{"CPU": 1.0}, {"CPU": 3.0}], held)
    assert left == [{"CPU": 1.0}, {"CPU": 2.0}]


def test_no_more_workers_than_requested_start_in_the_group_of_the_caller(monkeypatch):
    process = SimpleNamespace(core_worker=SimpleNamespace(resource_ids=dict))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(worker=process))
    group = SimpleNamespace(bundle_specs=[{"CPU": 1.0}] * 4)
    room = reservation._reserve_within(group, {"CPU": 1.0}, num_workers=2, min_workers=1)
    assert len(room.slots) == 2
    with pytest.raises(InsufficientResourcesError, match=r"In Ray Tune, pass .*as_trainable\(\)"):
        reservation._reserve_within(group, {"CPU": 9.0}, num_workers=2, min_workers=1)


def test_strict_strategy_gets_as_many_workers_as_fit(monkeypatch):
    monkeypatch.setattr(reservation, "get_current_placement_group", lambda: None)
    monkeypatch.setattr(
        reservation, "_request_group", lambda bundles, *_: "own" if len(bundles) < 3 else None
    )
    monkeypatch.setattr(reservation, "Reservation", lambda group, indexes, **_: len(indexes))
    monkeypatch.setattr(reservation, "_extend", lambda room, *_: room)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4})
    asked = {"num_workers": 5, "min_workers": 1, "timeout_s": 1}
    assert reservation.reserve({"CPU": 1}, placement_strategy="STRICT_PACK", **asked) == 2


@pytest.mark.parametrize("strategy", ["STRICT_PACK", "SPREAD"])
def test_a_group_with_a_strict_strategy_gets_no_slot_on_another_node(monkeypatch, strategy):
    monkeypatch.setattr(reservation, "placement_group", lambda *arguments: "requested")
    monkeypatch.setattr(reservation, "_request_group", lambda *arguments: "own")
    monkeypatch.setattr(reservation, "get_current_placement_group", lambda: None)
    monkeypatch.setattr(reservation, "PlacementGroupSchedulingStrategy", lambda *arguments: None)
    for name in ("cluster_resources", "available_resources"):
        monkeypatch.setattr(ray, name, lambda: {"CPU": 1})
    asked = {"num_workers": 1, "min_workers": 1, "timeout_s": 1}
    room = reservation.reserve({"CPU": 1}, placement_strategy=strategy, **asked)
    assert (room.request_slot({"CPU": 1}) is None) == (strategy == "STRICT_PACK")


def test_a_wait_for_resources_is_logged_with_the_time_left(monkeypatch, caplog):
    clock = ManualClock()
    monkeypatch.setattr(reservation, "time", clock)
    monkeypatch.setattr(reservation, "placement_group", lambda *arguments: "requested")
    monkeypatch.setattr(reservation, "_is_created", lambda group: False)
    monkeypatch.setattr(reservation, "remove_placement_group", lambda group: None)
    for name in ("cluster_resources", "available_resources"):
        monkeypatch.setattr(ray, name, lambda: {"CPU": 4})
    assert reservation._request_group([{"CPU": 3.0}], "PACK", 14.9, lambda: True) is None
    waits = [record.getMessage().split(" for ")[0] for record in caplog.records]
    assert waits == ["Waiting up to 14 s", "Waiting up to 4 s"]
    room = "1 worker with 3 CPU each: the cluster has 4 CPU, of which 4 CPU are free. Earlier"
    assert room in caplog.text
