"""Weights of the batches in an accumulation group."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.data.partition import MicroBatch
from raysgd.torch.optimization import Group, as_count


def effective_weights(sizes, planned, num_losses=1, **weighing):
    """Return the final weight of each batch's gradient."""
    group, held = Group(), []
    for position, size in enumerate(sizes):
        group.begin(MicroBatch(position, planned, is_last=position == len(sizes) - 1))
        correction, weight = group.weigh(size, **weighing)
        held = [value * correction for value in held] + [weight]
        for _ in range(num_losses - 1):
            assert group.weigh(size) == (1.0, weight)
    return held


@given(st.lists(st.integers(1, 64), min_size=1, max_size=8), st.integers(0, 4), st.integers(1, 3))
def test_each_batch_counts_by_its_samples(sizes, more_planned, num_losses):
    weights = effective_weights(sizes, len(sizes) + more_planned, num_losses)
    assert weights == pytest.approx([size / sum(sizes) for size in sizes], rel=1e-12)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 30), st.booleans())
def test_items_are_weighted_by_the_mean_count_of_the_workers(sizes, others, sums_each_batch):
    mean = (sum(sizes) + others) / 2
    weighing = {"mean_over_workers": lambda count: (count + others) / 2}
    weights = effective_weights(sizes, len(sizes), sums_each_batch=sums_each_batch, **weighing)
    assert weights == pytest.approx([size / mean if size else 0 for size in sizes], rel=1e-12)


def test_batch_without_a_loss_does_not_count():
    group = Group()
    group.begin(MicroBatch(0, 3, is_last=False))
    group.begin(MicroBatch(1, 3, is_last=False))
    assert group.weigh(4) == (1.0, 1 / 3)
    group.begin(MicroBatch(2, 3, is_last=True))
    assert group.holds
    assert group.weigh(4) == (1.5, 0.5)


def test_sizes_for_some_batches_of_a_group_are_an_error():
    for first, second in ((None, 3), (3, None)):
        group = Group()
        group.begin(MicroBatch(0, 2, is_last=False))
        group.weigh(first)
        group.begin(MicroBatch(1, 2, is_last=True))
        with pytest.raises(ValueError, match="for all of them or for none"):
            group.weigh(second)
    group.begin(MicroBatch(0, 1))
    group.weigh(3)
    with pytest.raises(ValueError, match=r"num_samples=4.* follows num_samples=3"):
        group.weigh(4)


@pytest.mark.parametrize("count", ["3", True, [1], 1j, -1, math.inf, math.nan])
def test_number_of_samples_must_be_a_finite_number(count):
    is_number = isinstance(count, int | float) and count is not True
    said = "finite and at least 0" if is_number else "a number"
    with pytest.raises(ValueError if is_number else TypeError, match=f"num_samples=.*be {said}"):
        as_count(count)
