"""The queue of one between a training function and the driver; threads, but no sleeps."""

import threading

import pytest

from raysgd.train.handover import Handover, RunStoppedError, Turn


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
    return Turn("report", metrics={"n": n})


def until(condition):
    done = threading.Event()
    for _ in range(10_000):
        if condition():
            return
        done.wait(0.001)
    raise AssertionError("never")


def test_a_function_is_ahead_by_no_more_than_one_report():
    handover, put = Handover(), []

    def function():
        for n in range(4):
            handover.put(turn(n))
            put.append(n)

    thread, _ = started(function)
    until(lambda: handover.held)
    assert put == [0]
    assert handover.take().metrics == {"n": 0}
    until(lambda: put == [0, 1] and handover.held)
    for n in (1, 2, 3):
        assert handover.take().metrics == {"n": n}
    thread.join(5)
    assert put == [0, 1, 2, 3]


def test_a_save_returns_when_the_driver_comes_for_the_next_turn():
    """When it has taken the checkpoint, it may still die with it."""
    handover, saved = Handover(), threading.Event()

    def function():
        handover.put_safely(Turn("checkpoint", checkpoint=b"x", has_checkpoint=True))
        saved.set()
        handover.put(turn(1))

    started(function)
    assert handover.take().checkpoint == b"x"
    assert not saved.wait(0.2)  # no longer in a run that passes: it does not come
    assert handover.take().metrics == {"n": 1}
    assert saved.is_set()


def test_a_function_that_is_stopped_raises_where_it_waits():
    handover = Handover()
    handover.put(turn(0))
    thread, raised = started(lambda: handover.put(turn(1)))
    until(lambda: handover.held)
    handover.stop()
    thread.join(5)
    assert isinstance(raised[0], RunStoppedError)
    assert not isinstance(raised[0], Exception)  # except Exception in user code lets it pass


def test_the_end_comes_after_what_was_reported_and_can_be_taken_again():
    handover = Handover()
    handover.put(turn(0))
    started(lambda: handover.end(Turn("end", value=7)))
    assert handover.take().metrics == {"n": 0}
    assert [handover.take().value for _ in range(2)] == [7, 7]
    assert handover.held


def test_what_the_function_raised_comes_after_what_it_reported():
    handover = Handover()
    handover.put(turn(0))
    started(lambda: handover.end(None, ValueError("bad batch")))
    assert handover.take().metrics == {"n": 0}
    with pytest.raises(ValueError, match="bad batch"):
        handover.take()


def test_a_function_that_ends_because_it_was_stopped_is_an_ordinary_error_for_the_driver():
    handover = Handover()
    handover.end(None, RunStoppedError("stopped"))
    with pytest.raises(RuntimeError, match="was stopped"):
        handover.take()


def test_a_function_that_computes_is_not_held():
    handover = Handover()
    assert not handover.held
    handover.put(turn(0))
    assert not handover.held


def test_what_cannot_be_sent_is_said_in_words_of_the_function():
    lock = threading.Lock()
    assert Turn("report", metrics={"a": 1, "l": lock}).unpicklable_part() == "the metric 'l'"
    assert "training function returned" in Turn("end", value=lock).unpicklable_part()
