"""Workers are killed at random times. A run always resumes from its newest checkpoint.

RAYSGD_SOAK=50 makes fifty runs, each with another seed.
"""

import os
import struct
import time

import pytest

from raysgd import train
from raysgd.train import Trainer
from raysgd.train.backend import BackendConfig
from tests.conftest import IN_SOAK
from tests.fire import Fire

NUM_SEEDS = int(os.environ.get("RAYSGD_SOAK", "1"))
FIRST_SEED = int(os.environ.get("RAYSGD_SEED", "0"))
NUM_STEPS, NUM_WORKERS = 150, 3


def put(path, number):
    """Write a number. A reader gets this number or the previous one."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.pwrite(descriptor, struct.pack("q", number), 0)
    os.close(descriptor)


def get(path):
    try:
        with open(path, "rb") as file:
            return struct.unpack("q", file.read(8))[0]
    except (FileNotFoundError, struct.error):
        return 0


def saves_step_by_step(folder):
    """Save `NUM_STEPS` times. Return the first step of each start."""
    state = train.load_checkpoint() or {"step": 0, "starts": []}
    # All saves up to the lowest of these steps have returned on all ranks.
    returned = min(get(f"{folder}/returned-{rank}") for rank in range(train.world_size()))
    assert state["step"] >= returned, f"resumed from {state['step']}, but saved {returned}"
    starts = [*state["starts"], state["step"]]
    for step in range(state["step"] + 1, NUM_STEPS + 1):
        time.sleep(0.01)
        train.save_checkpoint(step=step, starts=starts)
        put(f"{folder}/returned-{train.world_rank()}", step)
        if step % 3 == 0:
            train.report(step=step)
    return starts


@pytest.mark.skipif(not IN_SOAK, reason="test_train_failures.py kills at fixed steps")
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_SEEDS))
def test_a_run_always_resumes_from_its_newest_checkpoint(ray_cluster, tmp_path, seed):
    trainer = Trainer(BackendConfig(), (1, NUM_WORKERS), logdir=tmp_path / "runs", max_retries=-1)

    def num_losses():
        return sum(event.kind in ("lost", "newcomer_failed") for event in trainer.events)

    with Fire(seed) as fire:
        trainer.start()
        try:
            # on a busy machine, kills without an end would let no worker start
            fire.enough = lambda: num_losses() >= 6
            num_runs = 0
            while num_losses() < 2:
                num_runs += 1
                (folder := tmp_path / f"run{num_runs}").mkdir()
                results = trainer.run(saves_step_by_step, str(folder))
                assert all(starts == sorted(results[0]) for starts in results)
                assert trainer.latest_checkpoint["step"] == NUM_STEPS
            fire.end()
            assert "waiting" not in [event.kind for event in trainer.events]  # there is room
        finally:
            trainer.shutdown()
