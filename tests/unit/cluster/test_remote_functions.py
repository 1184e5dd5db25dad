"""User functions on workers, with real Ray errors but without Ray."""

import threading

import pytest
import ray
import ray.exceptions

from raysgd.cluster import remote_functions as tasks
from raysgd.cluster.worker import CarriedError, WorkerLocation
from raysgd.cluster.worker_handle import LocalHandle
from raysgd.errors import RemoteTraceback, WorkerLostError

DIED = """The actor died unexpectedly before finishing this task.
\tpid: 77
The actor is dead because its worker process has died. Worker exit detail: Worker unexpectedly \
exits with a connection error code 2. Some common causes include: (1) the process is killed"""


class Reference(tuple):
    """A call and its answer. Like a Ray reference, it equals only itself."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def wait(pending, num_returns=1, timeout=None):
    """Return the last references as done."""
    return pending[-num_returns:], pending[:-num_returns]


class Remote(LocalHandle):
    """A member with given answers."""

    def __init__(self, *answers, location=None):
        super().__init__()
        self.answers = list(answers)
        self.location = location or WorkerLocation(node_id="0123456789", node_ip="10.0.0.7", pid=77)

    def execute(self, function, /, *args, **kwargs):
        return Reference((function, args, kwargs, self.answers.pop(0)))


@pytest.fixture(autouse=True)
def get(monkeypatch):
    """Replace `ray.get` and `ray.wait`. As in Ray, errors also have the type of their cause."""

    def get(reference):
        *_, answer = reference
        if isinstance(answer, ray.exceptions.RayTaskError):
            raise answer.as_instanceof_cause()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", wait)


def failure(error):
    return ray.exceptions.RayTaskError("f", "Traceback: in line 5", error, ip="10.0.0.7", pid=77)


def outcome(*members):
    return tasks.results(members, [member.execute(print) for member in members])


def test_exception_of_a_function_keeps_its_type():
    class BrokenError(Exception):
        pass

    mine = BrokenError("bad batch")
    with pytest.raises(BrokenError, match="bad batch") as caught:
        outcome(Remote("fine"), Remote(failure(mine)))
    assert caught.value is mine
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert "Raised on worker 1 on node 01234567 (10.0.0.7):" in cause.text
    assert "in line 5" in cause.text


def test_an_exception_that_cannot_be_pickled_is_still_reported():
    """Ray replaces it by one of its own, which contains the traceback since Ray 2.50."""
    error = ValueError("bad batch", threading.Lock())
    with pytest.raises(ray.exceptions.RayError, match=r"in line 5|isn't serializable"):
        outcome(Remote(failure(error)))


def test_error_for_a_dead_worker_names_rank_node_and_cause():
    died = ray.exceptions.RayActorError(error_msg=DIED)
    with pytest.raises(WorkerLostError) as caught:
        outcome(Remote("fine"), Remote(died))
    error = caught.value
    said = "process 77: Worker unexpectedly exits with a connection error code 2."
    assert (error.rank, error.node_id, error.cause) == (1, "0123456789", said)
    assert str(error) == f"Lost worker 1 on node 01234567 (10.0.0.7): {said}"
    assert error.__cause__ is died


def test_loss_is_raised_instead_of_its_consequence():
    """A peer detects the broken connection before Ray reports the death."""
    died, broken = ray.exceptions.RayActorError(error_msg=DIED), failure(RuntimeError("gloo"))
    for members in ([Remote(died), Remote("fine"), Remote(broken)], [Remote(broken), Remote(died)]):
        with pytest.raises(WorkerLostError, match="Lost worker"):
            outcome(*members)
    with pytest.raises(RuntimeError, match="gloo"):
        outcome(Remote(broken), Remote("fine"), Remote(failure(RuntimeError("gloo"))))


def test_a_carried_base_exception_is_raised_as_itself():
    with pytest.raises(KeyboardInterrupt, match="mine"):
        outcome(Remote(failure(CarriedError(KeyboardInterrupt("mine")))))
