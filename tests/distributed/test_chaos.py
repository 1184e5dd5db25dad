"""Faults that users inject."""

import os
import threading

import psutil
import pytest

from raysgd.testing import chaos
from raysgd.testing.chaos import Chaos, Fault
from tests.conftest import IN_SOAK, own_memory
from tests.ledger import check_ledger, ledger_trainer
from tests.shared import Shared

NUM_SEEDS = int(os.environ.get("RAYSGD_SOAK", "1"))
FIRST_SEED = int(os.environ.get("RAYSGD_SEED", "5"))


@pytest.fixture(scope="module")
def three_workers(module_cluster):
    with ledger_trainer(3, num_samples=20_000 if IN_SOAK else 3000) as trainer:
        yield Shared(trainer)


@pytest.fixture
def three(three_workers):
    return three_workers.fresh()


@pytest.mark.skipif(not IN_SOAK, reason="examples/elastic.py does the same with two kills")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_SEEDS))
def test_random_kills_lose_no_samples_and_leak_no_memory(three, seed):
    trainer, driver = three.trainer, psutil.Process()
    num_kills = 20
    faults = chaos.schedule(seed, num_kills, num_workers=3, num_steps=1200)
    never = Fault(rank=0, step=10**9)
    ended = threading.Event()
    memory, sockets = [], []

    def watch():
        while not ended.wait(0.1):
            if len(injected.injected) > len(memory):
                memory.append(own_memory())
                sockets.append(len(driver.net_connections()))

    with Chaos(trainer, [*faults, never]) as injected:
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            metrics = trainer.train(max_retries=num_kills)
        finally:
            ended.set()
            watcher.join()
    assert injected.pending == [never]
    assert {i.fault for i in injected.injected} == set(faults)
    check_ledger(trainer, metrics)
    assert three.kinds.count("lost") == num_kills
    assert "restarted" not in three.kinds
    assert not {i.pid for i in injected.injected} & set(trainer.apply_all_workers(os.getpid))
    assert max(memory) - memory[5] < 100 * 2**20, memory
    assert max(sockets[10:]) <= max(sockets[:10]) + 20, sockets
