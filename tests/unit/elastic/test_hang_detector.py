"""Logs of workers that hang, and detection of collectives that cannot end."""

from concurrent.futures import Future

import pytest

from raysgd._internal.worker_status import ProcessStatus, ReportedPosition, WorkerStatus
from raysgd.cluster.worker import Outcome, Worker
from raysgd.elastic.call_executor import HangDetector
from raysgd.elastic.group_rpc import Attempt
from tests.unit.cluster.clock import ManualClock

WAITING = 'File "distributed.py", in all_reduce'


class FakeMember:
    node_name = "node x"

    def submit_control(self, method):
        assert method is Worker.stacks
        future = Future()
        future.set_result(WAITING)
        return future


@pytest.fixture
def clock():
    return ManualClock()


def watched(clock, *members):
    futures = {member: Future() for member in members}
    attempt = Attempt(futures, clock)
    ranks = {member: rank for rank, member in enumerate(members)}
    return HangDetector(attempt, ranks, clock), attempt, futures


def test_stacks_are_logged_once_per_standstill(clock, caplog):
    member = FakeMember()
    monitor, *_ = watched(clock, member)
    for step in range(2):
        for _ in range(4):
            monitor.log_hang({member: WorkerStatus(ReportedPosition(global_step=step))})
            clock.now += 40
    shown = [record.getMessage() for record in caplog.records]
    assert len(shown) == 2
    assert all("No batch finished for 80 s. Worker 0" in text and WAITING in text for text in shown)


# ---- collectives that cannot end


def waits(members, *states):
    """Return the statuses of workers: "held", the number of a collective, or None (computing).

    "held 3" waits for the driver while its collective 3 is running.
    """
    found = {}
    for member, state in zip(members, states, strict=True):
        said = str(state)
        number = said.removeprefix("held ")
        collective = int(number) if number.isdecimal() else None
        process = ProcessStatus(said.startswith("held"), current_collective=collective)
        found[member] = WorkerStatus(process=process)
    return found


@pytest.fixture
def uneven(clock):
    """Rank 0 has returned, ranks 1 and 2 have not."""
    members = [FakeMember() for _ in range(3)]
    monitor, attempt, futures = watched(clock, *members)
    futures[members[0]].set_result(Outcome("ok", None, WorkerStatus()))
    attempt.collect(1.0)
    return monitor, members


def test_a_collective_that_a_returned_worker_will_not_join_is_blocked(clock, uneven):
    monitor, members = uneven
    assert monitor.find_deadlock(waits(members, "held", 3, 3)) is None
    clock.now += 0.6
    assert monitor.find_deadlock(waits(members, "held", 3, 3)) is None
    clock.now += 0.2
    said = monitor.find_deadlock(waits(members, "held", 3, 3))
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
    monitor.find_deadlock(waits(members, "held", 3, 3))
    clock.now += 0.6
    assert monitor.find_deadlock(waits(members, *states)) is None
    clock.now += 0.6
    assert monitor.find_deadlock(waits(members, "held", 3, 3)) is None


def test_a_collective_is_not_blocked_while_a_worker_does_not_answer(clock, uneven):
    monitor, members = uneven
    for _ in range(2):
        statuses = waits(members, "held", 3, 3)
        del statuses[members[2]]
        assert monitor.find_deadlock(statuses) is None
        clock.now += 1.0
