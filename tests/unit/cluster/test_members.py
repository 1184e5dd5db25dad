"""Handles of workers: what they say about a worker, and calls that reach it."""

import linecache
import os
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import ray
import ray.exceptions

from raysgd.cluster import channels, members
from raysgd.cluster.channels import Channels, Served
from raysgd.cluster.members import (
    ActorMember,
    InlineMember,
    ThreadMember,
    is_loss,
    loss_cause,
)
from raysgd.cluster.pulses import Terms
from raysgd.context import Progress
from raysgd.elastic.policies import WorkerInfo
from tests.unit.cluster.serving import serve

PLACE = WorkerInfo(node_id="0123456789abcdef", node_ip="10.0.0.7", pid=77)
NO_PROCESS = 2**30
"""Above what any system numbers its processes with."""


class FakeRunner:
    """A runner whose method `run` calls what it is given."""

    imports = ()

    def progress(self):
        return Progress()

    def run(self, function):
        return function()


class Actor:
    """A handle of Ray's that notes the calls."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return Method(self, name)


class Method:
    """Has no options, of which a handle of Ray Client knows fewer."""

    def __init__(self, actor, name):
        self.actor, self.name = actor, name

    def remote(self, *args, **kwargs):
        self.actor.calls.append((self.name, args, kwargs))
        return self

    def future(self):
        return f"future of {self.name}"


@pytest.fixture
def member(monkeypatch):
    """A member of an actor that only notes what it is told, in a process that has Ray."""
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    member = ActorMember(Actor())
    member.info = PLACE
    return member


def test_an_inline_member_works_in_the_calling_thread():
    member = InlineMember()
    member.work("create", None, FakeRunner(), None, [])
    future = member.work("call", "run", {"function": threading.get_ident})
    assert future.done()
    assert future.result().value() == threading.get_ident()
    assert isinstance(member.worker.runner, FakeRunner)
    assert member.info.in_driver
    assert not member.remote
    member.kill()
    assert "127.0.0.1" in member.name


def test_a_thread_member_works_beside_the_calling_thread():
    member = ThreadMember()
    member.work("create", None, FakeRunner(), None, []).result(20)
    gate = threading.Event()
    busy = member.work("call", "run", {"function": lambda: gate.wait(20)})
    assert member.control("progress").result(20) == Progress()  # while it is busy
    gate.set()
    assert busy.result(20).value() is True
    ident = member.work("call", "run", {"function": threading.get_ident}).result(20).value()
    assert ident != threading.get_ident()
    member.kill()


def test_a_worker_in_this_process_has_none_of_its_own():
    member = InlineMember()
    with pytest.raises(RuntimeError, match=r"\(127\.0\.0\.1\): .*no process of its own"):
        member.signal(signal.SIGKILL)
    with pytest.raises(RuntimeError, match="no actor"):
        member.execute(print)
    assert member.alive


def test_work_and_control_are_calls_of_the_actor(member):
    assert member.work("call", "train") == "future of call"
    member.control("progress")
    member.execute(print, 1, end="")
    assert member.actor.calls == [
        ("call", ("train",), {}),
        ("progress", (), {}),
        ("execute", (print, 1), {"end": ""}),
    ]


class Hosted:
    """What an actor hosts; it notes its calls."""

    def __init__(self):
        self.calls = []
        self.gate = threading.Event()
        self.gate.set()

    def call(self, method, arguments):
        assert self.gate.wait(20)
        self.calls.append((method, arguments))
        return len(self.calls)

    def execute(self, function):
        self.calls.append(function)

    def serve(self, address):
        self.calls.append("a channel")
        return serve(address, self.call)


class LivingActor(Actor):
    """An actor with a work thread, in this process."""

    def __init__(self):
        super().__init__()
        self.hosted = Hosted()
        self.work = ThreadPoolExecutor(1)

    def __getattr__(self, name):
        return LivingMethod(self, name)


class LivingMethod(Method):
    def remote(self, *args):
        self.answer = self.actor.work.submit(getattr(self.actor.hosted, self.name), *args)
        return self

    def future(self):
        return self.answer


@pytest.fixture
def reached(monkeypatch):
    """A member that is reached by channels, and what its actor hosts."""
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    actor, opened = LivingActor(), Channels()
    member = ActorMember(actor, opened)
    member.info = WorkerInfo(node_id="a", node_ip="127.0.0.1", pid=77)
    yield member, actor.hosted
    opened.close()
    actor.work.shutdown()


def test_calls_that_are_made_often_go_by_a_line(reached):
    member, hosted = reached
    for number in range(3):
        assert member.work("call", "train", b"%d" % number, frequent=True).result(20) == 2 + number
    calls = [("train", b"0"), ("train", b"1"), ("train", b"2")]
    assert hosted.calls == ["a channel", *calls]


def test_what_goes_by_ray_follows_on_what_goes_by_the_line(reached):
    member, hosted = reached
    hosted.gate.clear()
    answers = [
        member.work("call", "train", b"1", frequent=True),
        member.work("call", "state_dict", b"2"),
        member.work("call", "train", b"3", frequent=True),
        member.work("call", "train", b"4", frequent=True),  # while the third is under way
        member.work("call", "teardown", b"5"),
    ]
    assert not any(answer.done() for answer in answers)
    hosted.gate.set()
    for answer in answers:
        answer.result(20)
    done = [call[1] for call in hosted.calls if call != "a channel"]
    assert done == [b"1", b"2", b"3", b"4", b"5"]


def test_what_is_large_or_shared_goes_by_ray(reached):
    member, hosted = reached
    shared = object()  # one of Ray's references, say
    for arguments in (bytes(2**14), shared):
        member.work("call", "train", arguments, frequent=True).result(20)
        assert hosted.calls.pop() == ("train", arguments)
    assert not hosted.calls


def test_functions_of_the_user_follow_on_what_goes_by_the_line(reached):
    member, hosted = reached
    member.work("call", "train", b"1", frequent=True).result(20)
    member.execute("a function").future().result(20)
    member.work("call", "train", b"2", frequent=True).result(20)
    done = [call for call in hosted.calls if call != "a channel"]
    assert done == [("train", b"1"), "a function", ("train", b"2")]


def test_ctrl_c_at_any_moment_leaves_a_worker_that_can_be_called(reached):
    """In each line of ours in turn; what was interrupted is carried out at once or not at all."""
    member, hosted = reached
    interrupted = True
    number = 0
    while interrupted:
        number += 1
        hosted.calls.clear()
        member.work("call", "train", b"0", frequent=True).result(20)
        interrupted = interrupts(
            number,
            lambda: (
                member.work("call", "train", b"1", frequent=True).result(20),
                member.work("call", "state_dict", b"2").result(20),
                member.work("call", "train", b"3", frequent=True).result(20),
            ),
        )
        if not interrupted:
            break
        member.work("call", "enter", b"4").result(20)
        member.work("call", "train", b"5", frequent=True).result(20)
        done = [call[1] for call in hosted.calls if call != "a channel"]
        assert done == sorted(set(done)), number
        assert done[-2:] == [b"4", b"5"], number
    assert number > 50


def interrupts(number, function):
    """Raise KeyboardInterrupt before so many lines of ours are carried out; say if it came."""
    files, left = (channels.__file__, members.__file__), [number]

    def trace(frame, event, argument):
        if frame.f_code.co_filename not in files:
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        # Python lets no signal in between the last line of a with block and its exit
        if event == "line" and "with self._" not in line:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_a_call_that_was_given_up_does_not_come_after_what_followed(reached):
    member, hosted = reached
    hosted.serve = lambda address: hosted.gate.wait(20) and Served(0, None)
    hosted.gate.clear()
    given_up = member.work("call", "train", b"1", frequent=True)
    followed = member.work("call", "enter", b"2")
    hosted.gate.set()
    assert followed.result(20)
    with pytest.raises(RuntimeError, match="given up"):
        given_up.result(20)
    assert hosted.calls == [("enter", b"2")]


def test_nor_after_the_next_that_is_made_like_it(reached):
    member, hosted = reached
    serve_at = hosted.serve
    hosted.serve = lambda address: hosted.gate.wait(20) and Served(0, None)
    hosted.gate.clear()
    given_up = member.work("call", "train", b"1", frequent=True)
    member.work("call", "enter", b"2")
    hosted.serve = serve_at
    followed = member.work("call", "train", b"3", frequent=True)
    hosted.gate.set()
    assert followed.result(20)
    with pytest.raises(RuntimeError, match="given up"):
        given_up.result(20)
    assert [call for call in hosted.calls if call != "a channel"] == [
        ("enter", b"2"),
        ("train", b"3"),
    ]


@pytest.mark.parametrize("why", ["nothing can listen", "nobody can connect"])
def test_where_there_can_be_no_line_all_goes_by_ray(reached, monkeypatch, why):
    member, hosted = reached
    if why == "nothing can listen":
        # documentation's own addresses (RFC 5737) belong to no machine
        monkeypatch.setattr(members, "driver_address", lambda addresses: "203.0.113.1")
    else:
        hosted.serve = lambda address: serve(address._replace(port=closed_port()), hosted.call)
    for number in range(3):
        assert member.work("call", "train", b"%d" % number, frequent=True).result(20) == 1 + number
    assert [call[1] for call in hosted.calls if call != "a channel"] == [b"0", b"1", b"2"]


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_without_ray_a_call_is_an_error_and_starts_none(member, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "kill", lambda actor: pytest.fail("that would start Ray"))
    for call in (member.work, member.control, member.execute):
        with pytest.raises(RuntimeError, match="create a new trainer"):
            call("progress")
    member.kill()
    assert member.actor.calls == []
    assert not member.alive


def test_a_worker_is_named_by_its_node():
    member = ActorMember(Actor())
    assert (member.name, member.node_id) == ("a node that is not known yet", "")
    member.info = PLACE
    assert (member.name, member.node_id) == ("node 01234567 (10.0.0.7)", "0123456789abcdef")


def test_a_signal_says_whether_the_process_is_there(member, monkeypatch):
    monkeypatch.setattr(members, "_is_here", lambda info: True)
    for pid, there in ((os.getpid(), True), (NO_PROCESS, False)):
        member.info = WorkerInfo(node_id="a", node_ip="10.0.0.7", pid=pid)
        assert member.signal(0) is there


def test_a_process_is_killed_also_where_its_place_is_not_known_yet(member, monkeypatch):
    killed = []
    monkeypatch.setattr(ray, "kill", killed.append)
    del member.info
    member.kill_process()
    assert killed == [member.actor]


def test_to_kill_or_to_let_go_of_a_worker_elsewhere_waits_for_no_head_of_rays(member, monkeypatch):
    killed, answers = [], threading.Event()
    monkeypatch.setattr(ray, "kill", killed.append)
    monkeypatch.setattr(members, "_SIGNAL_S", 0.01)
    monkeypatch.setattr(members, "_is_here", lambda info: False)

    def on_node(function):
        if not answers.wait(5):
            pytest.fail("it was waited for")

    monkeypatch.setattr(member, "_on_node", on_node)
    try:
        leaving = member.leave(0.0)
        member.kill_process()
        assert not leaving.done()
        assert killed == [member.actor]
    finally:
        answers.set()


def test_what_ray_says_about_a_death_comes_in_one_line():
    said = (
        "The actor died unexpectedly before finishing this task.\n\tpid: 77\n"
        "The actor is dead because its worker process has died. Worker exit detail: Worker exits "
        "with code 2. Some common causes include: (1) the process is killed"
    )
    unknown = WorkerInfo(node_id="", node_ip="")
    assert loss_cause(RuntimeError(said), unknown) == "Worker exits with code 2."
    assert loss_cause(RuntimeError(said), PLACE) == "process 77: Worker exits with code 2."
    assert loss_cause(RuntimeError("gone\n"), unknown) == "gone"
    assert (
        loss_cause(RuntimeError("It died.\n\tclass_name: W\n\tactor_id: 6\n"), unknown)
        == "It died."
    )
    assert loss_cause(RuntimeError(), unknown) == "RuntimeError"


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
def test_a_loss_is_told_from_other_errors(error, lost):
    assert is_loss(error) is lost


@pytest.mark.parametrize(("stops", "lives"), [(True, True), (False, False), (None, False)])
def test_a_worker_lives_that_ray_cannot_reach_where_its_host_is_watched(member, stops, lives):
    if stops is not None:  # its calls, when it hears nothing of the driver
        member._pulses = SimpleNamespace(terms=Terms(2.0, 60.0, stops))
        member.pulse = object()
    assert member.may_live(ray.exceptions.ActorUnavailableError("reset", None)) is lives
    assert not member.may_live(ray.exceptions.ActorDiedError())
