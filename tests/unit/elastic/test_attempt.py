"""One attempt at a call: the cause of a failure, and its consequences."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import ray.exceptions

from raysgd._internal.worker_status import WorkerStatus
from raysgd.cluster.clock import Clock
from raysgd.cluster.worker import Outcome
from raysgd.elastic.group_rpc import Attempt, GroupRpc
from raysgd.errors import CollectiveError


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name in ("ROOT_CAUSE_S", "_RETURN_S", "_NODE_LOSS_S"):
        monkeypatch.setattr(f"raysgd.elastic.group_rpc.{name}", 0.01)


def outcome(kind, payload=None, **values):
    return Outcome(kind, payload, WorkerStatus(), **values)


OK, PAUSED = outcome("ok"), outcome("paused")
CUT_OFF, INTERRUPTED = outcome("cut_off", OSError()), outcome("interrupted", RuntimeError())
NO_MEMORY = outcome("user_error", MemoryError(), min_splits=2)
BAD_BATCH = outcome("user_error", ValueError())
LOST = ray.exceptions.ActorDiedError()


class Named(str):
    """A worker that may be alive if Ray reports it as unavailable, as it does `num_lost` times."""

    num_lost = 2

    def may_be_alive(self, error):
        return isinstance(error, ray.exceptions.ActorUnavailableError)

    def submit_control(self, method):
        answer, self.num_lost = Future(), self.num_lost - 1
        if self.num_lost < 0:
            answer.set_result(WorkerStatus())
        else:
            answer.set_exception(ray.exceptions.ActorUnavailableError("no connection", b"0" * 16))
        return answer


def attempt_of(*names):
    futures = {Named(name): Future() for name in names}
    return Attempt(futures, Clock()), futures


def test_a_worker_whose_answer_is_lost_lives_and_is_asked_again():
    group = SimpleNamespace(clock=Clock(), is_cut_off=lambda: False)
    rpc = GroupRpc(SimpleNamespace(group=group), lambda: None, 1.0)
    assert rpc.probe_or_kill([Named("a")]) == ({"a": WorkerStatus()}, {})


def test_the_first_failure_in_time_is_the_one_to_raise():
    attempt, futures = attempt_of("a", "b")
    futures["b"].set_result(outcome("user_error", ValueError("the reason")))
    attempt.collect(0)
    assert attempt.has_failed
    futures["a"].set_result(outcome("user_error", KeyError("a consequence")))
    attempt.collect(0)
    assert attempt.first_user_error[0] == "b"
    assert isinstance(attempt.make_error(), ValueError)


def test_a_lost_answer_is_no_lost_worker_and_stops_the_others(monkeypatch):
    attempt, futures = attempt_of("a", "b")
    futures["a"].set_exception(ray.exceptions.ActorUnavailableError("reset", None))
    attempt.collect(0)
    assert attempt.has_failed
    assert attempt.why_new_generation  # so that the call is repeated, if possible
    interrupted = outcome("interrupted", RuntimeError())
    rpc = GroupRpc(SimpleNamespace(group=SimpleNamespace(clock=Clock())), None, 1.0)
    monkeypatch.setattr(rpc, "interrupt", lambda _: futures["b"].set_result(interrupted))
    rpc.interrupt_survivors(attempt)
    assert (attempt.lost, attempt.pending) == ({}, {})


@pytest.mark.parametrize("can_repeat", [False, True])
@pytest.mark.parametrize(
    ("ends", "is_replay", "status", "raised"),
    [
        ([OK, OK], False, "ready", None),
        ([OK, OK], True, "ready", None),
        ([OK, PAUSED], False, "ready", None),
        ([LOST, NO_MEMORY], False, "broken", None),
        ([LOST, BAD_BATCH], False, "broken", None),
        ([CUT_OFF, NO_MEMORY], False, "broken", None),
        ([CUT_OFF, BAD_BATCH], False, "broken", ValueError),
        ([INTERRUPTED, CUT_OFF], False, "broken", "if not can_repeat"),
        ([INTERRUPTED, OK], False, "broken", CollectiveError),
    ],
)
def test_the_end_of_an_attempt_decides_what_follows(ends, is_replay, status, raised, can_repeat):
    attempt, futures = attempt_of("a", "b")
    for future, end in zip(futures.values(), ends, strict=True):
        (future.set_exception if end is LOST else future.set_result)(end)
    attempt.collect(0)
    result = attempt.make_result(is_replay, can_repeat)
    assert result.group_status == status
    assert result.outcomes == (ends if ends == [OK, OK] and not is_replay else None)
    assert result.lost == ({"a": LOST} if LOST in ends else {})
    if raised == "if not can_repeat":
        raised = None if can_repeat else CollectiveError
    assert type(result.error) is (raised or type(None))
