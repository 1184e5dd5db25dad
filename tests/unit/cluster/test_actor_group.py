"""Worker groups: start, slots, and shutdown."""

import inspect
from concurrent.futures import Future

import pytest
import ray.exceptions
import ray.util.client
from ray.util.client.api import _ClientAPI

from raysgd.cluster import actor_group as group_module
from raysgd.cluster import remote_functions
from raysgd.cluster.actor_group import ActorGroup
from raysgd.cluster.group_options import GroupOptions
from raysgd.cluster.worker import WORK_METHODS, Worker, WorkerLocation
from raysgd.errors import WorkerLostError, WorkerTimeoutError
from tests.unit.cluster.clock import ManualClock


def done(value):
    future = Future()
    future.set_result(value)
    return future


def test_control_methods_have_their_own_threads():
    group_module._actor_class()
    groups = {
        name: method.__ray_concurrency_group__
        for name, method in inspect.getmembers(Worker, inspect.isfunction)
        if not name.startswith("_")
    }
    assert {name for name, group in groups.items() if group == "work"} == set(WORK_METHODS)
    assert groups["handle"] == groups["execute"] == "work"


def test_ray_client_accepts_the_actor_class(monkeypatch):
    """The decorator of Ray Client accepts fewer arguments."""
    monkeypatch.setattr(ray, "method", _ClientAPI(None).method)
    monkeypatch.setattr(ray.util.client.ray, "is_connected", lambda: True)
    group_module._actor_class.__wrapped__()


# ---- workers and their slots


class FakeSlot:
    node_id = last_node_id = None

    def __init__(self, name):
        self.scheduling_strategy = name


class FakeReservation:
    """A reservation. If the caller owns it, it cannot grow."""

    def __init__(self, size, is_owned=True):
        self.slots = [FakeSlot(index) for index in range(size)]
        self.is_owned = is_owned
        self.released = False

    def include(self, other):
        self.slots += other.slots

    def drop_lost(self, taken):
        pass

    def request_slot(self, bundle):
        if not self.is_owned:
            return None
        self.slots.append(FakeSlot(len(self.slots)))
        return self.slots[-1]

    def release(self):
        self.released = True


class FakeMember:
    is_remote = True
    can_be_called = True

    def __init__(self, actor, monitor=None):
        self.number = actor
        self.killed = 0
        self.torn_down = 0
        self.left, self.killed_process = None, 0
        self.node = "ab"[actor % 2]
        self.location = WorkerLocation(node_id="", node_ip="")

    def start_watching(self, location):
        self.location = location

    def submit_control(self, method):
        assert method is Worker.locate
        return done(WorkerLocation(node_id=self.node, node_ip=self.node))

    def submit_work(self, method):
        assert method is Worker.teardown
        assert not self.killed
        self.torn_down += 1
        return done(None)

    def exit_process(self, timeout_s):
        assert self.torn_down
        return self.left if self.left else done(True)

    def kill(self):
        self.killed += 1

    def kill_process(self):
        self.killed_process += 1
        self.kill()


class Actors:
    """A fake actor class whose actors are numbers."""

    def __init__(self):
        self.number = -1
        self.strategies = []

    def options(self, scheduling_strategy, **resources):
        self.strategies.append(scheduling_strategy)
        return self

    def remote(self, catches_sigterm, hides_gpus):
        self.hides_gpus = hides_gpus
        self.number += 1
        return self.number


@pytest.fixture
def start(monkeypatch):
    """A function that returns a started group."""
    monkeypatch.setattr(group_module, "ActorHandle", FakeMember)
    actors = Actors()
    monkeypatch.setattr(group_module, "_actor_class", lambda: actors)

    def start(num_workers, room, is_owned=True, num_gpus=0):
        reservation = FakeReservation(room, is_owned)
        options = GroupOptions(num_workers=num_workers, num_gpus=num_gpus)
        group = ActorGroup(options, clock=ManualClock())
        group._reserve = lambda *wanted: reservation
        group.reserve()
        remote_functions.start(group, len(reservation.slots))
        group.members = group.sort_by_node(group.members)
        group.reservation_of_test = reservation
        return group

    return start


def test_workers_of_a_node_are_next_to_each_other(start):
    group = start(num_workers=4, room=4)
    assert [member.location.node_id for member in group.members] == ["a", "a", "b", "b"]
    assert [member.number for member in group.members] == [0, 2, 1, 3]


@pytest.mark.parametrize("num_gpus", [0, 0.5, 2])
def test_workers_that_reserve_no_gpu_see_none(start, num_gpus):
    start(num_workers=1, room=1, num_gpus=num_gpus)
    assert group_module._actor_class().hides_gpus == (num_gpus == 0)


def test_missing_room_is_requested_once(start):
    group = start(num_workers=4, room=2)
    assert group.find_vacant_slots() == []
    for _ in range(2):
        group.request_slots()
        assert [slot.scheduling_strategy for slot in group.find_vacant_slots()] == [2, 3]
    assert len(group.reservation_of_test.slots) == 4


def test_start_requests_lost_room_again(start):
    group = start(num_workers=3, room=3)
    reservation = group.reservation_of_test
    for member in list(group.members):
        group.discard(member)
    lost = list(reservation.slots)
    group.request_slots(only_if_lost=True)
    assert group.find_vacant_slots() == lost
    reservation.drop_lost = lambda taken: reservation.slots.clear()
    group.request_slots(only_if_lost=True)
    vacant = group.find_vacant_slots()
    assert len(vacant) == 3
    assert not set(vacant) & set(lost)


def test_no_room_is_requested_in_a_reservation_of_the_caller(start):
    group = start(num_workers=4, room=2, is_owned=False)
    group.request_slots()
    assert group.find_vacant_slots() == []


def test_a_lost_worker_leaves_its_slot_to_a_successor(start):
    group = start(num_workers=3, room=3)
    member = group.members[1]
    slot = group.slot_of(member)
    group.discard(member)
    assert member.killed == 1
    assert member not in group.members
    assert group.slot_of(member) is None
    assert group.find_vacant_slots() == [slot]
    assert slot.last_node_id == member.location.node_id
    successor = group.start_worker(slot)
    assert group.find_vacant_slots() == []
    assert group.slot_of(successor) is slot
    assert successor not in group.members  # it has not joined yet
    group.discard(successor)
    assert group.find_vacant_slots() == [slot]


def test_room_on_a_draining_node_is_replaced(start):
    group = start(num_workers=2, room=2)
    member = group.members[1]
    slot = group.slot_of(member)
    group.notices.drain(member.location.node_id, None)
    group.request_slots()  # before the worker leaves
    vacant = group.find_vacant_slots()
    assert [slot.scheduling_strategy for slot in vacant] == [2]
    group.discard(member)
    assert slot not in group.find_vacant_slots()
    assert len(group.find_vacant_slots()) == 1


def test_the_worker_in_the_drivers_process_needs_no_reservation():
    group, asked = ActorGroup(GroupOptions(num_workers=3, min_workers=2, use_local=True)), []
    group._reserve = lambda *wanted: asked.append(wanted) or FakeReservation(1)
    group.reserve()
    assert asked == [(2, 1)]
    group.request_slots()
    assert len(group.find_vacant_slots()) == 3  # the local one, one reserved, and one requested


def test_further_workers_take_the_room_of_those_that_were_removed(start):
    group = start(num_workers=2, room=2)
    slot = group.slot_of(group.members[0])
    group.discard(group.members[0])
    reserved = []
    group._reserve = lambda size, *wanted: reserved.append(size) or FakeReservation(size)
    remote_functions.start(group, 1)
    assert group.slot_of(group.members[1]) is slot
    assert not reserved
    remote_functions.start(group, 1)
    assert (len(group.members), reserved) == (3, [1])


def test_further_workers_start_in_new_room_if_the_earlier_is_lost(start):
    group = start(num_workers=2, room=2)
    group.discard(group.members[0])
    slots = group.reservation_of_test.slots
    group.reservation_of_test.drop_lost = lambda taken: slots.pop(0)
    group._reserve = None
    remote_functions.start(group, 1)
    assert group.slot_of(group.members[1]) is slots[-1]


def test_further_workers_that_do_not_start_are_killed(start, monkeypatch):
    group = start(num_workers=2, room=2)
    before, made = list(group.members), []

    class Dying(FakeMember):
        def submit_control(self, method):
            made.append(self)
            future = Future()
            future.set_exception(ray.exceptions.ActorDiedError())
            return future

    monkeypatch.setattr(group_module, "ActorHandle", Dying)
    group._reserve = lambda *wanted: FakeReservation(2)
    with pytest.raises(WorkerLostError, match="died during its start"):
        remote_functions.start(group, 2)
    assert group.members == before
    assert [member.killed for member in made] == [1, 1]
    assert [group.slot_of(member) for member in made] == [None, None]


def test_a_reservation_is_released_if_the_group_is_shut_down_meanwhile(start):
    group, more = start(num_workers=1, room=1), FakeReservation(1)
    group._reserve = lambda *wanted: group.shutdown() or more  # in another thread
    with pytest.raises(RuntimeError, match="shut down"):
        remote_functions.start(group, 1)
    assert more.released


def test_a_worker_that_does_not_come_up_is_named(start, monkeypatch):
    class Silent(FakeMember):
        def submit_control(self, method):
            return super().submit_control(method) if self.number == 1 else Future()

    monkeypatch.setattr(group_module, "ActorHandle", Silent)
    with pytest.raises(WorkerTimeoutError, match=r"workers 0, 2 did not start within 100 s") as e:
        start(num_workers=3, room=3)
    assert "To wait longer, set SGD_PLACEMENT_GROUP_TIMEOUT_S" in str(e.value)


@pytest.mark.parametrize("answer", [Future(), done(False)], ids=["silent", "alive"])
def test_a_worker_whose_exit_handlers_hang_is_killed(start, answer):
    group = start(num_workers=1, room=1)
    (member,) = group.members
    member.left = answer
    group.shutdown(patience_s=0.5)
    assert (member.killed, member.killed_process) == (1, 1)


@pytest.mark.parametrize("force", [False, True])
def test_shutdown_ends_replacements_and_releases_room(start, force):
    group = start(num_workers=3, room=2)
    members = list(group.members)
    group.request_slots()
    replacement = group.start_worker(group.find_vacant_slots()[0])
    group.shutdown(force)
    assert [m.killed for m in [*members, replacement]] == [1, 1, 1]
    assert [m.torn_down for m in members] == [0 if force else 1] * 2
    assert group.members == []
    assert group.find_vacant_slots() == []
    assert group.reservation_of_test.released
