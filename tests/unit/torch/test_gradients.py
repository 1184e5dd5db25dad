"""Gradients are averaged when the optimizer steps, whatever produced them."""

import pytest
import torch

from tests.unit.torch import gradients
from tests.unit.torch.cases import running_cases
from tests.unit.torch.gradients import Case, expected


@pytest.fixture(scope="module")
def workers():
    """Return a function that trains a case and returns the result of each worker."""
    with running_cases(gradients) as run:
        yield run


@pytest.mark.parametrize(
    "case",
    [
        Case("one_forward"),
        Case("two_forwards"),
        Case("two_forwards", raw=True),
        Case("two_forwards", scaled=True),
        Case("two_forwards", {"max_grad_norm": 0.1}),
        Case("two_forwards", {"sharding": "optimizer"}),
        Case("two_forwards", {"gradient_accumulation_steps": 2}),
        Case("three_forwards_reversed"),
        Case("two_heads"),
        Case("two_heads", raw=True),
        Case("task_by_task"),
        Case("retained"),
        Case("retained", raw=True),
        Case("surgery"),
        Case("own_gradients"),
        Case("own_gradients", raw=True),
        Case("penalty"),
        Case("other_method"),
        Case("only_other_method"),
        Case("in_one_loss"),
        Case("clips_by_hand"),
        Case("closure"),
        Case("line_search", optimizer="searching"),
        Case("sharpness", optimizer="Sharpness"),
        Case("without_sync"),
        Case("never_sync"),
        Case("checkpointed"),
        Case("discards"),
        Case("keeps_zeros"),
        Case("forward_only"),
        Case("one_head", {"ddp_args": {"find_unused_parameters": True}}),
        Case("heads_by_data", {"ddp_args": {"gradient_as_bucket_view": True}}),
        Case("two_heads", {"ddp_args": {"gradient_as_bucket_view": True}}),
        Case("two_forwards", {"ddp_args": {"bucket_cap_mb": 1e-5}}),
        Case("one_head", {"ddp_args": {"bucket_cap_mb": 1e-5}}),
        Case("own_gradients", {"sharding": "optimizer", "max_grad_norm": 0.1}),
        Case("heads_by_data", {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}),
        Case("all_skip"),
        Case("all_skip_first"),
        Case("second_model_rarely", num_models=2),
        Case("one_head"),
        Case("one_head", raw=True),
        Case("one_head", {"gradient_accumulation_steps": 2}),
        Case("one_head_of_object"),
        Case("one_head_of_object", {"gradient_accumulation_steps": 2}),
        Case("one_head_of_checkpointed"),
        Case("heads_of_objects", raw=True),
        Case("one_head_of_kept"),
        Case("heads_by_data"),
        Case("one_or_the_other"),
        Case("one_head", after="freeze_body"),
        Case("one_forward", after="freeze_body"),
        Case("two_heads", after="freeze_some", raw=True),
        Case("one_forward", {"sharding": "optimizer"}, after="freeze_some"),
        Case("one_forward", before="freeze_some", after="unfreeze"),
        Case("two_heads", before="freeze_body", after="unfreeze"),
        Case("two_forwards", before="freeze_all", after="unfreeze"),
    ],
    ids=str,
)
def test_update_equals_that_of_one_process(workers, case):
    first, second = workers(case)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, expected(case), atol=1e-14, rtol=1e-13)


@pytest.mark.parametrize(
    ("step", "at"), [("skips_first", 1), ("skips", 2), ("skips_after_forward", 2)]
)
def test_batch_that_one_worker_skips_is_an_error_in_that_step(workers, step, at):
    _, (message, is_unchanged) = workers(Case(step, num_steps=at))
    assert "self.backward(loss, num_samples=0)" in message
    assert is_unchanged == (at == 1)


@pytest.mark.parametrize("step", ["skips_first_model", "skips_second_model"])
def test_model_that_one_worker_skips_is_an_error_in_that_step(workers, step):
    _, (message, _) = workers(Case(step, num_models=2, num_steps=2))
    assert "self.backward(loss, num_samples=0)" in message


@pytest.mark.parametrize("step", ["task_by_task", "surgery", "own_gradients", "without_sync"])
def test_gradients_without_the_scale_of_float16_are_an_error(workers, step):
    for message, is_unchanged in workers(Case(step, scaled=True)):
        assert "native AMP" in message
        assert "self.backward(loss)" in message
        assert is_unchanged


def test_step_within_a_backward_pass_is_an_error(workers):
    for message, is_unchanged in workers(Case("steps_in_hook")):
        assert "step() runs within a backward pass" in message
        assert is_unchanged
