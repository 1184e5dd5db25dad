"""Timers, with a clock that the tests set."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd._internal import timers
from raysgd._internal.timers import TimerCollection, TimerStat


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


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=30), st.integers(1, 10))
def test_statistics_cover_the_window_and_totals_everything(durations, window):
    timer = TimerStat(window_size=window)
    for seconds in durations:
        timer.push(seconds)
    held = durations[-window:]
    assert timer.mean == pytest.approx(sum(held) / len(held))
    assert timer.median == sorted(held)[len(held) // 2]
    assert timer.max == max(held)
    assert timer.sum == pytest.approx(sum(held))
    assert (timer.first, timer.last, timer.size) == (held[0], held[-1], len(held))
    assert timer.count == len(durations)
    assert timer.total_s == pytest.approx(sum(durations))


def test_throughput_is_units_over_time_until_a_reset_discards_everything():
    timer = TimerStat()
    for units in (10, 30):
        timer.push(0.5)
        timer.push_units_processed(units)
    assert timer.has_units_processed()
    assert timer.mean_units_processed == 20
    assert timer.mean_throughput == 40
    timer.reset()
    assert (timer.count, timer.total_s, timer.size) == (0, 0.0, 0)
    assert not timer.has_units_processed()


def test_nested_use_of_one_timer_is_an_error():
    timer = TimerStat()
    with timer, pytest.raises(RuntimeError, match="is running"), timer:
        pass


def test_a_block_that_raises_is_timed(clock):
    timer = TimerStat()

    def fail():
        with timer:
            clock[0] += 1
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with timer:
        clock[0] += 3
    assert (timer.count, timer.mean) == (2, 2.0)
