"""The steps of a replacement, from a free slot to a worker that is ready to join."""

from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest

from raysgd._internal.context import Progress, WorkerContext
from raysgd.cluster.group_options import GroupOptions
from raysgd.cluster.worker import Outcome, WorkerInfo
from raysgd.elastic.scale_up import Replacement
from tests.unit.cluster.clock import ManualClock

PLACE = WorkerInfo(node_id="n", node_ip="10.0.0.9", gpu_ids=("3",))


class FakeSlot:
    is_ready = True


class FakeMember:
    """A worker that answers when the test says so."""

    info = WorkerInfo(node_id="", node_ip="")

    def __init__(self):
        self.asked = {}
        self.arguments = {}

    def work(self, method, *arguments):
        method = method.__name__
        self.arguments[method] = arguments
        self.asked[method] = Future()
        return self.asked[method]

    control = work

    def locate(self, info):
        self.info = info

    def answer(self, method, kind="ok", payload=None):
        result = PLACE if method == "info" else Outcome(kind, payload, Progress())
        self.asked[method].set_result(result)


class FakeGroup:
    def __init__(self, clock):
        self.clock = clock
        self.options = GroupOptions(num_workers=3, num_cpus=2)
        self.made = []
        self.members = []
        self.error = None

    def new_member(self, slot):
        if self.error is not None:
            raise self.error
        self.made.append((slot, FakeMember()))
        return self.made[-1][1]


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def group(clock):
    return FakeGroup(clock)


@pytest.fixture
def scale_up(group):
    journal = SimpleNamespace(generation=4)
    created = ("hook", "runner")
    return SimpleNamespace(
        group=group, journal=journal, created=created, timeout_s=30.0, together=False
    )


@pytest.fixture
def replacement(scale_up):
    return Replacement(scale_up, FakeSlot(), 2, 3, replaces_lost=True)


def answer_all(replacement, *methods):
    replacement.advance()
    for method in methods:
        replacement.member.answer(method)
        replacement.advance()


def test_replacement_knows_its_rank_and_sets_up_alone(replacement):
    answer_all(replacement, "info")
    context, rendezvous, leader, alone = replacement.member.arguments["join_group"]
    assert replacement.member.info == PLACE
    assert (rendezvous, leader, alone) == (None, None, True)
    assert (context.world_rank, context.world_size, context.generation) == (2, 3, 4)
    assert (context.node_ip, context.visible_gpus, context.gpu_index) == ("10.0.0.9", ("3",), 0)
    assert context.distributed
    assert context.num_cpus == 2


def test_a_worker_that_cannot_be_started_is_an_error(replacement, group):
    group.error = RuntimeError("the placement group is gone")
    replacement.advance()
    assert replacement.error is group.error
    assert replacement.member is None


def test_ctrl_c_during_the_start_does_not_make_a_replacement_ready(replacement, group):
    group.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        replacement.advance()
    group.error = None
    replacement.advance()
    assert not replacement.is_ready
    assert replacement.error is not None


def test_a_step_that_takes_too_long_is_an_error(replacement, clock):
    answer_all(replacement, "info", "create")
    clock.now += 31
    replacement.advance()
    assert "Worker 2 took longer than 30 s to set up." in str(replacement.error)
    assert "raise timeout_s" in str(replacement.error)


def test_a_worker_that_does_not_come_up_says_how_to_wait_longer(replacement, clock):
    replacement.advance()
    clock.now += 101
    replacement.advance()
    assert "took longer than 100 s to come up" in str(replacement.error)
    assert "set SGD_PLACEMENT_GROUP_TIMEOUT_S" in str(replacement.error)


def test_replacement_in_a_start_is_ready_after_create(scale_up):
    scale_up.together = True
    replacement = Replacement(scale_up, FakeSlot(), 0, 2, replaces_lost=True)
    answer_all(replacement, "info", "create")
    assert replacement.is_ready
    assert list(replacement.member.asked) == ["info", "create"]
    replacement.context = prepared = WorkerContext(visible_gpus=("1", "3"), gpu_index=1)
    scale_up.journal.generation = 7
    scale_up.together = replacement.is_ready = False
    replacement.advance()
    assert not replacement.is_ready
    # the GPUs stay the first ones, because its process sees these
    context = replace(prepared, generation=7)
    assert replacement.member.arguments["join_group"] == (context, None, None, True)
    replacement.member.answer("join_group")
    replacement.advance()
    assert replacement.is_ready
