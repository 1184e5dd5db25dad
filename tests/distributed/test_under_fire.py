"""Processes killed all the time, those that start as well: training goes on, and ends right.

RAYSGD_SOAK=50 makes fifty runs of it, each with another seed.
"""

import os
import time

import pytest

from raysgd import ElasticConfig
from raysgd.utils import BATCH_SIZE
from tests.conftest import IN_SOAK
from tests.fire import Fire
from tests.ledger import Ledger, ledger_of, ledger_trainer
from tests.operators import replica_hash

NUM_SEEDS = int(os.environ.get("RAYSGD_SOAK", "3"))
FIRST_SEED = int(os.environ.get("RAYSGD_SEED", "0"))
NUM_EPOCHS, NUM_SAMPLES = 4, 3600
STEP_S = 0.05 if IN_SOAK else 0.01


class Paced(Ledger):
    """Takes some time for a step, the same with any number of workers."""

    def train_batch(self, batch, batch_info):
        time.sleep(self.config["step_s"])
        return super().train_batch(batch, batch_info)


def train_on_ledger(fire):
    """Train for some epochs, in so many seconds; return them and what happened."""
    began = time.monotonic()
    config = {"num_samples": NUM_SAMPLES, BATCH_SIZE: 36, "step_s": STEP_S}
    with ledger_trainer(
        3, elastic=ElasticConfig(snapshot_every=10), operator_cls=Paced, **config
    ) as trainer:
        counted = [trainer.train(max_retries=10**6) for _ in range(NUM_EPOCHS)]
        took_s = time.monotonic() - began
        if fire is not None:
            fire.end()
        assert [metrics["num_samples"] for metrics in counted] == [NUM_SAMPLES] * NUM_EPOCHS
        assert len(set(trainer.apply_all_operators(replica_hash))) == 1
        repeats = ledger_of(trainer) - NUM_EPOCHS
        assert repeats.min() == 0
        assert repeats.sum() <= 2 * NUM_EPOCHS
        return took_s, [event.kind for event in trainer.events]


@pytest.fixture(scope="module")
def undisturbed_s(module_cluster):
    return train_on_ledger(None)[0]


@pytest.mark.slow("four epochs, in which some ten workers start")
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_SEEDS))
def test_training_goes_on_whatever_is_killed(undisturbed_s, seed):
    with Fire(seed) as fire:
        took_s, kinds = train_on_ledger(fire)
    print(f"seed {seed}: {fire.num_kills} kills, {took_s:.1f} s, undisturbed {undisturbed_s:.1f} s")
    assert kinds.count("lost") + kinds.count("newcomer_failed") > 1
    assert "waiting" not in kinds  # there is room all the time
    assert took_s < 5 * undisturbed_s
