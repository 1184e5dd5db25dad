"""Schedules of random faults, and errors for invalid ranks."""

import pytest

from raysgd.testing import chaos
from raysgd.testing.chaos import draw_faults


@pytest.mark.parametrize("seed", range(5))
def test_a_schedule_is_deterministic_and_within_its_bounds(seed):
    faults = draw_faults(seed, 9, 3, num_steps=10)
    assert faults == draw_faults(seed, 9, 3, num_steps=10)
    assert [fault.step for fault in faults] == list(range(1, 10))
    assert {fault.rank for fault in faults} == {0, 1, 2}


def test_wrong_ranks_are_refused(make_trainer):
    trainer = make_trainer()
    for rank in (1, -1):
        with pytest.raises(ValueError, match=f"worker has rank {rank}. Number of workers: 1"):
            chaos.kill(trainer, rank)
    with pytest.raises(ValueError, match="Worker 0 is in the driver's process"):
        chaos.kill(trainer, 0)
    trainer.shutdown()
    with pytest.raises(ValueError, match="Number of workers: 0"):
        chaos.kill(trainer, 0)
