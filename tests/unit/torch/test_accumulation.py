"""Weights of the losses of an update."""

import math

import pytest

from raysgd.data.partition import MicroBatchPlan, UpdatePlan
from raysgd.loop.loss_weights import LossCount
from raysgd.loop.update import Update
from raysgd.torch.losses import as_count


def test_the_usual_update_needs_no_correction_of_gradients():
    for samples, total in ((49, 49 * 2 * 3), (None, None)):
        update, batches = Update(), [MicroBatchPlan(samples, step_index=step) for step in range(2)]
        update.begin(UpdatePlan(tuple(batches), total))
        for micro_batch in batches:
            update.begin_micro_batch(micro_batch, is_last=micro_batch.step_index == 1)
            assert update.loss_weights.add(LossCount(), 3) == (1.0, 0.5)


def test_first_loss_of_a_generation_is_not_scaled_up():
    """With float16, it could overflow."""
    update = Update()
    update.begin(UpdatePlan(tuple(MicroBatchPlan(step_index=step) for step in range(4))))
    update.begin_micro_batch(MicroBatchPlan(), is_last=False)
    weight = update.loss_weights.add(LossCount(1000.0), 2, lambda count: 2 * count).loss
    assert weight == pytest.approx(1 / 4, rel=0.5)


def test_an_exchange_that_divides_by_counts_gets_sums_of_items():
    update, part = Update(), MicroBatchPlan(4, step_index=0)
    update.begin(UpdatePlan((part,), total_samples=8, has_logical_workers=True))
    update.begin_micro_batch(part)
    for count, items in ((LossCount(3.0), 3.0), (LossCount(3.0), 3.0)):
        factors = update.loss_weights.add(count, divides_by_counts=True)
        assert factors == (1.0, items / 8)
    assert update.loss_weights.set_total_items(5.0) == 8 / 5
    assert not update.loss_weights.has_no_items
    update.loss_weights.set_total_items(0.0)
    assert update.loss_weights.has_no_items


def test_fixed_parts_are_neither_split_nor_alone():
    for has_logical_workers in (False, True):
        update, parts = Update(), (MicroBatchPlan(), MicroBatchPlan())
        for planned in (parts, parts[:1]):
            update.begin(UpdatePlan(planned, has_logical_workers=has_logical_workers))
            update.begin_micro_batch(planned[0], is_last=len(planned) == 1)
            is_several = len(planned) > 1
            assert update.is_split == (is_several and not has_logical_workers)
            assert update.has_one_micro_batch == (not is_several and not has_logical_workers)
            update.close()


def test_counts_for_some_batches_of_an_update_are_an_error():
    for first, second in ((None, 3), (3, None)):
        update = Update()
        update.begin_micro_batch(MicroBatchPlan(), is_last=False)
        update.loss_weights.add(LossCount(first))
        update.begin_micro_batch(MicroBatchPlan())
        with pytest.raises(ValueError, match="for all of them or for none"):
            update.loss_weights.add(LossCount(second))


def test_counts_of_losses_may_differ_only_in_an_update_of_one_micro_batch():
    update = Update()
    update.begin_micro_batch(MicroBatchPlan())
    for count in (3.0, 4.0):
        assert update.loss_weights.add(LossCount(count)) == (1.0, 1.0)
    update.begin_micro_batch(MicroBatchPlan())
    update.loss_weights.add(LossCount(3.0))
    with pytest.raises(ValueError, match=r"num_items=4.* follows num_items=3"):
        update.loss_weights.add(LossCount(4.0))


@pytest.mark.parametrize("count", ["3", True, [1], 1j, -1, math.inf, math.nan])
def test_number_of_samples_must_be_a_finite_number(count):
    is_number = isinstance(count, int | float) and count is not True
    error, said = (ValueError, "at least 0, and finite") if is_number else (TypeError, "a number")
    with pytest.raises(error, match=f"num_items=.*be {said}"):
        as_count(count)
