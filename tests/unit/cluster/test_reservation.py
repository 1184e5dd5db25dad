"""Room for workers: which labels the nodes of further requests have."""

from types import SimpleNamespace

import pytest
import ray

from raysgd.cluster import placement, reservation
from raysgd.cluster.reservation import OpenSlot, Reservation, _match

A, B = {"zone": "a"}, {"zone": "b"}


@pytest.fixture
def room(monkeypatch):
    """Room for three workers in two zones, of which Ray looks anew for what is lost."""
    table = {"state": "CREATED", "strategy": "SPREAD"}
    table["bundles_to_node_id"] = {0: "one", 1: "two", 2: "three"}
    monkeypatch.setattr(reservation, "placement_group_table", lambda group: table)
    monkeypatch.setattr(reservation, "request_group", lambda *arguments: object())
    monkeypatch.setattr(reservation, "SETTLE_S", 0.0)
    room = Reservation(object(), range(3), owned=True, labels=[A, B, A])
    room.table = table
    return room


def test_room_instead_of_other_room_is_on_nodes_with_the_same_labels(room):
    first, second, _ = room.slots
    assert room.request_slot({"CPU": 1}, [second]).labels == B
    assert room.request_slot({"CPU": 1}, [first, second]).labels == A
    assert room.request_slot({"CPU": 1}).labels == {}


def test_room_without_a_group_is_on_nodes_with_the_labels_of_what_is_lost(room):
    room.table["state"] = "RESCHEDULING"
    room.table["bundles_to_node_id"] |= {1: "", 2: ""}
    assert room.drop_lost([room.slots[0]]) == 2
    found = [room.request_slot({"CPU": 1}) for _ in range(2)]
    assert all(isinstance(slot, OpenSlot) for slot in found)
    assert [slot.label_selector for slot in found] == [B, A]


@pytest.mark.parametrize(
    ("asked", "is_one"),
    [
        ({}, True),
        ({"zone": "a"}, True),
        ({"zone": "b"}, False),
        ({"zone": "!b", "kind": "!new"}, True),
        ({"zone": "!a"}, False),
        ({"zone": "in(b, a)"}, True),
        ({"zone": "!in(b,a)"}, False),
        ({"zone": "a", "kind": "new"}, False),
    ],
)
def test_labels_are_told_as_ray_tells_them(asked, is_one):
    assert _match(A, asked) == is_one


@pytest.mark.parametrize("captures", [True, False])
def test_room_is_in_the_caller_s_placement_group_if_that_captures_child_tasks(
    monkeypatch, captures
):
    context = SimpleNamespace(should_capture_child_tasks_in_placement_group=captures)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(placement, "get_current_placement_group", lambda: "the caller's")
    monkeypatch.setattr(placement, "is_worker_process", lambda: False)
    monkeypatch.setattr(placement, "_reserve_within", lambda *arguments: "within")
    monkeypatch.setattr(placement, "new_owner", lambda: None)
    monkeypatch.setattr(placement, "_granted", lambda *arguments: "own")
    monkeypatch.setattr(placement, "Reservation", lambda group, *_, **__: group)
    monkeypatch.setattr(placement, "_topped_up", lambda room, *_: room)
    for name in ("cluster_resources", "available_resources"):
        monkeypatch.setattr(ray, name, lambda: {"CPU": 4})
    found = placement.reserve({"CPU": 1}, num_workers=2, min_workers=2, timeout_s=1)
    assert found == ("within" if captures else "own")
