"""Semantic segmentation: the definitions of loss and metrics, and confusion matrices."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sklearn_metrics

from raysgd.operators import SemanticSegmenter
from raysgd.operators.classifiers import confusion_matrix, macro_f1, mean_iou
from raysgd.testing import run_operator
from tests.unit.operators.test_image_classifier import Fixed


class Given(Fixed):
    def forward(self, scores):
        return {"out": super().forward(scores)}


def segmenter(**config):
    return run_operator(SemanticSegmenter, {"model": Given(), **config})


def scores_of(classes, num_classes=3):
    return torch.nn.functional.one_hot(classes, num_classes).permute(0, 3, 1, 2).float()


def test_metrics_are_those_of_all_pixels_and_not_means_over_batches():
    """One of two pixels of class 0 is predicted correctly. The other is predicted as class 1."""
    predicted = torch.tensor([[[0, 1]], [[1, 2]]])
    target = torch.tensor([[[0, 0]], [[1, 255]]], dtype=torch.uint8)
    batches = [(scores_of(predicted[i : i + 1]), target[i : i + 1]) for i in (0, 1)]
    found = segmenter().validate(iter(batches))
    assert found["val_mean_iou"] == pytest.approx((1 / 2 + 1 / 2) / 2)
    assert found["val_pixel_accuracy"] == pytest.approx(2 / 3)
    right, wrong = (-torch.tensor([1.0, 0, 0]).log_softmax(dim=0)[i].item() for i in (0, 1))
    assert found["val_loss"] == pytest.approx((2 * right + wrong) / 3, rel=1e-6)


def test_a_batch_of_nothing_but_ignored_pixels_has_no_loss_and_no_weight():
    operator = segmenter(ignore_index=9)
    scores = scores_of(torch.zeros(1, 1, 2, dtype=torch.long))
    nothing, something = torch.full((1, 1, 2), 9), torch.zeros(1, 1, 2, dtype=torch.long)
    operator.train_batch((scores, nothing), {})
    assert operator.model.weight.item() == 1.0
    whole = operator.validate(iter([(scores, something), (scores, nothing)]))
    part = operator.validate(iter([(scores, something)]))
    assert whole["val_loss"] == part["val_loss"] > 0
    assert whole["val_mean_iou"] == 1.0


# ---- confusion matrices


pairs = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=40)


@given(pairs)
def test_all_figures_are_those_of_scikit_learn(pairs):
    predicted, target = torch.tensor(pairs).T
    counts = confusion_matrix(torch.eye(5)[predicted], target)
    there = sorted({label for pair in pairs for label in pair})
    expected = sklearn_metrics.confusion_matrix(target, predicted, labels=range(5))
    assert counts.tolist() == expected.tolist()
    for ours, theirs in (
        (macro_f1, sklearn_metrics.f1_score),
        (mean_iou, sklearn_metrics.jaccard_score),
    ):
        value = theirs(target, predicted, labels=there, average="macro", zero_division=0)
        assert ours(counts) == pytest.approx(value)


def test_ignored_positions_do_not_count():
    scores = scores_of(torch.tensor([[[0, 1], [1, 0]]]), num_classes=2)
    target = torch.tensor([[[0, 255], [255, 1]]])
    assert confusion_matrix(scores, target, ignore_index=255).tolist() == [[1, 0], [1, 0]]
    target = torch.tensor([[[0, 0], [0, 1]]])
    assert confusion_matrix(scores, target, ignore_index=0).tolist() == [[0, 0], [1, 0]]
