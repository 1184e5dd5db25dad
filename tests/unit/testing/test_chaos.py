"""Faults that are drawn by a seed, and what is refused."""

import threading

import pytest

from raysgd.testing import chaos
from raysgd.testing.chaos import Chaos, Fault, schedule
from tests.conftest import wait_until


def test_a_schedule_follows_from_its_arguments():
    arguments = {"num_kills": 5, "num_workers": 4, "num_steps": 100}
    assert schedule(1, **arguments) == schedule(1, **arguments)
    assert schedule(1, **arguments) != schedule(2, **arguments)


@pytest.mark.parametrize("seed", range(5))
def test_a_schedule_keeps_to_its_bounds(seed):
    faults = schedule(seed, 9, 3, num_steps=10)
    steps = [fault.step for fault in faults]
    assert steps == sorted(set(steps)) == list(range(1, 10))
    assert {fault.rank for fault in faults} <= {0, 1, 2}


def test_a_schedule_in_seconds():
    times = [fault.after_s for fault in schedule(3, 8, 2, seconds=2.5)]
    assert times == sorted(times)
    assert 0 <= times[0] < times[-1] <= 2.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either num_steps or seconds"),
        ({"num_steps": 9, "seconds": 1.0}, "either num_steps or seconds"),
        ({"num_steps": 3}, "num_steps=3"),
    ],
)
def test_impossible_schedule_is_an_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        schedule(0, 3, 2, **arguments)


@pytest.mark.parametrize("when", [{}, {"step": 1, "after_s": 1.0}])
def test_a_fault_comes_at_one_moment(when):
    with pytest.raises(ValueError, match="either step or after_s"):
        Fault(rank=0, **when)


class OfTwo:
    max_workers = 2


def test_faults_that_can_never_happen_are_errors():
    with pytest.raises(ValueError, match="at most 2 workers"):
        Chaos(OfTwo(), [Fault(rank=2, step=1)])
    with pytest.raises(ValueError, match="spare=2"):
        Chaos(OfTwo(), [Fault(rank=1, step=1)], spare=2)


def test_wrong_ranks_are_refused_and_what_goes_wrong_reaches_the_caller(make_trainer):
    trainer = make_trainer()
    for rank in (1, -1):
        with pytest.raises(ValueError, match=f"worker has rank {rank}. Number of workers: 1"):
            chaos.kill(trainer, rank)
    with pytest.raises(ValueError, match="Worker 0 is in the driver's process"):
        chaos.kill(trainer, 0)
    injected = Chaos(trainer, [Fault(rank=0, after_s=0.0)], spare=0)
    with pytest.raises(ValueError, match="is in the driver's process"), injected:
        wait_until(lambda: not is_injecting())
    trainer.shutdown()
    with pytest.raises(ValueError, match="Number of workers: 0"):
        chaos.kill(trainer, 0)


def is_injecting():
    return any(thread.name == "raysgd-chaos" for thread in threading.enumerate())
