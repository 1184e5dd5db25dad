"""A newcomer on its way: from room to a worker that waits to join, without ever waiting for it."""

from concurrent.futures import Future

import pytest

from raysgd.context import Progress, WorkerContext
from raysgd.elastic.policies import Place
from raysgd.execution.recruit import Recruit
from raysgd.execution.worker import Outcome
from tests.unit.execution.clock import ManualClock

PLACE = Place(node_id="n", node_ip="10.0.0.9", gpu_ids=("3",))
CONTEXT = WorkerContext(world_rank=2, world_size=3, generation=4, distributed=True, num_cpus=2)


class FakeSlot:
    def __init__(self):
        self.ready = True
        self.num_looks = 0

    @property
    def is_ready(self):
        self.num_looks += 1
        return self.ready


class FakeMember:
    """A worker whose answers the test gives."""

    def __init__(self):
        self.asked = {}
        self.arguments = {}

    def work(self, method, *arguments):
        self.arguments[method] = arguments
        self.asked[method] = Future()
        return self.asked[method]

    control = work

    def answer(self, method, kind="ok", payload=None):
        result = PLACE if method == "place" else Outcome(kind, payload, Progress())
        self.asked[method].set_result(result)


class FakeGroup:
    def __init__(self, clock):
        self.clock = clock
        self.made = []
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
def recruit(group):
    return Recruit(group, FakeSlot(), CONTEXT, ("hook", "runner"), replaces_lost=True)


def answer_all(recruit, *methods):
    recruit.advance()
    for method in methods:
        recruit.member.answer(method)
        recruit.advance()


def test_no_worker_is_started_before_there_is_room(recruit, group, clock):
    recruit.slot.ready = False
    for _ in range(5):
        recruit.advance()
        clock.now += 1
    assert (group.made, recruit.member, recruit.is_ready) == ([], None, False)
    recruit.slot.ready = True
    recruit.advance()
    assert group.made == [(recruit.slot, recruit.member)]


def test_room_is_looked_for_only_so_often(recruit, clock):
    recruit.slot.ready = False
    for _ in range(100):
        recruit.advance()
        clock.now += 0.01
    assert 3 <= recruit.slot.num_looks <= 6


def test_it_is_ready_when_it_has_set_up_and_not_before(recruit):
    recruit.advance()
    for method in ("place", "create", "prepare"):
        recruit.member.answer(method)
        recruit.advance()
        recruit.advance()
        assert not recruit.is_ready
    recruit.member.answer("enter")
    assert not recruit.is_ready
    recruit.advance()
    assert recruit.is_ready
    assert recruit.error is None
    assert recruit.replaces_lost


def test_it_waits_for_no_answer(recruit):
    """The test would not end otherwise."""
    for _ in range(10):
        recruit.advance()
    assert list(recruit.member.asked) == ["place"]


def test_what_it_does_alone_is_asked_for_at_once(recruit):
    answer_all(recruit, "place")
    assert list(recruit.member.asked) == ["place", "create", "prepare", "enter"]
    assert recruit.member.arguments["create"] == ("hook", "runner")


def test_it_is_told_where_it_will_be_and_sets_up_alone(recruit):
    answer_all(recruit, "place")
    (prepared,) = recruit.member.arguments["prepare"]
    context, rendezvous, leader, alone = recruit.member.arguments["enter"]
    assert recruit.member.place == PLACE
    assert prepared == context
    assert (rendezvous, leader, alone) == (None, None, True)
    assert (context.world_rank, context.world_size, context.generation) == (2, 3, 4)
    assert (context.node_ip, context.visible_gpus, context.gpu_index) == ("10.0.0.9", ("3",), 0)
    assert context.distributed
    assert context.num_cpus == 2


def test_without_gpus_it_has_no_index(recruit):
    recruit.advance()
    recruit.member.asked["place"].set_result(Place(node_id="n", node_ip="1"))
    recruit.advance()
    assert recruit.member.arguments["prepare"][0].gpu_index is None


@pytest.mark.parametrize("failing", ["create", "prepare", "enter"])
def test_an_error_of_the_user_is_kept_as_the_reason(recruit, failing):
    methods = ["place", "create", "prepare", "enter"]
    answer_all(recruit, *methods[: methods.index(failing)])
    recruit.member.answer(failing, "user", ValueError("no such file"))
    for _ in range(3):
        recruit.advance()
    assert isinstance(recruit.error, ValueError)
    assert not recruit.is_ready


def test_the_first_error_counts(recruit):
    answer_all(recruit, "place")
    recruit.member.answer("create", "user", ValueError("no such module"))
    recruit.member.answer("prepare", "user", RuntimeError("hosts nothing"))
    recruit.advance()
    assert "no such module" in str(recruit.error)


@pytest.mark.parametrize("method", ["place", "create", "enter"])
def test_a_worker_that_dies_on_its_way_is_an_error(recruit, method):
    answer_all(recruit, *{"place": [], "create": ["place"]}.get(method, ["place", "create"]))
    recruit.member.asked[method].set_exception(ConnectionError("the actor died"))
    if method == "enter":
        recruit.member.answer("prepare")
    recruit.advance()
    recruit.advance()
    assert isinstance(recruit.error, ConnectionError)
    assert not recruit.is_ready


def test_a_worker_that_cannot_be_started_is_an_error(recruit, group):
    group.error = RuntimeError("the placement group is gone")
    recruit.advance()
    assert recruit.error is group.error
    assert recruit.member is None


def test_ctrl_c_on_its_way_does_not_make_it_ready(recruit, group):
    group.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        recruit.advance()
    group.error = None
    recruit.advance()
    assert not recruit.is_ready
    assert recruit.error is not None


def test_nothing_more_is_done_when_it_is_ready_or_has_failed(recruit):
    answer_all(recruit, "place", "create", "prepare", "enter")
    asked = dict(recruit.member.asked)
    recruit.advance()
    assert recruit.is_ready
    assert recruit.member.asked == asked
