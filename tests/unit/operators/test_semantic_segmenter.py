"""Classes of pixels: what is learned, and the definitions of loss and metrics."""

import pytest
import torch

from raysgd.operators import SemanticSegmenter
from raysgd.testing import run_operator
from tests.unit.operators.samples import shapes


def make_model(config):
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 5, padding=2),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 8, 5, padding=2),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 3, 1),
    )


def test_learns_shapes(trained):
    config = {
        "model": make_model,
        "num_classes": 3,
        "train_data": shapes(256, seed=0),
        "validation_data": shapes(64, seed=1),
        "batch_size": 8,
        "lr": 0.01,
        "train_metrics": True,
    }
    train, found = trained(SemanticSegmenter, config, num_epochs=10)
    assert found["val_mean_iou"] > 0.7  # background alone gives less than 1 / 3
    assert found["val_pixel_accuracy"] > 0.92
    assert train["train_mean_iou"] > 0.6


class Given(torch.nn.Module):
    """Gives its input."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, scores):
        return {"out": self.weight * scores}


def given(num_classes=3, **config):
    config = {"model": Given(), "num_classes": num_classes, **config}
    return run_operator(SemanticSegmenter, config)


def scores_of(classes, num_classes=3):
    return torch.nn.functional.one_hot(classes, num_classes).permute(0, 3, 1, 2).float()


def test_metrics_are_those_of_all_pixels_and_not_means_over_batches():
    """By hand: of class 0 one of two pixels is hit, and class 1 is predicted once too often."""
    predicted = torch.tensor([[[0, 1]], [[1, 2]]])
    target = torch.tensor([[[0, 0]], [[1, 255]]], dtype=torch.uint8)
    batches = [(scores_of(predicted[i : i + 1]), target[i : i + 1]) for i in (0, 1)]
    found = given().validate(iter(batches))
    assert found["val_mean_iou"] == pytest.approx((1 / 2 + 1 / 2) / 2)
    assert found["val_pixel_accuracy"] == pytest.approx(2 / 3)
    right, wrong = (-torch.tensor([1.0, 0, 0]).log_softmax(dim=0)[i].item() for i in (0, 1))
    assert found["val_loss"] == pytest.approx((2 * right + wrong) / 3, rel=1e-6)


def test_a_batch_of_nothing_but_ignored_pixels_has_no_loss_and_no_weight():
    operator = given(ignore_index=9)
    scores = scores_of(torch.zeros(1, 1, 2, dtype=torch.long))
    nothing, something = torch.full((1, 1, 2), 9), torch.zeros(1, 1, 2, dtype=torch.long)
    operator.train_batch((scores, nothing), {})
    assert operator.model.weight.item() == 1.0
    whole = operator.validate(iter([(scores, something), (scores, nothing)]))
    part = operator.validate(iter([(scores, something)]))
    assert whole["val_loss"] == part["val_loss"] > 0
    assert whole["val_mean_iou"] == 1.0


def test_scores_for_other_classes_are_refused():
    with pytest.raises(ValueError, match=r"scores for 3 classes, but config\['num_classes'\] is 2"):
        given(num_classes=2).validate(iter([(torch.zeros(1, 3, 1, 2), torch.zeros(1, 1, 2))]))
