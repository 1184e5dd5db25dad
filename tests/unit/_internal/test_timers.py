"""Timers, with a clock that the tests set."""

import pytest

from raysgd._internal import timers
from raysgd._internal.timers import TimerCollection


@pytest.fixture
def clock(monkeypatch):
    """A list with the time, which changes only if a test sets it."""
    now = [100.0]
    monkeypatch.setattr(timers.time, "perf_counter", lambda: now[0])
    return now


def test_a_collection_times_blocks_by_name(clock):
    collection = TimerCollection()
    for seconds in (1, 3):
        with collection.record("fwd"):
            clock[0] += seconds
    assert collection.stats() == {"mean_fwd_s": 2.0}
    assert collection.stats(mean=False, last=True) == {"last_fwd_s": 3.0}


def test_blocks_of_one_name_may_be_nested(clock):
    """For example, an overridden train_batch calls the default one within its own timer."""
    collection = TimerCollection()
    with collection.record("fwd"):
        clock[0] += 1
        with collection.record("fwd"):
            clock[0] += 2
    assert collection.stats() == {"mean_fwd_s": 2.5}


def test_a_disabled_collection_times_nothing(clock):
    collection = TimerCollection()
    assert collection.enabled
    collection.disable()
    with collection.record("fwd"):
        clock[0] += 1
    assert collection.stats() == {}
    assert not collection.enabled
    collection.enable()
    with collection.record("fwd"):
        clock[0] += 1
    assert collection.stats() == {"mean_fwd_s": 1.0}
    collection.reset()
    assert collection.stats() == {}
