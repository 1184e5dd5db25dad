"""Handles of workers: calls, liveness, and causes of losses."""

import os
import signal
import subprocess
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import ray
import ray.exceptions

from raysgd._internal.worker_status import WorkerStatus
from raysgd.cluster import worker_handle as members
from raysgd.cluster.host_monitor import HostError
from raysgd.cluster.serialization import pack
from raysgd.cluster.worker import Worker, WorkerLocation
from raysgd.cluster.worker_handle import (
    ActorHandle,
    LocalHandle,
    exit_cause,
    is_worker_failure,
)
from tests.conftest import wait_until
from tests.unit.cluster.calls import request_of
from tests.unit.cluster.test_worker import FakeRunner

PLACE = WorkerLocation(node_id="0123456789abcdef", node_ip="10.0.0.7", pid=77)
NO_PROCESS = 2**30
"""A process ID above the maximum of any system."""


class Actor:
    """A fake Ray actor handle that records calls."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return Method(self, name)


class Method:
    """An actor method without `options`, because Ray Client supports fewer of them."""

    def __init__(self, actor, name):
        self.actor, self.name = actor, name

    def remote(self, *args, **kwargs):
        self.actor.calls.append((self.name, args, kwargs))
        return self

    def future(self):
        return f"future of {self.name}"


@pytest.fixture
def member(monkeypatch):
    """A member with a fake actor. Ray seems to be initialized."""
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    member = ActorHandle(Actor())
    member.location = PLACE
    return member


def test_a_thread_member_works_in_a_thread_of_its_own():
    member = LocalHandle(has_thread=True)
    member.submit_work(Worker.create_runner, None, FakeRunner(), None, []).result(20)
    gate = threading.Event()
    busy = member.submit_work(Worker.handle, request_of("run", function=lambda: gate.wait(20)))
    # while the work thread is busy
    assert member.submit_control(Worker.status).result(20) == WorkerStatus()
    gate.set()
    assert busy.result(20).unpack() is True
    asked = member.submit_work(Worker.handle, request_of("run", function=threading.get_ident))
    assert asked.result(20).unpack() != threading.get_ident()
    member._thread.shutdown()  # as Python does at its exit
    assert member.submit_work(Worker.teardown).result(0) is None


def test_calls_of_a_worker_fail_when_its_host_is_lost(member, monkeypatch):
    answers = [Future() for _ in range(4)]
    monkeypatch.setattr(Method, "future", lambda method: answers[len(member.actor.calls) - 1])
    member.watch = object()
    done = member.submit_work(Worker.handle)
    pending = [member.submit_control(method) for method in (Worker.status, Worker.stacks)]
    answers[0].set_result(7)
    member._fail_calls(HostError("gone"))
    answers[1].set_result(8)  # too late
    assert done.result() == 7
    for answer in (*pending, member.submit_work(Worker.handle)):
        with pytest.raises(HostError, match="gone"):
            answer.result(0)


def test_a_large_argument_travels_through_ray_s_object_store_once(member, monkeypatch):
    monkeypatch.setattr(ray, "put", lambda value: "its place in the store")
    large, small = pack(bytes(2**21)), pack(1)
    for _ in range(2):
        member.submit_work(Worker.handle, large, small)
    assert member.actor.calls == [("handle", ("its place in the store", small), {})] * 2


def test_without_ray_a_call_is_an_error_and_does_not_start_ray(member, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "kill", lambda actor: pytest.fail("that would start Ray"))
    for call in (member.submit_work, member.submit_control, member.execute):
        with pytest.raises(RuntimeError, match="Create a new trainer"):
            call("status")
    member.kill()
    assert member.actor.calls == []
    assert not member.can_be_called


def test_a_signal_says_whether_the_process_is_there(member, monkeypatch):
    monkeypatch.setattr(members, "_is_here", lambda location: True)
    for pid, there in ((os.getpid(), True), (NO_PROCESS, False)):
        member.location = WorkerLocation(node_id="a", node_ip="10.0.0.7", pid=pid)
        assert member.signal(0) is there


def test_only_a_stopped_process_counts_as_stopped(member, monkeypatch):
    monkeypatch.setattr(members, "_is_here", lambda location: True)
    with subprocess.Popen(["sleep", "60"]) as process:
        member.location = WorkerLocation(node_id="a", node_ip="10.0.0.7", pid=process.pid)
        assert not member.ask_if_stopped().result(10)
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: member.ask_if_stopped().result(10))
        process.kill()


def test_worker_without_a_known_place_can_be_killed(member, monkeypatch):
    killed = []
    monkeypatch.setattr(ray, "kill", killed.append)
    del member.location
    member.kill_process()
    assert killed == [member.actor]


def test_killing_a_worker_ends_its_process_and_the_watch_on_its_host(member, monkeypatch):
    ended = []
    monkeypatch.setattr(ray, "kill", ended.append)
    member.watch = SimpleNamespace(close=lambda: ended.append("watch"))
    member.kill()
    assert ended == ["watch", member.actor]


def test_killing_a_remote_worker_does_not_wait_for_the_ray_head(member, monkeypatch):
    killed, answers = [], threading.Event()
    monkeypatch.setattr(ray, "kill", killed.append)
    monkeypatch.setattr(members, "_SIGNAL_S", 0.01)
    monkeypatch.setattr(members, "_is_here", lambda location: False)

    def as_task(function, node_id):
        if not answers.wait(5):
            pytest.fail("it was waited for")
        return lambda *arguments: True

    monkeypatch.setattr(members, "_as_task", as_task)
    try:
        leaving = member.exit_process(0.0)
        member.kill_process()
        assert not leaving.done()
        assert killed == [member.actor]
    finally:
        answers.set()


def test_exit_cause_is_one_line_of_the_error_of_ray():
    said = (
        "The actor died unexpectedly before finishing this task.\n\tpid: 77\n"
        "The actor is dead because its worker process has died. Worker exit detail: Worker exits "
        "with code 2. Some common causes include: (1) the process is killed"
    )
    unknown = WorkerLocation(node_id="", node_ip="")
    assert exit_cause(RuntimeError(said), unknown) == "Worker exits with code 2."
    assert exit_cause(RuntimeError(said), PLACE) == "process 77: Worker exits with code 2."
    assert exit_cause(RuntimeError("gone\n"), unknown) == "gone"
    died = RuntimeError("It died.\n\tclass_name: W\n\tactor_id: 6\n")
    assert exit_cause(died, unknown) == "It died."
    assert exit_cause(RuntimeError(), unknown) == "RuntimeError"


def test_exit_cause_says_that_ray_killed_a_worker_for_memory():
    said = (
        "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: "
        "10.0.0.2, ID: 7ffe) was 9.03GB used / 9.50GB limit (0.951)\nOOM kill reason: Memory "
        "usage exceeded threshold\nRefer to the documentation on how to address the issue: https"
    )
    cause = exit_cause(ray.exceptions.OutOfMemoryError(said), PLACE)
    assert cause.startswith("process 77: Ray killed it because the memory of its node was nearly")
    assert "full (9.03GB used / 9.50GB). Give the node more memory" in cause
    other = exit_cause(ray.exceptions.OutOfMemoryError("Task was killed"), PLACE)
    assert "was nearly full. Give" in other


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (ray.exceptions.ActorDiedError(), True),
        (ray.exceptions.ActorUnavailableError("gone", None), True),
        (ray.exceptions.WorkerCrashedError(), True),
        (ray.exceptions.NodeDiedError("node"), True),
        (ray.exceptions.OutOfMemoryError("Task was killed due to the node running low"), True),
        (ray.exceptions.GetTimeoutError("late"), False),
        (RuntimeError("bad batch"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_loss_is_distinguished_from_other_errors(error, lost):
    assert is_worker_failure(error) is lost


@pytest.mark.parametrize(("interrupts", "lives"), [(True, True), (False, False), (None, False)])
def test_worker_that_ray_cannot_reach_may_live_if_its_host_is_watched(member, interrupts, lives):
    if interrupts is not None:  # whether the worker interrupts its calls when it loses the driver
        member._monitor = SimpleNamespace(interrupts_calls=interrupts)
        member.watch = object()
    assert member.may_be_alive(ray.exceptions.ActorUnavailableError("reset", None)) is lives
    assert not member.may_be_alive(ray.exceptions.ActorDiedError())


def test_worker_is_reached_on_the_host_of_the_driver_once_its_host_is_known(member):
    assert LocalHandle().is_reachable
    assert member.is_reachable
    assert not ActorHandle(Actor()).is_reachable
    member.watch = SimpleNamespace(is_reachable=False)
    assert not member.is_reachable
