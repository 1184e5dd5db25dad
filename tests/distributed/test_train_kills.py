"""Workers are killed at random times. A run always resumes from its newest checkpoint.

RAYSGD_SOAK=50 makes fifty runs, each with another seed.
"""

import os
import random
import signal
import struct
import threading
import time

import pytest

from raysgd import ElasticConfig, train
from raysgd.train import Trainer
from raysgd.train.backend import BackendConfig
from tests.conftest import IN_SOAK
from tests.fire import Fire

NUM_KILLS = 2  # in a run
NUM_SEEDS = int(os.environ.get("RAYSGD_SOAK", "1"))
FIRST_SEED = int(os.environ.get("RAYSGD_SEED", "0"))


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


def saves_on_and_on(folder):
    """Save until the file ``enough`` exists. Return the first step of each start."""
    rank = train.world_rank()
    state = train.load_checkpoint() or {"step": 0, "starts": []}
    # All saves up to the lowest of these steps have returned on all ranks.
    returned = min(get(f"{folder}/returned-{r}") for r in range(train.world_size()))
    assert state["step"] >= returned, f"resumed from {state['step']}, but saved {returned}"
    starts, step, enough = [*state["starts"], state["step"]], state["step"], False
    put(f"{folder}/pid-{rank}", os.getpid())
    while not enough:
        step += 1
        enough = step > 100_000 or os.path.exists(f"{folder}/enough-{step // 50}")
        train.save_checkpoint(step=step, starts=starts)
        put(f"{folder}/returned-{rank}", step)
        if step % 3 == 0:
            train.report(step=step)
    return starts


class Killer(threading.Thread):
    """Kills workers at random times after they have started the function."""

    def __init__(self, folder, num_kills, draw):
        super().__init__(daemon=True)
        self.folder, self.left, self.draw = folder, num_kills, draw
        self.over = threading.Event()
        self.killed = set()
        self.num_kills = 0

    def run(self):
        while self.left and not self.over.wait(0.01):
            rank = self.draw.randrange(2)
            pid = get(f"{self.folder}/pid-{rank}")
            if pid == 0 or pid in self.killed:
                continue
            # Sometimes the function has just begun, and sometimes it has saved a hundred times.
            self.over.wait(self.draw.choice((0.0, 0.02, 0.1, 0.4)) * self.draw.random())
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                self.killed.add(pid)  # it ended when the previous one was killed
                continue
            self.killed.add(pid)
            self.left -= 1
            self.num_kills += 1
        # Both workers reach this multiple of fifty later, so both stop at the same step.
        ahead = max(get(f"{self.folder}/returned-{r}") for r in range(2)) // 50 + 2
        for number in range(ahead, ahead + 3000):
            open(f"{self.folder}/enough-{number}", "w").close()


@pytest.mark.skipif(not IN_SOAK, reason="test_train_failures.py kills at fixed steps")
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_SEEDS))
def test_a_run_always_resumes_from_its_newest_checkpoint(ray_cluster, tmp_path, seed):
    elastic = ElasticConfig(initial_s=0.1, max_s=1.0)
    trainer = Trainer(BackendConfig(), 2, logdir=tmp_path / "runs", max_retries=-1, elastic=elastic)
    trainer.start()
    killer = Killer(tmp_path, NUM_KILLS, random.Random(seed))
    killer.start()
    try:
        first, second = trainer.run(
            saves_on_and_on,
            str(tmp_path),
            checkpoint_strategy=train.CheckpointStrategy(num_to_keep=1),
        )
        assert first == second
        assert first == sorted(first)
        assert killer.num_kills == NUM_KILLS
        assert "restarted" in [event.kind for event in trainer.events]
    finally:
        killer.over.set()
        killer.join()
        trainer.shutdown()


NUM_STEPS, NUM_WORKERS = 150, 3


def steps_one_by_one():
    state = train.load_checkpoint() or {"step": 0, "starts": []}
    starts = [*state["starts"], state["step"]]
    for step in range(state["step"] + 1, NUM_STEPS + 1):
        time.sleep(0.01)
        train.save_checkpoint(step=step, starts=starts)
    return starts


@pytest.mark.skipif(not IN_SOAK, reason="workers restart again and again")
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_SEEDS))
def test_a_run_ends_although_workers_are_killed_at_random(ray_cluster, tmp_path, seed):
    with Fire(seed) as fire:
        trainer = Trainer(BackendConfig(), (1, NUM_WORKERS), logdir=tmp_path, max_retries=-1)
        trainer.start()
        try:
            kinds = []
            while kinds.count("lost") + kinds.count("newcomer_failed") < 2:
                results = trainer.run(steps_one_by_one)
                assert all(starts == sorted(results[0]) for starts in results)
                assert trainer.latest_checkpoint["step"] == NUM_STEPS
                kinds = [event.kind for event in trainer.events]
            fire.end()
            assert "waiting" not in kinds  # there is always room
        finally:
            trainer.shutdown()
