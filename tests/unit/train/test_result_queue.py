"""The queue of one result between a training function and the driver, tested with threads."""

import asyncio
import dataclasses
import threading
from fractions import Fraction

import pytest

from raysgd.cluster.serialization import pack
from raysgd.train.result_queue import ResultQueue, RunStoppedError, TrainingResult
from tests.conftest import wait_until


@pytest.fixture
def result_queue():
    return ResultQueue()


def in_thread(function):
    """Run a function in a thread; return the thread and a list for the exception."""
    raised = []

    def run():
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, raised


def result(n):
    return TrainingResult("report", content=pack({"n": n}))


def test_a_function_is_at_most_one_report_ahead(result_queue):
    put = []

    def function():
        for n in range(4):
            result_queue.put(result(n))
            put.append(n)

    thread, _ = in_thread(function)
    wait_until(lambda: result_queue.is_blocked_on_driver)
    assert put == [0]
    assert result_queue.get().metrics == {"n": 0}
    wait_until(lambda: put == [0, 1] and result_queue.is_blocked_on_driver)
    for n in (1, 2, 3):
        assert result_queue.get().metrics == {"n": n}
    thread.join(5)
    assert put == [0, 1, 2, 3]


def test_a_checkpoint_is_handled_when_the_driver_comes_for_the_next_turn(result_queue):
    """Before that, the driver may have taken the checkpoint but not stored it."""
    saved, reported = threading.Event(), threading.Event()

    def function():
        result_queue.put(TrainingResult("checkpoint", checkpoint=b"x", has_checkpoint=True))
        saved.set()
        result_queue.put(result(1))  # a restart from the checkpoint would not repeat it
        reported.set()
        result_queue.put(result(2))
        result_queue.put(result(3))

    in_thread(function)
    assert result_queue.get().checkpoint == b"x"
    assert not saved.wait(0.2)
    assert result_queue.get().metrics == {"n": 1}
    assert saved.is_set()
    assert not reported.wait(0.2)
    assert result_queue.get().metrics == {"n": 2}
    assert reported.is_set()
    wait_until(lambda: result_queue._next is not None)  # other reports do not wait


@pytest.mark.parametrize("has_returned", [False, True])
def test_a_stop_ends_the_wait_of_a_function(result_queue, has_returned):
    result_queue.put(result(0))
    waits = result_queue.end if has_returned else result_queue.put
    thread, raised = in_thread(lambda: waits(result(1)))
    wait_until(lambda: result_queue.is_blocked_on_driver)
    result_queue.stop()
    thread.join(5)
    assert not thread.is_alive()
    assert [type(error) for error in raised] == [RunStoppedError] * (not has_returned)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (ValueError("bad batch"), ValueError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (asyncio.CancelledError(), asyncio.CancelledError),
        (RunStoppedError("stopped"), RuntimeError),
    ],
)
def test_the_error_of_the_function_comes_after_its_reports(result_queue, raised, expected):
    result_queue.put(result(0))
    in_thread(lambda: result_queue.end(TrainingResult("end", error=raised)))
    assert result_queue.get().metrics == {"n": 0}
    with pytest.raises(expected):
        result_queue.get()


def test_unreadable_values_are_an_error_in_a_report_and_a_warning_at_the_end(caplog):
    packed = pack(Fraction(1, 2))
    unreadable = dataclasses.replace(packed, data=packed.data.replace(b"fractions", b"unknownnn"))
    with pytest.raises(TypeError, match="Report plain values, or make their classes importable"):
        _ = TrainingResult("report", content=unreadable).metrics
    assert TrainingResult("end", content=unreadable).return_value is None
    assert "cannot unpickle the result" in caplog.text
