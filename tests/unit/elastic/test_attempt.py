"""One attempt at a call: the cause of a failure, and its consequences."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import ray.exceptions

from raysgd._internal.progress import Progress
from raysgd.cluster.clock import Clock
from raysgd.cluster.worker import Outcome
from raysgd.elastic.group_rpc import Attempt, GroupRpc


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name in ("ROOT_CAUSE_S", "_RETURN_S", "_NODE_LOSS_S"):
        monkeypatch.setattr(f"raysgd.elastic.group_rpc.{name}", 0.01)


def outcome(kind, payload=None):
    return Outcome(kind, payload, Progress())


class Named(str):
    """A worker that may be alive if Ray reports it as unavailable, as it does `num_lost` times."""

    num_lost = 2

    def may_be_alive(self, error):
        return isinstance(error, ray.exceptions.ActorUnavailableError)

    def submit_control(self, method):
        answer, self.num_lost = Future(), self.num_lost - 1
        if self.num_lost < 0:
            answer.set_result(Progress())
        else:
            answer.set_exception(ray.exceptions.ActorUnavailableError("no connection", b"0" * 16))
        return answer


def attempt_of(*names):
    futures = {Named(name): Future() for name in names}
    return Attempt(futures, Clock()), futures


def test_a_worker_whose_answer_is_lost_lives_and_is_asked_again():
    group = SimpleNamespace(clock=Clock(), is_cut_off=lambda: False)
    rpc = GroupRpc(SimpleNamespace(group=group), lambda: None, 1.0)
    assert rpc.probe_or_kill([Named("a")]) == ({"a": Progress()}, {})


def test_the_first_failure_in_time_is_the_one_to_raise():
    attempt, futures = attempt_of("a", "b")
    futures["b"].set_result(outcome("user", ValueError("the reason")))
    attempt.collect(0)
    assert attempt.has_failed
    futures["a"].set_result(outcome("user", KeyError("a consequence")))
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
    rpc.interrupt_failed(attempt)
    assert (attempt.lost, attempt.pending) == ({}, {})
