"""Channels: a request is carried out once, whatever becomes of the connection."""

import contextlib
import gc
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.cluster import channels as module
from raysgd.cluster.channels import Channels, Served
from raysgd.comm.connection import Address, connect, framed
from tests.conftest import examples
from tests.unit.cluster.serving import serve

HOST = "127.0.0.1"
WAIT_S = 20


@pytest.fixture
def channels():
    channels = Channels()
    yield channels
    channels.close()


@pytest.fixture
def pool():
    """Threads that stand for a worker's work thread and for Ray's."""
    with ThreadPoolExecutor(4) as pool:
        yield pool


class Worker:
    """Carries requests out, and notes them."""

    def __init__(self):
        self.calls = []

    def call(self, *request):
        self.calls.append(request)
        return f"did {request}"


def no_other_way():
    raise AssertionError("the request was to go by the channel")


def served_by(worker, channel, pool, address=None):
    """Let a worker serve a channel, as a call of Ray's does."""
    call = pool.submit(serve, address or channel.address, worker.call)
    call.add_done_callback(channel.end)
    return call


def test_requests_are_carried_out_in_turn(channels, pool):
    channel, worker = channels.open(HOST), Worker()
    call = served_by(worker, channel, pool)
    for number in range(5):
        assert (
            channel.ask(("train", number), no_other_way).result(WAIT_S)
            == f"did ('train', {number})"
        )
    channel.hang_up()
    assert call.result(WAIT_S) == Served(5, "did ('train', 4)")
    assert worker.calls == [("train", number) for number in range(5)]


def test_a_request_waits_for_the_worker_to_come(channels, pool):
    channel, worker = channels.open(HOST), Worker()
    answer = channel.ask(("train", 0), no_other_way)
    channel.hang_up()  # takes effect when it is answered
    assert not answer.done()
    call = served_by(worker, channel, pool)
    assert answer.result(WAIT_S) == "did ('train', 0)"
    assert call.result(WAIT_S).number == 1


def test_large_answers_come_whole(channels, pool):
    channel = channels.open(HOST)
    pool.submit(serve, channel.address, lambda size: bytes(size))
    for size in (0, 1, 2**16, 10_000_000):
        assert channel.ask((size,), no_other_way).result(WAIT_S) == bytes(size)
    channel.hang_up()


def test_several_lines_at_the_same_time(channels):
    workers = [Worker() for _ in range(16)]
    opened = [channels.open(HOST) for _ in workers]
    with ThreadPoolExecutor(16) as pool:
        for worker, channel in zip(workers, opened, strict=True):
            served_by(worker, channel, pool)
        for turn in range(20):
            answers = [channel.ask((turn,), no_other_way) for channel in opened]
            assert [a.result(WAIT_S) for a in answers] == [f"did ({turn},)"] * 16
        for channel in opened:
            channel.hang_up()


def test_one_request_at_a_time(channels, pool):
    channel, go_on = channels.open(HOST), threading.Event()
    pool.submit(serve, channel.address, lambda: go_on.wait(WAIT_S))
    answer = channel.ask((), no_other_way)
    assert channel.ask((), no_other_way) is None
    go_on.set()
    assert answer.result(WAIT_S)
    channel.hang_up()
    assert channel.ask((), no_other_way) is None


def test_what_is_under_way_is_answered_after_the_hanging_up(channels, pool):
    channel, begun, go_on = channels.open(HOST), threading.Event(), threading.Event()

    def carry_out():
        begun.set()
        return go_on.wait(WAIT_S)

    call = pool.submit(serve, channel.address, carry_out)
    call.add_done_callback(channel.end)
    answer = channel.ask((), no_other_way)
    assert begun.wait(WAIT_S)
    channel.hang_up()
    go_on.set()
    assert answer.result(WAIT_S) is True
    assert call.result(WAIT_S) == Served(1, True)


def test_where_the_driver_cannot_be_reached_calls_go_by_ray(channels, pool, caplog):
    caplog.set_level(logging.WARNING, "raysgd.cluster.channels")
    worker = Worker()
    for _ in range(2):
        channel = channels.open(HOST)
        answer = channel.ask(("train",), lambda: pool.submit(worker.call, "by Ray"))
        served_by(worker, channel, pool, Address(HOST, free_port(), "key")).result(WAIT_S)
        assert answer.result(WAIT_S) == "did ('by Ray',)"
    assert not channels.usable
    [record] = caplog.records
    said = f"cannot connect to the driver at {HOST}:{channel.address.port} ([Errno 111] Connection"
    assert said in record.message


def test_a_way_that_is_no_way_is_the_answer(channels, pool):
    channel = channels.open(HOST)

    def gone():
        raise RuntimeError("Ray was shut down")

    answer = channel.ask(("train",), gone)
    served_by(Worker(), channel, pool, Address(HOST, free_port(), "key"))
    with pytest.raises(RuntimeError, match="Ray was shut down"):
        answer.result(WAIT_S)


def test_what_the_other_way_raises_is_the_answer(channels, pool):
    channel = channels.open(HOST)
    answer = channel.ask(("train",), lambda: pool.submit(lambda: 1 / 0))
    served_by(Worker(), channel, pool, Address(HOST, free_port(), "key"))
    with pytest.raises(ZeroDivisionError):
        answer.result(WAIT_S)


def test_a_death_is_told_by_ray(channels):
    channel, call = channels.open(HOST), Future()
    call.add_done_callback(channel.end)
    answer = channel.ask(("train",), no_other_way)
    call.set_exception(RuntimeError("The worker died"))
    with pytest.raises(RuntimeError, match="The worker died"):
        answer.result(WAIT_S)
    assert channels.usable, "it says nothing about the way"
    assert channel.ask(("train",), no_other_way) is None


def test_what_escapes_the_worker_is_what_rays_call_raises(channels, pool):
    channel = channels.open(HOST)

    def interrupted():
        raise KeyboardInterrupt

    call = pool.submit(serve, channel.address, interrupted)
    call.add_done_callback(channel.end)
    with pytest.raises(KeyboardInterrupt):
        channel.ask((), no_other_way).result(WAIT_S)


def test_an_oserror_of_the_call_is_no_matter_of_the_connection(channels, pool):
    channel, calls = channels.open(HOST), []

    def refused():
        calls.append(1)
        raise ConnectionResetError("of the user's own")

    call = pool.submit(serve, channel.address, refused)
    call.add_done_callback(channel.end)
    with pytest.raises(ConnectionResetError, match="of the user's own"):
        channel.ask((), no_other_way).result(WAIT_S)
    assert calls == [1]


def test_nobody_waits_for_a_worker_that_does_not_read(channels, pool):
    channel, call = channels.open(HOST), Future()
    call.add_done_callback(channel.end)
    with connect(channel.address, WAIT_S) as connection:
        connection.settimeout(WAIT_S)
        answer = channel.ask(("train",), no_other_way)
        assert connection.recv(2**10)
        connection.sendall(framed(pickle.dumps((1, "done"))))
        assert answer.result(WAIT_S) == "done"
        answer = channel.ask(bytes(50_000_000), lambda: pool.submit(lambda: "by Ray"))
        while connection.recv(2**20):
            pass  # the connection is given up, and its end reaches the worker
    call.set_result(Served(1, "done"))
    assert answer.result(WAIT_S) == "by Ray"
    assert channels.usable


def test_closed_lines_let_their_workers_go(channels, pool):
    channel, worker = channels.open(HOST), Worker()
    call = served_by(worker, channel, pool)
    channel.ask(("train",), no_other_way).result(WAIT_S)
    channels.close()
    assert call.result(WAIT_S) == Served(1, "did ('train',)")
    channels.close()
    again = channels.open(HOST)
    served_by(worker, again, pool)
    assert again.ask(("again",), no_other_way).result(WAIT_S) == "did ('again',)"
    again.hang_up()


def test_a_worker_that_comes_after_the_close_says_nothing_about_the_way(channels, pool):
    channel = channels.open(HOST)
    channels.close()
    answer = channel.ask(("train",), lambda: pool.submit(lambda: "by Ray"))
    served_by(Worker(), channel, pool)
    assert answer.result(WAIT_S) == "by Ray"
    assert channels.usable


def test_lines_can_be_closed_by_whoever_hears_an_answer(channels, pool, caplog):
    """A garbage collection in the reader's thread may end a trainer."""
    channel, closed = channels.open(HOST), threading.Event()
    gate = threading.Event()
    call = pool.submit(serve, channel.address, lambda: gate.wait(WAIT_S))
    answer = channel.ask((), no_other_way)
    answer.add_done_callback(lambda _: (channels.close(), closed.set()))
    gate.set()
    assert closed.wait(WAIT_S)
    assert call.result(WAIT_S).number == 1
    assert not [record for record in caplog.records if record.exc_info]


def test_a_start_that_fails_leaves_nothing_in_the_way_of_the_next(channels, pool, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(socket, "create_server", Mock(side_effect=OSError("no descriptor")))
        with pytest.raises(OSError, match="no descriptor"):
            channels.open(HOST)
    channels.close()
    channel = channels.open(HOST)
    served_by(Worker(), channel, pool)
    assert channel.ask(("train",), no_other_way).result(WAIT_S) == "did ('train',)"
    channel.hang_up()


def test_a_worker_that_is_not_answered_gives_up(channels, pool, monkeypatch):
    """Something may stand in between that accepts every connection."""
    monkeypatch.setattr(module, "_CONNECT_S", 0.1)
    channel = channels.open(HOST)
    answer = channel.ask(("train",), lambda: pool.submit(lambda: "by Ray"))
    with socket.create_server((HOST, 0)) as silent:
        address = channel.address._replace(port=silent.getsockname()[1])
        assert served_by(Worker(), channel, pool, address).result(WAIT_S) == Served(0, "timed out")
    assert answer.result(WAIT_S) == "by Ray"
    assert not channels.usable


def test_where_all_is_encrypted_there_are_no_channels(monkeypatch):
    monkeypatch.setenv("RAY_USE_TLS", "1")
    assert not Channels().usable


def test_lines_that_nobody_closes_end_with_whom_they_belong_to(pool):
    channels = Channels()
    channel, worker = channels.open(HOST), Worker()
    call = served_by(worker, channel, pool)
    channel.ask(("train",), no_other_way).result(WAIT_S)
    del channels, channel
    gc.collect()
    assert call.result(WAIT_S) == Served(1, "did ('train',)")


def test_workers_reach_the_driver_at_several_addresses(channels):
    hosts = [f"127.0.0.{1 + number % 8}" for number in range(32)]
    with ThreadPoolExecutor(32) as pool:
        opened = []
        for host in hosts:
            opened.append(channels.open(host))
            served_by(Worker(), opened[-1], pool)
        answers = [channel.ask(("train",), no_other_way) for channel in opened]
        assert [answer.result(WAIT_S) for answer in answers] == ["did ('train',)"] * 32
        for channel in opened:
            channel.hang_up()


def test_the_driver_is_not_held_by_a_stopped_worker():
    """A process that is stopped reads nothing; what is asked of it waits without the driver."""
    channels = Channels()
    channel = channels.open(HOST)
    program = (
        "import sys; from tests.unit.cluster.serving import serve; "
        "from raysgd.comm.connection import Address; "
        "serve(Address(sys.argv[1], int(sys.argv[2]), sys.argv[3]), lambda data: len(data))"
    )
    arguments = list(map(str, channel.address))
    with subprocess.Popen([sys.executable, "-c", program, *arguments]) as process:
        try:
            assert channel.ask((b"x",), no_other_way).result(WAIT_S) == 1
            os.kill(process.pid, signal.SIGSTOP)
            answer = channel.ask((bytes(2**14),), no_other_way)
            assert not answer.done()
            os.kill(process.pid, signal.SIGCONT)
            assert answer.result(WAIT_S) == 2**14
            channel.hang_up()
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()
    channels.close()


# ---- broken connections


class Cut:
    """Passes on what goes over a connection, and breaks it after so many bytes of each side."""

    def __init__(self, target, up, down, reset):
        self._target, self._limits, self._reset = target, {"up": up, "down": down}, reset
        self._listener = socket.create_server((HOST, 0))
        self.port = self._listener.getsockname()[1]
        self._ends = []
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    def _run(self):
        worker, _ = self._listener.accept()
        driver = socket.create_connection(self._target)
        self._ends = [worker, driver]
        pumps = [
            threading.Thread(target=self._pump, args=(worker, driver, "up")),
            threading.Thread(target=self._pump, args=(driver, worker, "down")),
        ]
        for pump in pumps:
            pump.start()
        for pump in pumps:
            pump.join()

    def _pump(self, source, sink, way):
        left = self._limits[way]
        with contextlib.suppress(OSError):
            while left > 0 and (data := source.recv(min(left, 4096))):
                sink.sendall(data)
                left -= len(data)
            if left > 0:
                sink.shutdown(socket.SHUT_WR)  # the end of this side alone
                return
        self._break()

    def _break(self):
        with self._lock:
            for end in self._ends:
                if self._reset:
                    linger = (1).to_bytes(4, sys.byteorder) + (0).to_bytes(4, sys.byteorder)
                    with contextlib.suppress(OSError):
                        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def close(self):
        self._listener.close()
        self._threads[0].join(WAIT_S)
        self._break()


@examples(120)
@given(
    up=st.integers(0, 400), down=st.integers(0, 400), reset=st.booleans(), count=st.integers(1, 4)
)
def test_each_request_is_carried_out_once(up, down, reset, count):
    """Wherever the connection breaks: in the handshake, a request, an answer, or between them."""
    channels, worker, channel, cuts = Channels(), Worker(), None, []
    work_thread = ThreadPoolExecutor(1)
    for number in range(count):
        by_ray = partial(work_thread.submit, worker.call, "train", number)
        answer = None if channel is None else channel.ask(("train", number), by_ray)
        if answer is None:
            channel = channels.open(HOST)
            cuts.append(Cut(channel.address[:2], up, down, reset))
            address = channel.address._replace(port=cuts[-1].port)
            answer = channel.ask(("train", number), by_ray)
            served_by(worker, channel, work_thread, address)
        assert answer.result(WAIT_S) == f"did ('train', {number})"
    channel.hang_up()
    for cut in cuts:
        cut.close()
    work_thread.shutdown()
    channels.close()
    assert worker.calls == [("train", number) for number in range(count)]


def free_port():
    """Return a port at which nobody listens."""
    with socket.create_server((HOST, 0)) as listener:
        return listener.getsockname()[1]
