"""Regression: the definitions of losses and metrics."""

import math

import pytest
import torch
from sklearn.metrics import r2_score
from torch.utils.data import DataLoader

from raysgd.operators import Regressor
from raysgd.testing import run_operator
from tests.operators import local


def test_losses_and_metrics_are_as_defined():
    output, target = torch.tensor([[0.0], [3.0], [1.0]]), torch.tensor([0.5, 0.0, 1.0])
    expected = {"mse": (0.25 + 9) / 3, "l1": 3.5 / 3, "huber": (0.125 + (3 - 0.5)) / 3}
    for loss, value in expected.items():
        operator = run_operator(Regressor, {"model": torch.nn.Linear(1, 1), "loss": loss})
        operator.model = torch.nn.Identity()
        found = operator.validate(iter([(output[:1], target[:1]), (output[1:], target[1:])]))
        assert found["val_loss"] == pytest.approx(value, rel=1e-6)
    assert found["val_mae"] == pytest.approx(3.5 / 3)
    assert found["val_rmse"] == pytest.approx(math.sqrt(9.25 / 3))
    assert found["val_r2"] == pytest.approx(r2_score(target, output[:, 0]))


def test_shapes_that_would_be_broadcast_are_refused():
    operator = run_operator(Regressor, {"model": torch.nn.Linear(2, 3)})
    with pytest.raises(ValueError, match=r"shape \(4, 3\), but the target \(4,\)"):
        operator.train_batch((torch.zeros(4, 2), torch.zeros(4)), {})


def test_without_a_number_of_items_all_terms_of_a_batch_count():
    uncounted = type("Uncounted", (Regressor,), {"num_items": lambda self, batch: None})
    operator = run_operator(uncounted, {"model": torch.nn.Linear(2, 3)})
    batch = torch.ones(4, 2), torch.zeros(4, 3)
    expected = operator.model(batch[0]).square().mean().item()
    assert operator.train_batch(batch, {})["train_loss"].compute() == pytest.approx(expected)


def test_batches_weigh_by_their_numbers_of_terms():
    batches = [(torch.ones(2, n, 1) * n, torch.ones(2, n, 1)) for n in (4, 40)]
    model = torch.nn.Linear(1, 1)
    features, target = (torch.cat(parts, dim=1) for parts in zip(*batches, strict=True))
    gradients = torch.autograd.grad((model(features) - target).square().mean(), model.parameters())
    config = {"model": model, "optimizer": "sgd", "lr": 0.1}
    config["train_data"] = DataLoader(batches, batch_size=None)
    steps = zip(model.parameters(), gradients, strict=True)
    expected = [p.detach() - 0.1 * gradient for p, gradient in steps]
    with local(Regressor, {**config, "gradient_accumulation_steps": 2}) as trainer:
        trainer.train()
        torch.testing.assert_close(list(trainer.get_model().parameters()), expected)


@pytest.mark.parametrize("loss", ["mse", "l1", "huber"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_targets_keep_their_precision(loss, dtype):
    """This includes models with 16-bit outputs."""
    data = (torch.zeros(2, 2), torch.tensor([1001, 70001], dtype=dtype))
    config = {"model": torch.nn.Linear(2, 1, bias=False), "loss": loss}
    config |= {"train_data": data, "validation_data": data}
    for amp in ({}, {"use_fp16": True, "amp_dtype": torch.float16}):
        with local(Regressor, config, **amp) as trainer:
            trainer.train()
            assert trainer.validate()["val_mae"] == pytest.approx(35501, rel=1e-7)


@pytest.mark.parametrize("offset", [0.0, 1e5])
def test_r2_of_parts_is_that_of_the_whole_and_nan_if_targets_are_equal(offset):
    draw = torch.Generator().manual_seed(0)
    target = torch.randn(101, 3, generator=draw, dtype=torch.float64) + offset
    output = target + 0.5 * torch.randn(101, 3, generator=draw, dtype=torch.float64)
    operator = run_operator(Regressor, {"model": torch.nn.Linear(1, 1)})
    ends = ((0, 1), (1, 50), (50, 101))
    parts = [operator.compute_metrics(output[a:b], target[a:b])["r2"] for a, b in ends]
    merged = parts[2].merge(parts[0]).merge(parts[1]).compute()
    assert merged == pytest.approx(r2_score(target - offset, output - offset), abs=1e-5)
    equal = torch.full((7,), 0.1, dtype=torch.float64)
    assert math.isnan(operator.compute_metrics(equal, equal)["r2"].compute())
