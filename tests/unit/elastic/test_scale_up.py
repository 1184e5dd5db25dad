"""Replacement workers: how many start, when they are retried, and when they join."""

import pytest

from raysgd.cluster.group_options import GroupOptions
from raysgd.cluster.notices import PreemptionNotices
from raysgd.cluster.worker import WorkerInfo
from raysgd.elastic import scale_up as scaling_module
from raysgd.elastic.config import ElasticConfig
from raysgd.elastic.policies import Policy
from raysgd.elastic.scale_up import ScaleUp
from raysgd.errors import CheckpointError
from tests.blackbox.simulation.seam import LostError
from tests.unit.cluster.clock import ManualClock


class FakeMember(str):
    remote = True
    name = "a node"
    info = WorkerInfo(node_id="", node_ip="")

    @property
    def node_id(self):
        return f"node of {self}"


class FakeGroup:
    """A fake group whose members are names and whose slots are numbers."""

    def __init__(self, clock, num_workers, present, use_local=False):
        self.clock = clock
        self.options = GroupOptions(num_workers=num_workers, use_local=use_local, num_cpus=3)
        self.members = [FakeMember(f"member{index}") for index in range(present)]
        self.slots = list(range(num_workers))
        self.taken = list(range(present))
        self.discarded = []
        self.notices = PreemptionNotices(clock)

    def vacant_slots(self, request=True):
        return [slot for slot in self.slots if slot not in self.taken]

    def leaving(self):
        return {}

    def give_back(self):
        pass

    def discard(self, member):
        self.discarded.append(member)

    def slot_of(self, member):
        return int(member.removeprefix("member"))

    def lose(self, scale_up, slot):
        member = next(each for each in self.members if each == f"member{slot}")
        scale_up.note_loss(member)
        self.members.remove(member)
        self.taken.remove(slot)

    def take(self, replacement):
        self.members.append(replacement.member)
        self.taken.append(replacement.slot)


class FakeJournal:
    generation = 7

    def __init__(self):
        self.failed = []

    def record(self, kind, members, cause):
        assert kind == "newcomer_failed"
        self.failed += members


class FakeReplacement:
    """A replacement that becomes ready or fails when the test says so."""

    made = ()

    def __init__(self, scale_up, slot, rank, size, replaces_lost):
        self.slot, self.rank = slot, rank
        self.size, self.phase = size, "start"
        self.replaces_lost = replaces_lost
        self.member = None
        self.is_ready = False
        self.error = None
        self.num_advances = 0
        FakeReplacement.made.append(self)

    def advance(self):
        self.num_advances += 1
        if self.member is None:
            self.member = FakeMember(f"replacement worker{len(FakeReplacement.made)}")

    def get_ready(self):
        self.member = self.member or FakeMember(f"replacement worker{self.slot}")
        self.is_ready = True


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(scaling_module, "Replacement", FakeReplacement)
    monkeypatch.setattr(FakeReplacement, "made", [])
    return ManualClock()


@pytest.fixture
def make(clock):
    def make(num_workers=3, present=2, **config):
        group = FakeGroup(clock, num_workers, present, config.pop("use_local", False))
        journal = FakeJournal()
        values = {"resize_cooldown_s": 10.0, **config}
        scale_up = ScaleUp(
            group,
            ElasticConfig(**values),
            journal,
            Policy(may_grow=values.get("grow", True)),
            ("created",),
            timeout_s=30.0,
        )
        return scale_up, group

    return make


def replacements():
    return FakeReplacement.made


# ---- how many


@pytest.mark.parametrize("present", [2, 3])
def test_requests_are_given_back_when_no_worker_is_missing(make, present):
    scale_up, group = make(num_workers=3, present=present)
    given_back = []
    group.give_back = lambda: given_back.append(True)
    scale_up.tick()
    assert bool(given_back) == (present == 3)


def test_one_worker_starts_for_each_leaving_member_until_it_stays(make):
    scale_up, group = make(num_workers=2, present=2)
    group.slots = [0, 1, 2, 3]
    group.leaving = lambda: {group.members[0]: None}
    scale_up.tick()
    assert [replacement.member is None for replacement in replacements()] == [False, True]
    group.leaving = dict
    scale_up.tick()
    assert group.discarded == [replacements()[0].member]
    assert not scale_up.num_started()


def test_a_surplus_replacement_without_a_process_is_dropped_first(make):
    scale_up, group = make(num_workers=3, present=1)
    scale_up.tick()
    waiting, started = replacements()
    waiting.advance = lambda: None
    waiting.member, started.member = None, FakeMember("started")
    group.members.append(FakeMember("member1"))
    scale_up.tick()
    assert not group.discarded
    assert scale_up.num_started()


# ---- failures


def test_no_other_replacement_starts_if_one_cannot_load_the_state(make, clock):
    scale_up, _ = make()
    scale_up.tick()
    (first,) = replacements()
    scale_up.fail(first.member, CheckpointError("its groups have [2, 2] parameters, not [2]"))
    scale_up.forget_joined([])  # the others form a group without it
    assert waits_until_the_next(scale_up, clock) is None
    scale_up.try_again()  # in the next call
    scale_up.tick()
    assert len(replacements()) == 2


def waits_until_the_next(scale_up, clock, most_s=200.0):
    """Return the seconds until another replacement starts, or None after `most_s`."""
    before, began = len(replacements()), clock.now
    while len(replacements()) == before:
        scale_up.tick()
        if clock.now - began > most_s:
            return None
        clock.now += 0.1
    return clock.now - began


def test_a_lost_replacement_is_replaced_immediately_with_its_rank(make):
    scale_up, _ = make(num_workers=5, present=2)
    scale_up.tick()
    first, *others = replacements()
    first.error = LostError("OOM")
    scale_up.tick()
    scale_up.tick()
    another = replacements()[-1]
    assert len(replacements()) == 4
    assert (another.slot, another.rank, another.size) == (first.slot, first.rank, 5)
    assert another.replaces_lost  # it joins without a cooldown
    assert [n.error for n in others] == [None, None]


@pytest.mark.parametrize(("step", "most"), [("set up", 3), ("start", 5), ("join", 5)])
def test_a_slot_with_repeated_losses_in_the_same_step_waits(make, clock, step, most):
    scale_up, _ = make(num_workers=4, initial_s=2.0, max_attempts=5)
    scale_up.tick()
    for other in (*[step] * (most - 1), "come up", *[step] * (most - 1)):
        before = len(replacements())
        replacements()[-1].phase, replacements()[-1].error = other, LostError("OOM")
        scale_up.tick()
        assert len(replacements()) == before + 1
    assert scale_up.error is None
    replacements()[-1].phase, replacements()[-1].error = step, LostError("OOM")
    scale_up.tick()
    assert waits_until_the_next(scale_up, clock) == pytest.approx(2, abs=0.25)
    # user code runs only in these steps
    assert (scale_up.error is not None) == (step in ("set up", "start"))


def test_a_start_waits_60_s_for_late_workers_and_a_restart_half_a_second(make, clock):
    scale_up, _ = make(num_workers=3, present=0)
    for grace_s in (60.0, 0.5):
        scale_up.begin()
        scale_up.tick(starting=True)
        first, second, _ = replacements()[-3:]
        first.get_ready()
        assert not scale_up.decide_start(2)
        clock.now += 2.0
        second.get_ready()
        assert not scale_up.decide_start(2)
        clock.now += grace_s - 0.1
        assert not scale_up.decide_start(2)
        clock.now += 0.2
        assert scale_up.decide_start(2)
        scale_up.forget_joined([first.member, second.member])
        scale_up.drop()


@pytest.mark.parametrize(("grow", "grace_s"), [(True, 0.5), (False, 60.0)])
def test_a_start_waits_half_a_second_for_the_successor_of_a_killed_worker(
    make, clock, grow, grace_s
):
    scale_up, _ = make(num_workers=3, present=0, grow=grow)
    scale_up.begin()
    scale_up.tick(starting=True)
    first, second, third = replacements()
    third.error = LostError("killed")
    scale_up.tick(starting=True)
    assert (len(replacements()), scale_up.num_started()) == (4, 3)
    first.get_ready()
    second.get_ready()
    assert not scale_up.decide_start(2)
    clock.now += grace_s - 0.1
    assert not scale_up.decide_start(2)
    clock.now += 0.2
    assert scale_up.decide_start(2)


def test_replacements_start_again_after_a_new_loss(make, clock):
    """Otherwise, waiting for min_workers would be useless."""
    scale_up, group = make(num_workers=3, present=2, max_attempts=1)
    scale_up.tick()
    replacements()[-1].error = ValueError("setup")
    scale_up.tick()
    clock.now += 1000
    group.lose(scale_up, 1)
    scale_up.tick()
    assert len(replacements()) > 1


# ---- joining


def test_a_worker_for_new_room_waits_for_the_cooldown(make, clock):
    scale_up, _ = make(resize_cooldown_s=10.0)
    scale_up.start_cooldown()
    scale_up.tick()
    replacements()[0].get_ready()
    clock.now += 9.9
    assert scale_up.ready() == []
    clock.now += 0.2
    assert scale_up.ready() == [replacements()[0].member]
    scale_up.start_cooldown()
    assert scale_up.ready() == []


def test_the_successor_of_a_lost_worker_joins_without_the_cooldown(make):
    scale_up, group = make(num_workers=3, present=2, resize_cooldown_s=1e6)
    group.lose(scale_up, 1)
    scale_up.start_cooldown()
    scale_up.tick()
    for replacement in replacements():
        replacement.get_ready()
    assert {n.slot: n.replaces_lost for n in replacements()} == {1: True, 2: False}
    assert scale_up.ready() == [n.member for n in replacements() if n.slot == 1]


def test_a_slot_that_was_filled_again_has_the_cooldown(make, clock):
    scale_up, group = make(num_workers=2, present=2, resize_cooldown_s=5.0)
    group.lose(scale_up, 1)
    scale_up.tick()
    replacements()[0].get_ready()
    group.take(replacements()[0])
    scale_up.forget_joined([replacements()[0].member])
    assert not scale_up.num_started()
    assert scale_up.ready() == []
    # the worker leaves, but is not lost
    group.members.pop()
    group.taken.pop()
    scale_up.tick()
    replacements()[1].get_ready()
    assert not replacements()[1].replaces_lost
    assert scale_up.ready() == []  # the join started a cooldown
    clock.now += 5
    assert scale_up.ready() == [replacements()[1].member]
