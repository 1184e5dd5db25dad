"""Detection of stuck workers, and of collectives that cannot end."""

from concurrent.futures import Future

import pytest

from raysgd._internal.context import Progress
from raysgd.cluster.worker import Outcome
from raysgd.elastic.attempt import Attempt
from raysgd.elastic.health import HealthMonitor
from tests.unit.cluster.clock import ManualClock

TIMEOUT_S = 10.0
WAITING = 'File "distributed.py", in all_reduce'
WORKING = 'File "train.py", line 3, in train_batch'


class FakeMember:
    """A worker that sends its stack, or never answers if the stack is None."""

    remote = True

    def __init__(self, stack=WORKING, remote=True):
        self.stack = stack
        self.remote = remote
        self.name = "node x"
        self.num_asked = 0

    def control(self, method):
        assert method == "stacks"
        self.num_asked += 1
        future = Future()
        if isinstance(self.stack, Exception):
            future.set_exception(self.stack)
        elif self.stack is not None:
            future.set_result(self.stack)
        return future


@pytest.fixture
def clock():
    return ManualClock()


def watched(clock, *members, hang_timeout_s=TIMEOUT_S, has_batches=True):
    futures = {member: Future() for member in members}
    attempt = Attempt(futures, clock)
    ranks = {member: rank for rank, member in enumerate(members)}
    return HealthMonitor(attempt, ranks, hang_timeout_s, clock, has_batches), attempt, futures


def steps(members, *counts):
    return {
        member: Progress(global_step=count) for member, count in zip(members, counts, strict=True)
    }


def test_no_worker_is_stuck_before_the_timeout(clock):
    members = [FakeMember(), FakeMember()]
    monitor, *_ = watched(clock, *members)
    assert monitor.stuck(steps(members, 3, 3)) is None
    clock.now += TIMEOUT_S - 0.1
    assert monitor.stuck(steps(members, 3, 3)) is None
    clock.now += 0.2
    assert monitor.stuck(steps(members, 3, 3)) == members
    assert [member.num_asked for member in members] == [1, 1]


@pytest.mark.parametrize("moved", [{"global_step": 4}, {"global_step": 3, "num_batches": 1}])
def test_a_batch_of_any_worker_resets_the_timeout(clock, moved):
    members = [FakeMember(), FakeMember()]
    monitor, *_ = watched(clock, *members)
    monitor.stuck(steps(members, 3, 3))
    for _ in range(3):
        clock.now += TIMEOUT_S - 1
        progress = {members[0]: Progress(global_step=3), members[1]: Progress(**moved)}
        assert monitor.stuck(progress) is None
        moved["global_step"] += 1
    assert members[0].num_asked == 0


def test_stacks_are_logged_once_per_standstill(clock, caplog):
    member = FakeMember(WAITING)
    monitor, *_ = watched(clock, member, hang_timeout_s=None)
    for step in range(2):
        for _ in range(3):
            assert monitor.stuck(steps([member], step)) is None
            clock.now += 40
    shown = [record.getMessage() for record in caplog.records]
    assert len(shown) == 2
    assert all("No batch finished for 80 s. Worker 0" in text and WAITING in text for text in shown)


def test_a_call_without_batches_has_no_timeout(clock):
    member = FakeMember()
    monitor, *_ = watched(clock, member, has_batches=False)
    monitor.stuck(steps([member], 3))
    clock.now += 1e9
    assert monitor.stuck(steps([member], 3)) is None
    assert member.num_asked == 0


def test_the_worker_outside_of_the_collective_is_stuck(clock):
    members = [FakeMember(WAITING), FakeMember(WORKING), FakeMember(WAITING)]
    monitor, *_ = watched(clock, *members)
    monitor.stuck(steps(members, 3, 3, 3))
    clock.now += TIMEOUT_S
    assert monitor.stuck(steps(members, 3, 3, 3)) == [members[1]]


@pytest.mark.parametrize("silence", [None, RuntimeError("the actor died")])
def test_silent_workers_are_stuck(clock, silence):
    members = [FakeMember(WAITING), FakeMember(WORKING), FakeMember(silence)]
    monitor, *_ = watched(clock, *members)
    monitor.stuck(steps(members, 3, 3, 3))
    clock.now += TIMEOUT_S
    assert monitor.stuck(steps(members[:2], 3, 3)) == [members[2]]


def test_no_worker_is_stuck_if_all_are_in_a_collective(clock):
    members = [FakeMember(WAITING), FakeMember(WAITING)]
    monitor, *_ = watched(clock, *members)
    monitor.stuck(steps(members, 3, 3))
    clock.now += TIMEOUT_S
    assert monitor.stuck(steps(members, 3, 3)) == []


def test_a_single_worker_in_a_collective_is_stuck(clock):
    members = [FakeMember(WAITING)]
    monitor, *_ = watched(clock, *members)
    monitor.stuck(steps(members, 3))
    clock.now += TIMEOUT_S
    assert monitor.stuck(steps(members, 3)) == members


def test_a_worker_that_waits_for_one_that_has_returned_is_not_stuck(clock):
    members = [FakeMember(WORKING), FakeMember(WAITING)]
    monitor, attempt, futures = watched(clock, *members)
    futures[members[0]].set_result(Outcome("ok", None, Progress()))
    attempt.settle(1.0)
    monitor.stuck(steps(members, 3, 3))
    clock.now += TIMEOUT_S
    assert monitor.stuck(steps(members, 3, 3)) == []


def test_a_worker_in_the_drivers_process_is_never_stuck(clock):
    members = [FakeMember(WORKING, remote=False), FakeMember(WAITING)]
    monitor, *_ = watched(clock, *members)
    monitor.stuck(steps(members, 3, 3))
    clock.now += TIMEOUT_S
    assert monitor.stuck(steps(members, 3, 3)) == []


def test_workers_that_never_answer_are_stuck(clock):
    """All workers may hang in the first batch, before the first poll."""
    members = [FakeMember(None), FakeMember(None)]
    monitor, *_ = watched(clock, *members)
    found = []
    for _ in range(3):
        found.append(monitor.stuck({}))
        clock.now += TIMEOUT_S
    assert members in found


# ---- collectives that cannot end


def waits(members, *states):
    """Return the progress of workers: "held", the number of a collective, or None (computing).

    "held 3" waits for the driver while its collective 3 is running.
    """
    found = {}
    for member, state in zip(members, states, strict=True):
        said = str(state)
        number = said.removeprefix("held ")
        found[member] = Progress(
            blocked_on_driver=said.startswith("held"),
            collective=int(number) if number.isdecimal() else None,
        )
    return found


@pytest.fixture
def uneven(clock):
    """Rank 0 has returned, ranks 1 and 2 have not."""
    members = [FakeMember() for _ in range(3)]
    monitor, attempt, futures = watched(clock, *members, hang_timeout_s=None)
    futures[members[0]].set_result(Outcome("ok", None, Progress()))
    attempt.settle(1.0)
    return monitor, members


def test_a_collective_that_a_returned_worker_will_not_join_is_blocked(clock, uneven):
    monitor, members = uneven
    assert monitor.blocked(waits(members, "held", 3, 3)) is None
    clock.now += 0.6
    assert monitor.blocked(waits(members, "held", 3, 3)) is None
    clock.now += 0.2
    said = monitor.blocked(waits(members, "held", 3, 3))
    assert "Workers 1, 2 wait in a collective for workers 0" in said


@pytest.mark.parametrize(
    "states",
    [
        ("held", 3, None),  # one computes, and may join it
        (None, 3, 3),  # rank 0 has continued
        ("held", 4, 3),  # another collective has begun
        ("held 3", 3, 3),  # rank 0 has started it too
    ],
)
def test_a_collective_that_may_end_is_not_blocked(clock, uneven, states):
    monitor, members = uneven
    monitor.blocked(waits(members, "held", 3, 3))
    clock.now += 0.6
    assert monitor.blocked(waits(members, *states)) is None
    clock.now += 0.6
    assert monitor.blocked(waits(members, "held", 3, 3)) is None


def test_a_collective_is_not_blocked_while_a_worker_does_not_answer(clock, uneven):
    monitor, members = uneven
    for _ in range(2):
        progress = waits(members, "held", 3, 3)
        del progress[members[2]]
        assert monitor.blocked(progress) is None
        clock.now += 1.0
