"""An update uses the mean over the items of all workers, losses, and micro-batches."""

import datetime
import itertools
import math
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, example, given, settings
from hypothesis import strategies as st

from raysgd.metrics import merge_workers
from tests.conftest import HAS_FULL_SHARDING, needs_full_sharding, running_ranks
from tests.unit.torch.items import LENGTH, NUM_RANKS, Case, expected

PLAY = """
from tests.unit.torch.items import play

play(rank, dist.TCPStore("127.0.0.1", int(sys.argv[-1])))
"""

MASKED = math.nan
NOTHING = [MASKED] * LENGTH
"""A sample whose tokens are all masked."""
tokens = st.one_of(st.just(MASKED), st.floats(-2, 2, width=32))
samples = st.one_of(st.just(NOTHING), st.lists(tokens, min_size=LENGTH, max_size=LENGTH))


@pytest.fixture(scope="module")
def workers():
    """Return a function that trains a case and returns each worker's parameters and metrics."""
    with running_ranks(PLAY, NUM_RANKS) as store:
        store.set_timeout(datetime.timedelta(seconds=60))
        numbers = itertools.count()

        def train(case):
            number = next(numbers)
            store.set(f"cases/{number}", pickle.dumps(case))
            keys = (f"results/{number}/{rank}" for rank in range(case.num_workers))
            return [pickle.loads(store.get(key)) for key in keys]

        yield train
        store.set(f"cases/{next(numbers)}", pickle.dumps(None))


def check(case, results):
    assert not any(isinstance(each, str) for each in results), "\n".join(map(str, results))
    parameters, train_loss, val_loss = expected(case)
    for found, _ in results:
        torch.testing.assert_close(found, parameters, atol=1e-10, rtol=0)
    trained, validated = map(merge_workers, zip(*(found for _, found in results), strict=True))
    assert trained["num_samples"] == validated["num_samples"] == len(case.targets)
    assert trained["train_loss"] == pytest.approx(train_loss, abs=1e-10, nan_ok=True)
    assert validated["val_loss"] == pytest.approx(val_loss, abs=1e-10, nan_ok=True)


def supported(case):
    """Return the case without what raysgd does not support together."""
    case = replace(
        case,
        scaled=case.scaled and case.sharding != "full",
        shares=case.shares and tuple(case.shares[: case.num_workers]),
    )
    return case if case.is_valid else replace(case, by_hand=False, kind="tokens")


SEVERAL = [[1.0, MASKED], NOTHING, [2, 1], [-1, MASKED], NOTHING, [0.5, 0.25], [1, 1]]
NOTHING_ON_RANK_0 = [NOTHING] * 3 + [[1, 2]] * 9


@pytest.mark.slow("three processes train many small models")
@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.generate],
    deadline=None,
)
@given(
    st.builds(
        Case,
        targets=st.lists(samples, min_size=1, max_size=22),
        num_workers=st.integers(1, NUM_RANKS),
        accumulation=st.integers(1, 3),
        num_parts=st.sampled_from([1, 2, 4]),
        num_losses=st.integers(1, 3),
        sharding=st.sampled_from([None, None, "optimizer", *["full"] * HAS_FULL_SHARDING]),
        max_grad_norm=st.sampled_from([None, 0.05]),
        scaled=st.booleans(),
        shares=st.none() | st.lists(st.floats(0.2, 1), min_size=NUM_RANKS, max_size=NUM_RANKS),
        num_missing=st.sampled_from([0, 0, 1, 2]),
        kind=st.sampled_from(["tokens", "tokens", "samples", "sum"]),
        by_hand=st.booleans(),
    ).map(supported)
)
@example(Case(NOTHING_ON_RANK_0, num_workers=2))
@example(Case(NOTHING_ON_RANK_0, num_workers=2, num_losses=2, sharding="full"))
@example(Case(NOTHING_ON_RANK_0, num_workers=2, accumulation=2, num_losses=2, sharding="full"))
@example(Case([NOTHING] * 7, num_workers=2, accumulation=2))
@example(Case(SEVERAL, num_workers=3, accumulation=2, num_parts=2, sharding="full"))
@example(Case(SEVERAL, num_workers=2, accumulation=3, num_losses=2, sharding="optimizer"))
@example(Case(SEVERAL, num_workers=2, accumulation=2, max_grad_norm=0.05))
@example(Case(SEVERAL, num_workers=3, shares=(3.0, 1.0, 2.0), num_parts=2, kind="samples"))
@example(Case(SEVERAL * 2, num_workers=2, accumulation=3, num_missing=2, kind="sum"))
@example(Case(SEVERAL, num_workers=2, accumulation=2, kind="samples", by_hand=True))
@example(Case(SEVERAL, num_workers=2, accumulation=2, num_losses=2, by_hand=True, num_parts=2))
def test_update_equals_that_of_one_process(workers, case):
    assume(HAS_FULL_SHARDING or case.sharding != "full")
    check(case, workers(case))


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("sharding", [None, pytest.param("full", marks=needs_full_sharding)])
def test_batch_without_a_loss_is_an_error_with_several_workers(workers, sharding, by_hand):
    """The number of samples with a loss would depend on the rank."""
    given = {"sharding": sharding, "by_hand": by_hand, "kind": "samples", "skipped": 1}
    for result in workers(Case([[1, 2]] * 17, 2, accumulation=3, num_losses=2, **given)):
        assert "does not call self.backward(loss) for every batch" in str(result)
        assert "pass num_samples=0" in str(result)
