"""The queue of one between a training function and the driver; threads, but no sleeps."""

import asyncio
import dataclasses
import threading
from fractions import Fraction

import pytest

from raysgd.cluster.serialization import pack
from raysgd.train.report_queue import ReportQueue, RunStoppedError, Turn


def started(function):
    """Run a function in a thread; returns the thread and a list for what it raised."""
    raised = []

    def run():
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, raised


def turn(n):
    return Turn("report", content=pack({"n": n}))


def until(condition):
    done = threading.Event()
    for _ in range(10_000):
        if condition():
            return
        done.wait(0.001)
    raise AssertionError("never")


def test_a_function_is_ahead_by_no_more_than_one_report():
    report_queue, put = ReportQueue(), []

    def function():
        for n in range(4):
            report_queue.put(turn(n))
            put.append(n)

    thread, _ = started(function)
    until(lambda: report_queue.blocked_on_driver)
    assert put == [0]
    assert report_queue.take().metrics == {"n": 0}
    until(lambda: put == [0, 1] and report_queue.blocked_on_driver)
    for n in (1, 2, 3):
        assert report_queue.take().metrics == {"n": n}
    thread.join(5)
    assert put == [0, 1, 2, 3]


def test_a_save_returns_when_the_driver_comes_for_the_next_turn():
    """When it has taken the checkpoint, it may still die with it."""
    report_queue, saved = ReportQueue(), threading.Event()

    def function():
        report_queue.put_safely(Turn("checkpoint", checkpoint=b"x", has_checkpoint=True))
        saved.set()
        report_queue.put(turn(1))

    started(function)
    assert report_queue.take().checkpoint == b"x"
    assert not saved.wait(0.2)  # no longer in a run that passes: it does not come
    assert report_queue.take().metrics == {"n": 1}
    assert saved.is_set()


def test_a_function_that_is_stopped_raises_where_it_waits():
    report_queue = ReportQueue()
    report_queue.put(turn(0))
    thread, raised = started(lambda: report_queue.put(turn(1)))
    until(lambda: report_queue.blocked_on_driver)
    report_queue.stop()
    thread.join(5)
    assert isinstance(raised[0], RunStoppedError)
    assert not isinstance(raised[0], Exception)  # except Exception in user code lets it pass


def test_the_end_comes_after_what_was_reported_and_can_be_taken_again():
    report_queue = ReportQueue()
    report_queue.put(turn(0))
    started(lambda: report_queue.end(Turn("end", content=pack(7))))
    assert report_queue.take().metrics == {"n": 0}
    assert [report_queue.take().value for _ in range(2)] == [7, 7]
    assert report_queue.blocked_on_driver


def test_what_the_function_raised_comes_after_what_it_reported():
    report_queue = ReportQueue()
    report_queue.put(turn(0))
    started(lambda: report_queue.end(None, ValueError("bad batch")))
    assert report_queue.take().metrics == {"n": 0}
    with pytest.raises(ValueError, match="bad batch"):
        report_queue.take()


@pytest.mark.parametrize("error", [KeyboardInterrupt, asyncio.CancelledError, GeneratorExit])
def test_base_exceptions_of_a_function_arrive_as_themselves(error):
    report_queue = ReportQueue()
    report_queue.end(None, error("by hand"))
    with pytest.raises(error, match="by hand"):
        report_queue.take()


def test_a_function_that_ends_because_it_was_stopped_is_an_ordinary_error_for_the_driver():
    report_queue = ReportQueue()
    report_queue.end(None, RunStoppedError("stopped"))
    with pytest.raises(RuntimeError, match="was stopped"):
        report_queue.take()


def test_a_function_that_computes_is_not_held():
    report_queue = ReportQueue()
    assert not report_queue.blocked_on_driver
    report_queue.put(turn(0))
    assert not report_queue.blocked_on_driver


def test_what_the_driver_cannot_read_is_an_error_in_a_report_and_a_warning_at_the_end(caplog):
    packed = pack(Fraction(1, 2))
    unreadable = dataclasses.replace(packed, data=packed.data.replace(b"fractions", b"unknownnn"))
    with pytest.raises(TypeError, match="Report plain values, or make their classes importable"):
        _ = Turn("report", content=unreadable).metrics
    assert Turn("end", content=unreadable).value is None
    assert "Cannot read what the training function returned" in caplog.text
