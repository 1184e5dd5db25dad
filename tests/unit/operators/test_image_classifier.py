"""Image classification: learning, and the definitions of loss and accuracies."""

from types import SimpleNamespace

import pytest
import torch

from raysgd.operators import ImageClassifier
from raysgd.testing import run_operator
from tests.operators import local
from tests.unit.operators.samples import digits


def make_model(config):
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    )


def config(**options):
    train, held_out = digits()
    return {"model": make_model, "train_data": train, "validation_data": held_out, **options}


def test_learns_digits_in_half_precision():
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 1.0, "batch_size": 16}
    options |= {"lr": 5e-3, "label_smoothing": 0.1, "top_k": 3, "seed": 0}
    with local(ImageClassifier, config(**options), use_fp16=True) as trainer:
        *_, train = (trainer.train() for _ in range(8))
        found = trainer.validate()
    assert found["val_accuracy"] > 0.94
    assert train["num_samples"] == 1440
    assert found["val_accuracy"] < found["val_top3_accuracy"] <= 1


class Fixed(torch.nn.Module):
    """Returns its input times a weight of 1, as scores."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, scores):
        return self.weight * scores


def test_losses_and_accuracies_are_as_defined():
    operator = run_operator(
        ImageClassifier, {"model": Fixed(), "label_smoothing": 0.3, "top_k": 2, "lr": 1e-9}
    )
    scores = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    target = torch.tensor([0, 1, 2], dtype=torch.int32)
    logs = scores.log_softmax(dim=1)
    plain = -logs[torch.arange(3), target.long()]
    for classes in (target, torch.eye(3)):
        found = operator.validate(iter([(scores, classes)]))
        assert found["val_loss"] == pytest.approx(plain.mean().item(), rel=1e-6)
        assert found["val_accuracy"] == pytest.approx(1 / 3)
        assert found["val_top2_accuracy"] == pytest.approx(2 / 3)
    smoothed = 0.7 * plain - 0.3 * logs.mean(dim=1)
    loss = operator.train_batch((scores, target), {})["train_loss"].compute()
    assert loss == pytest.approx(smoothed.mean().item(), rel=1e-6)
    mixed = torch.tensor([[0.25, 0.75, 0.0]])  # probabilities, as of MixUp
    loss = operator.train_batch((scores[:1], mixed), {})["train_loss"].compute()
    expected = -0.7 * (mixed[0] * logs[0]).sum() - 0.3 * logs[0].mean()
    assert loss == pytest.approx(expected.item(), rel=1e-6)


def test_models_may_take_several_features_and_give_an_object_with_logits():
    class Two(Fixed):
        def forward(self, scores, more):
            return SimpleNamespace(logits=super().forward(scores) + more)

    operator = run_operator(ImageClassifier, {"model": Two()})
    batch = (torch.eye(3), torch.zeros(3, 1), torch.arange(3))
    assert operator.train_batch(batch, {})["num_samples"] == 3
    assert operator.validate(iter([batch]))["val_accuracy"] == 1
