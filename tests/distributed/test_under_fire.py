"""Training ends with exact results while running and starting workers are killed at random.

`make soak ARGS="--only fire --seeds 50"` makes fifty runs with different seeds.
"""

import os
import time

import pytest

from raysgd import ElasticConfig
from raysgd.utils import BATCH_SIZE
from tests.conftest import HAS_FULL_SHARDING, IN_SOAK
from tests.fire import Fire
from tests.ledger import PacedLedger, ledger_of, ledger_trainer
from tests.operators import replica_hash

NUM_SEEDS = int(os.environ.get("RAYSGD_SOAK", "1"))
FIRST_SEED = int(os.environ.get("RAYSGD_SEED", "0"))
NUM_EPOCHS, NUM_SAMPLES = 4 if IN_SOAK else 2, 3600
STEP_S = 0.05 if IN_SOAK else 0.01
QUIET_START_S = 6.0 if IN_SOAK else 3.0
"""Seconds that three workers take to start on an idle machine, with a margin in the soak.

The suite runs other tests in parallel. The lower value doubles the pauses between kills. The kills
begin after the start and end after two losses. Otherwise a busy machine would hardly train.
"""
COPY = {"sharding_args": {"copies": 1}}  # also for the two workers left after a loss
REGISTERED = [
    {"sharding": "full", **COPY},
    {"compile": {"backend": "aot_eager"}},
    {"sharding": "optimizer", **COPY},
    {},
]
if not HAS_FULL_SHARDING:
    del REGISTERED[0]


def num_losses(trainer):
    kinds = [event.kind for event in trainer.events]
    return kinds.count("lost") + kinds.count("newcomer_failed")


def train_on_ledger(fire, **register):
    """Train for `NUM_EPOCHS` or longer, until a fire has cost two workers.

    Returns the seconds of `NUM_EPOCHS` epochs, the seconds of the start, and the kinds of events.
    """
    began = time.monotonic()
    config = {"num_samples": NUM_SAMPLES, BATCH_SIZE: 36, "step_s": STEP_S, "register": register}
    with ledger_trainer(
        3, elastic=ElasticConfig(snapshot_every=10), operator_cls=PacedLedger, **config
    ) as trainer:
        start_s = time.monotonic() - began
        if fire is not None and not IN_SOAK:
            fire.enough = lambda: num_losses(trainer) >= 2
            fire.pauses_s = tuple(pause / 2 for pause in pauses_s(start_s))
            fire.start()
        num_epochs = 0
        while num_epochs < NUM_EPOCHS or (fire is not None and num_losses(trainer) < 2):
            trainer.train(max_retries=10**6)
            num_epochs += 1
        took_s = (time.monotonic() - began) * NUM_EPOCHS / num_epochs
        if fire is not None:
            fire.end()
        if register.get("sharding") != "full":  # there, workers have different rows
            assert len(set(trainer.apply_all_operators(replica_hash))) == 1
        repeats = ledger_of(trainer) - num_epochs
        assert repeats.min() == 0
        assert repeats.sum() <= 2 * num_epochs
        return took_s, start_s, [event.kind for event in trainer.events]


def pauses_s(start_s):
    """Return the range of pauses between kills, scaled to how long workers took to start."""
    slower = max(1.0, start_s / QUIET_START_S)
    return 1.0 * slower, 4.0 * slower


@pytest.fixture(scope="module")
def undisturbed(module_cluster):
    took_s, start_s, _ = train_on_ledger(None)
    return took_s, start_s


SEEDS = pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_SEEDS))


@pytest.mark.skipif(IN_SOAK, reason="the soak kills workers that start for the first time as well")
@pytest.mark.slow("epochs in which some ten workers start")
@SEEDS
def test_training_continues_whatever_is_killed(module_cluster, seed):
    fire = Fire(seed)
    try:
        *_, kinds = train_on_ledger(fire, **REGISTERED[seed])
    finally:
        fire.end()
    assert "waiting" not in kinds  # there is always room


@pytest.mark.skipif(not IN_SOAK, reason="it needs a machine that has nothing else to do")
@SEEDS
def test_kills_from_the_start_cost_at_most_five_times_the_time(undisturbed, seed):
    undisturbed_s, start_s = undisturbed
    with Fire(seed, pauses_s(start_s)) as fire:
        took_s, _, kinds = train_on_ledger(fire, **REGISTERED[seed % len(REGISTERED)])
    alone = f"undisturbed {undisturbed_s:.1f} s, of which {start_s:.1f} to start"
    print(f"seed {seed}: {fire.num_kills} kills, {took_s:.1f} s, {alone}")
    assert "waiting" not in kinds
    assert took_s < 5 * undisturbed_s
