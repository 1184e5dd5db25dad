"""The worker process: outcomes, kinds of failures, and what is sent to the driver."""

import asyncio
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import pytest

from raysgd._internal import tracebacks
from raysgd._internal.runner import PausedError, WorkerContext
from raysgd._internal.worker_status import ReportedPosition, WorkerStatus
from raysgd.backends import CollectiveBackend
from raysgd.cluster.serialization import PackedValue, pack
from raysgd.cluster.worker import CarriedError, Worker
from raysgd.errors import RemoteError, RemoteTraceback
from tests.unit.cluster.calls import request_of


class FakeRunner:
    """A runner that records calls. Its method `run` calls the given function."""

    def __init__(self):
        self.calls = []
        self.step = 0

    def prepare(self, context):
        self.calls.append(("prepare", context.world_rank))

    def warm_up(self):
        pass

    def setup(self, context):
        self.calls.append(("setup", context.generation))

    def rejoin(self, context, leader_rank):
        self.calls.append(("rejoin", context.generation, leader_rank))

    def status(self, acknowledged_step=-1):
        return WorkerStatus(ReportedPosition(global_step=self.step))

    def set_interrupted(self, interrupted):
        self.calls.append(("interrupt", interrupted))

    def pause_at(self, step):
        self.calls.append(("pause", step))
        return self.step

    def acquire_snapshot(self, num_invalidations=None):
        return {"step": self.step} if self.step else None

    def release_snapshot(self, snapshot, seconds):
        self.calls.append(("sent", snapshot))

    def teardown(self):
        self.calls.append(("teardown",))

    def handle(self, request):
        return request.send_to(self)

    def run(self, function):
        return function()


class FakeBackend(CollectiveBackend):
    def __init__(self):
        self.calls = []

    def create_rendezvous(self, addresses):
        return None

    def setup(self, context, rendezvous):
        self.calls.append(("setup", rendezvous))
        self.context = context

    def interrupt(self):
        self.calls.append("interrupt")

    def teardown(self):
        self.calls.append("teardown")

    def is_communication_error(self, error):
        return isinstance(error, ConnectionError)

    def advice_for(self, error):
        return "Make it again." if isinstance(error, LookupError) else ""


@pytest.fixture
def worker():
    """A worker as in an actor, whose results are pickled."""
    worker = Worker()
    assert worker.create_runner(None, pack(FakeRunner()), FakeBackend(), []).kind == "ok"
    return worker


def call(worker, function, *, inline=False):
    request = request_of("run", function=function)
    return worker.handle(request if inline else pack(request))


def fail_with(error):
    def fail():
        raise error

    return fail


class PlainError(Exception):
    pass


class TwoArgumentsError(Exception):
    """An exception that cannot be unpickled, because its constructor has two arguments."""

    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


def test_runs_of_wandb_end_with_the_worker(worker, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb = pytest.importorskip("wandb")
    wandb.init(mode="offline", dir=tmp_path, settings={"console": "off"}).log({"a": 1})
    worker.teardown()
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert path.stat().st_size > 1000, "7 bytes are in the file from the beginning"


# ---- values


@pytest.mark.parametrize(
    "value", [7, None, b"bytes", {"a": [1]}, pytest.param(lambda: 3, id="function")]
)
def test_a_value_comes_back(worker, value):
    outcome = call(worker, lambda: value)
    assert isinstance(outcome.payload, PackedValue)
    outcome = pickle.loads(pickle.dumps(outcome))
    assert outcome.kind == "ok"
    got = outcome.unpack()
    assert got() == 3 if callable(value) else got == value


def of_itself():
    value = {}
    value |= {"me": value, "lock": threading.Lock()}
    return value


def test_a_value_that_cannot_be_pickled_is_an_error_that_says_so(worker):
    for value, shown in (
        (threading.Lock, "a lock"),
        (lambda: {"a": [{"b": threading.Lock()}]}, r"a lock at \['a'\]\[0\]\['b'\]"),
        (of_itself, r"a lock at \['lock'\]"),
    ):
        outcome = call(worker, value)
        assert outcome.kind == "user_error"
        with pytest.raises(TypeError, match=f"cannot send {shown} to the driver"):
            raise outcome.exception()


def test_in_the_drivers_process_nothing_is_pickled():
    worker = Worker(is_remote=False)
    worker.create_runner(None, FakeRunner(), None, [])
    for value in (threading.Lock(), pickle.dumps("secret")):
        assert call(worker, lambda value=value: value, inline=True).unpack() is value


# ---- failures


def test_user_exception_keeps_its_type_and_has_the_traceback_of_the_worker(worker):
    worker.rejoin(WorkerContext(world_rank=3, world_size=4), None, 0)
    outcome = pickle.loads(pickle.dumps(call(worker, fail_with(PlainError("bad batch")))))
    assert outcome.kind == "user_error"
    error = outcome.exception()
    assert type(error) is PlainError
    assert str(error) == "bad batch"
    assert isinstance(error.__cause__, RemoteTraceback)
    text = error.__cause__.text
    assert "worker 3" in text
    assert "raise error" in text
    assert "PlainError: bad batch" in text
    shown = str(error.__cause__).splitlines()
    assert len(shown) == 3
    assert "in fail: raise error" in shown[1]
    (note,) = error.__notes__
    assert re.fullmatch(r"Raised on worker 3, in fail, .*test_worker\.py:\d+", note)


def test_an_error_that_is_raised_again_says_the_place_once(worker):
    kept = PlainError("kept")
    for _ in range(2):
        error = call(worker, fail_with(kept)).exception()
    assert len(error.__notes__) == 1


@pytest.mark.parametrize("error", [TwoArgumentsError("two", "parts"), PlainError(threading.Lock())])
def test_an_exception_that_cannot_be_sent_arrives_as_remote_error(worker, error):
    outcome = call(worker, fail_with(error), inline=True)
    outcome = pickle.loads(pickle.dumps(outcome))
    told = outcome.exception()
    assert type(told) is RemoteError
    assert type(error).__name__ in str(told)
    assert told.__notes__[-1].startswith("Raised on worker ")


def test_an_exception_whose_class_the_driver_lacks_arrives_as_text(worker, monkeypatch):
    outcome = call(worker, fail_with(PlainError("no\nbucket")))
    monkeypatch.delattr(f"{__name__}.PlainError")
    assert repr(outcome.exception()) == repr(RemoteError(f"{__name__}.PlainError: no\nbucket"))


class OwnBaseError(BaseException):
    pass


NO_EXCEPTIONS = [
    KeyboardInterrupt("by hand"),
    asyncio.CancelledError("by hand"),
    GeneratorExit("by hand"),
    OwnBaseError("by hand"),
]


@pytest.mark.parametrize("error", NO_EXCEPTIONS, ids=lambda error: type(error).__name__)
def test_every_base_exception_of_user_code_arrives_as_itself(worker, error):
    hook = pack(fail_with(error))
    for outcome in (call(worker, fail_with(error)), worker.create_runner(hook, None, None, [])):
        assert outcome.kind == "user_error"
        arrived = pickle.loads(pickle.dumps(outcome)).exception()
        assert type(arrived) is type(error)
        assert str(arrived) == "by hand"
        assert "by hand" in str(arrived.__cause__)


@pytest.mark.parametrize("error", NO_EXCEPTIONS, ids=lambda error: type(error).__name__)
def test_thread_of_the_driver_returns_every_base_exception(error):
    worker = Worker(is_remote=False)
    worker.create_runner(None, FakeRunner(), None, [])
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(call, worker, fail_with(error), inline=True).result()
    assert outcome.kind == "user_error"
    assert outcome.exception() is error
    if isinstance(error, KeyboardInterrupt):  # Ctrl-C on the driver
        with pytest.raises(KeyboardInterrupt):
            call(worker, fail_with(error), inline=True)


def test_errors_caused_by_communication_count_as_communication(worker):
    assert call(worker, fail_with(ConnectionError("peer"))).kind == "communication_error"
    first, second = PlainError("training failed"), PlainError("again")
    first.__cause__, second.__context__ = second, first
    assert call(worker, fail_with(first), inline=True).kind == "user_error"
    second.__cause__ = ConnectionError("peer")
    assert call(worker, fail_with(second), inline=True).kind == "communication_error"
    assert call(worker, lambda: raise_after_a_lost_peer(PlainError())).kind == "communication_error"


def raise_after_a_lost_peer(error):
    try:
        raise ConnectionError("peer")
    except ConnectionError:
        raise error  # noqa: B904


def test_an_error_with_advice_of_the_backend_is_a_user_error(worker):
    outcome = call(worker, lambda: raise_after_a_lost_peer(LookupError("a group of before")))
    assert outcome.kind == "user_error"
    assert outcome.exception().__notes__[0] == "Make it again."


def test_consequence_of_another_error_arrives_as_text(worker):
    """Unpickling a TensorFlow error would import TensorFlow, which takes seconds."""
    outcome = call(worker, fail_with(ConnectionError("no answer")))
    assert outcome.kind == "communication_error"
    told = outcome.exception()
    assert type(told) is RemoteError
    assert str(told) == "ConnectionError: no answer"
    assert "raise error" in str(told.__cause__)


@pytest.mark.parametrize("error", [ConnectionError("peer"), PlainError("bad batch")])
def test_an_exception_does_not_keep_frames_alive(worker, error):
    error.__cause__ = KeyError("first")
    call(worker, lambda: raise_after_a_lost_peer(error), inline=True)
    assert error.__traceback__ is error.__cause__ is error.__context__ is None


def test_an_interruption_and_a_pause_end_with_their_generation(worker):
    worker.interrupt()
    assert ("interrupt", True) in worker.runner.calls
    assert "interrupt" in worker._backend.calls
    assert call(worker, fail_with(PlainError())).kind == "interrupted"
    worker.pause_at(0, 9)
    worker.rejoin(WorkerContext(generation=2), None, 0)
    pauses = [step for name, step, *_ in worker.runner.calls if name == "pause"]
    assert pauses == [9, None]
    assert call(worker, fail_with(PlainError())).kind == "user_error"
    worker.interrupt()
    worker._backend.setup = lambda *_: fail_with(PlainError())()
    assert worker.rejoin(WorkerContext(generation=3), None, 0).kind == "user_error"
    worker._backend.setup = lambda context, _: worker.interrupt(context.generation)
    worker.rejoin(WorkerContext(generation=4), None, 0)
    assert call(worker, fail_with(PlainError())).kind == "interrupted"


def test_late_messages_do_not_affect_the_next_generation(worker):
    worker.runner.step = 4
    worker.rejoin(WorkerContext(generation=3), None, 0)
    del worker.runner.calls[:], worker._backend.calls[:]
    worker.interrupt(2)
    assert worker.pause_at(2, 9) == 4
    assert (worker.runner.calls, worker._backend.calls) == ([], [])
    assert call(worker, fail_with(PlainError())).kind == "user_error"
    assert worker.pause_at(3, 9) == 4
    worker.interrupt(4)  # for a generation that the worker is about to enter
    assert worker.runner.calls == [("pause", 9), ("interrupt", True)]
    assert worker._backend.calls == ["interrupt"]


def test_next_generation_waits_for_messages_to_the_previous_one(worker):
    worker.rejoin(WorkerContext(generation=1), None, 0)
    interrupting, go_on = threading.Event(), threading.Event()

    def interrupt():
        interrupting.set()
        assert go_on.wait(10)
        worker._backend.calls.append("interrupt")

    worker._backend.interrupt = interrupt
    del worker._backend.calls[:]
    with ThreadPoolExecutor(2) as threads:
        threads.submit(worker.interrupt, 1)
        assert interrupting.wait(10)
        entered = threads.submit(worker.rejoin, WorkerContext(generation=2), None, 0)
        assert not wait([entered], timeout=0.2).done
        go_on.set()
        assert entered.result(10).kind == "ok"
    assert worker._backend.calls == ["interrupt", "teardown", ("setup", None)]
    assert call(worker, fail_with(PlainError())).kind == "user_error"


# ---- pauses and snapshots


def test_a_pause_is_neither_a_result_nor_a_failure(worker):
    worker.runner.step = 4
    outcome = call(worker, fail_with(PausedError()))
    assert (outcome.kind, outcome.payload, outcome.status.position[2]) == ("paused", None, 4)
    worker.interrupt()
    assert call(worker, fail_with(PausedError())).kind == "paused"


def test_a_snapshot_is_pickled_if_there_is_one(worker):
    assert worker.send_snapshot(None, 0) is None
    worker.runner.step = 4
    assert worker.send_snapshot(None, 0).unpack() == {"step": 4}
    assert worker.runner.calls[-1] == ("sent", {"step": 4})
    assert Worker().send_snapshot(None, 0) is None


# ---- life cycle


def test_the_hook_runs_before_the_runner_is_unpickled():
    calls = []
    Loud.heard = calls.append
    Worker().create_runner(lambda: calls.append("hook"), pack(Loud()), None, [])
    assert calls == ["hook", "runner"]


class Loud:
    """An object that reports when it is unpickled."""

    def __getstate__(self):
        return {"name": "runner"}

    def __setstate__(self, state):
        Loud.heard(state["name"])


def test_what_the_driver_can_import_the_worker_can(worker, monkeypatch, tmp_path):
    (tmp_path / "module_of_the_user.py").write_text("ANSWER = 42")
    monkeypatch.setattr(sys, "path", list(sys.path))

    def hook():
        import module_of_the_user

        assert module_of_the_user.ANSWER == 42

    before = list(sys.path)
    import_path = [str(tmp_path), before[0]]
    assert worker.create_runner(hook, FakeRunner(), None, import_path).kind == "ok"
    assert sys.path == [*before, str(tmp_path)]
    monkeypatch.delitem(sys.modules, "module_of_the_user")


def test_a_failing_hook_is_an_error_and_leaves_no_runner():
    worker = Worker()
    outcome = worker.create_runner(fail_with(PlainError("no network here")), FakeRunner(), None, [])
    assert outcome.kind == "user_error"
    assert worker.runner is None


def test_enter_sets_up_the_process_group_before_the_runner(worker):
    order = []
    worker._backend.setup = lambda context, rendezvous: order.append(("group", rendezvous))
    worker._backend.teardown = lambda: order.append("left")
    worker.runner.prepare = lambda context: order.append("prepare")
    worker.runner.setup = lambda context: order.append("setup")
    worker.runner.rejoin = lambda context, leader_rank: order.append(("rejoin", leader_rank))
    worker.runner.warm_up = lambda: order.append("warm-up")
    worker.setup(WorkerContext(generation=1), "here")
    worker.rejoin(WorkerContext(generation=2), "there", 1)
    first = ["prepare", "left", ("group", "here"), "setup"]
    assert order == [*first, "left", ("group", "there"), ("rejoin", 1)]


def test_replacement_sets_up_alone_warms_up_and_knows_its_rank(worker):
    context = WorkerContext(world_rank=2, world_size=3, generation=4, has_process_group=True)
    seen = []
    worker.runner.setup = seen.append
    worker.runner.warm_up = lambda: seen.append("warm-up")
    assert worker.setup(replace(context, is_alone=True), None).kind == "ok"
    alone = worker._backend.context
    assert (alone.world_rank, alone.world_size, alone.generation) == (0, 1, 4)
    assert seen == [replace(context, is_alone=True), "warm-up"]
    worker.rejoin(context, "there", 0)
    assert worker._backend.context == context


def test_stacks_are_those_of_threads_with_user_code(worker, monkeypatch):
    text = worker.stacks()
    assert text.startswith("In test_stacks_are_those_of_threads_with_user_code, ")
    monkeypatch.setattr(tracebacks, "is_user_file", lambda filename: False)
    assert "Thread MainThread:" in worker.stacks()


# ---- functions and GPUs


@pytest.mark.parametrize("error", [KeyboardInterrupt("mine"), asyncio.CancelledError()])
def test_base_exceptions_are_carried_past_ray(error):
    with pytest.raises(CarriedError) as caught:
        Worker().execute(fail_with(error))
    (carried,) = pickle.loads(pickle.dumps(caught.value)).args
    assert (type(carried), carried.args) == (type(error), error.args)


def test_a_worker_without_gpus_hides_those_of_its_node(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    Worker()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    Worker(hides_gpus=True)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


# ---- forks of the worker

PARENT = """
import os, socket, sys, time
from raysgd.cluster.process import end_forks_with_this_process

connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
end_forks_with_this_process()
if os.fork() == 0:
    connection.sendall(b"x")
    time.sleep(60)
time.sleep(60)
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="not on this system")
def test_forks_end_with_a_killed_process():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        port = str(server.getsockname()[1])
        parent = subprocess.Popen([sys.executable, "-c", PARENT, port])
        connection, _ = server.accept()
    with connection:
        connection.settimeout(30)
        assert connection.recv(1) == b"x"
        parent.kill()
        parent.wait()
        assert connection.recv(1) == b""
