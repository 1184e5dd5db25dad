"""Confusion matrices against scikit-learn."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sklearn_metrics

from raysgd.operators.confusion import accuracy, confusion_matrix, macro_f1, mean_iou

pairs = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=40)


@given(pairs)
def test_all_figures_are_those_of_scikit_learn(pairs):
    predicted, target = torch.tensor(pairs).T
    counts = confusion_matrix(predicted, target, num_classes=5)
    there = sorted({label for pair in pairs for label in pair})
    expected = sklearn_metrics.confusion_matrix(target, predicted, labels=range(5))
    assert counts.tolist() == expected.tolist()
    assert accuracy(counts) == pytest.approx((predicted == target).double().mean().item())
    for ours, theirs in (
        (macro_f1, sklearn_metrics.f1_score),
        (mean_iou, sklearn_metrics.jaccard_score),
    ):
        value = theirs(target, predicted, labels=there, average="macro", zero_division=0)
        assert ours(counts) == pytest.approx(value)


def test_ignored_positions_do_not_count():
    target = torch.tensor([[0, 255], [255, 1]])
    counts = confusion_matrix(torch.tensor([[0, 1], [1, 0]]), target, 2, ignore_index=255)
    assert counts.tolist() == [[1, 0], [1, 0]]
    counts = confusion_matrix(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), 2, ignore_index=0)
    assert counts.tolist() == [[0, 0], [0, 1]]
    counts = confusion_matrix(torch.tensor([0, 1]), torch.tensor([-100, 1]), 2)
    assert counts.tolist() == [[0, 0], [0, 1]]
