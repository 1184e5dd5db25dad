"""Weights of the losses of an update."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.data.partition import MicroBatch, UpdatePlan
from raysgd.loop.loss_weights import LossCount
from raysgd.loop.transaction import UpdateTransaction
from raysgd.torch.losses import as_count


def weights_of(steps, planned=None, tx=None, num_workers=1, counts=True, others=0):
    """Return the final weight of each micro-batch's gradient. None is a batch without a loss."""
    tx, held = tx or UpdateTransaction(), []
    tx.begin_plan(UpdatePlan(tuple(MicroBatch(step_index=i) for i in range(planned or len(steps)))))
    for index, count in enumerate(steps):
        tx.begin_micro_batch(MicroBatch(step_index=index), is_last=index == len(steps) - 1)
        if count is None:
            continue
        given = LossCount(count if counts else None), num_workers, lambda total: total + others
        correction, weight = tx.weights.add(*given)
        held = [value * correction for value in held] + [weight]
        assert tx.weights.add(*given) == (1.0, weight)  # another loss
    tx.commit()
    tx.reset()
    return held


counts = st.lists(st.integers(0, 64), min_size=1, max_size=8)


@given(counts, st.integers(0, 4), st.integers(1, 4), st.integers(0, 90))
def test_each_item_of_all_workers_has_the_same_weight(steps, more_planned, num_workers, others):
    tx, total = UpdateTransaction(), sum(steps) + others
    given = steps, len(steps) + more_planned, tx, num_workers
    weights = weights_of(*given, others=others)
    expected = [count * num_workers / total if count else 0 for count in steps]
    assert weights == pytest.approx(expected, rel=1e-12)
    # the next update knows this total, which must not change any bit
    assert weights_of(*given, others=others) == weights


@given(st.integers(1, 8), st.integers(0, 4), st.integers(1, 4))
def test_batches_of_unknown_size_have_the_same_weight(number, more_planned, num_workers):
    planned = number + more_planned
    weights = weights_of([1] * number, planned, num_workers=num_workers, counts=False)
    assert weights == pytest.approx([1 / number] * number, rel=1e-12)


def test_the_usual_update_needs_no_correction_of_gradients():
    for samples, total in ((49, 49 * 2 * 3), (None, None)):
        tx, batches = (
            UpdateTransaction(),
            [MicroBatch(samples, step_index=step) for step in range(2)],
        )
        tx.begin_plan(UpdatePlan(tuple(batches), total))
        for micro_batch in batches:
            tx.begin_micro_batch(micro_batch, is_last=micro_batch.step_index == 1)
            assert tx.weights.add(LossCount(), 3) == (1.0, 0.5)


def test_first_loss_of_a_generation_is_not_scaled_up():
    """With float16, it could overflow."""
    tx = UpdateTransaction()
    tx.begin_plan(UpdatePlan(tuple(MicroBatch(step_index=step) for step in range(4))))
    tx.begin_micro_batch(MicroBatch(), is_last=False)
    _, weight = tx.weights.add(LossCount(1000.0), 2, lambda count: 2 * count)
    assert weight == pytest.approx(1 / 4, rel=0.5)


def test_batch_without_a_loss_does_not_count():
    assert weights_of([None, 4, 4], counts=False) == [0.5, 0.5]
    assert weights_of([None, 4, 4]) == [0.5, 0.5]


def test_counts_for_some_batches_of_an_update_are_an_error():
    for first, second in ((None, 3), (3, None)):
        tx = UpdateTransaction()
        tx.begin_micro_batch(MicroBatch(), is_last=False)
        tx.weights.add(LossCount(first))
        tx.begin_micro_batch(MicroBatch())
        with pytest.raises(ValueError, match="for all of them or for none"):
            tx.weights.add(LossCount(second))


def test_counts_of_losses_may_differ_only_between_optimizers():
    tx = UpdateTransaction()
    tx.begin_micro_batch(MicroBatch())
    tx.weights.add(LossCount(3.0))
    with pytest.raises(ValueError, match=r"num_samples=4.* follows num_samples=3"):
        tx.weights.add(LossCount(4.0))
    tx.end_optimizer_step(object())
    assert tx.weights.add(LossCount(4.0)) == (1.0, 1.0)


@pytest.mark.parametrize("count", ["3", True, [1], 1j, -1, math.inf, math.nan])
def test_number_of_samples_must_be_a_finite_number(count):
    is_number = isinstance(count, int | float) and count is not True
    said = "finite and at least 0" if is_number else "a number"
    with pytest.raises(ValueError if is_number else TypeError, match=f"num_samples=.*be {said}"):
        as_count(count)
