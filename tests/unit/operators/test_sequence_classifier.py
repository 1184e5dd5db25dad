"""Sequence classification with models of Hugging Face Transformers."""

import pytest
import torch
from sklearn.metrics import f1_score

from raysgd.operators import SequenceClassifier
from raysgd.testing import run_operator
from tests.unit.operators.test_image_classifier import Fixed

TINY = {
    "model_type": "distilbert",
    "num_classes": 2,
    "model_config": {"vocab_size": 128, "dim": 32, "hidden_dim": 64, "n_layers": 1, "n_heads": 2},
}


def test_batches_may_be_dicts_or_tuples():
    operator = run_operator(SequenceClassifier, {**TINY, "seed": 0})
    tokens = torch.randint(1, 128, (3, 8), generator=torch.Generator().manual_seed(0))
    mask, labels = torch.ones_like(tokens), torch.tensor([0, 1, 1])
    batches = [
        {"input_ids": tokens, "attention_mask": mask, "labels": labels},
        {"input_ids": tokens, "labels": labels},
        (tokens, mask, labels),
        (tokens, labels),
    ]
    found = [operator.validate(iter([batch])) for batch in batches]
    assert len({round(metrics["val_loss"], 6) for metrics in found}) == 1
    assert operator.train_batch(batches[0], {})["num_samples"] == 3
    assert operator.predict_batch({"input_ids": tokens}, {}).shape == (3, 2)
    with pytest.raises(ValueError, match=r"has 4 parts.*Return a dict"):
        operator.train_batch((tokens, mask, mask, labels), {})


def test_metrics_are_as_defined():
    class Scores(Fixed):
        def forward(self, input_ids):
            return super().forward(torch.nn.functional.one_hot(input_ids[:, 0], 3).float())

    operator = run_operator(SequenceClassifier, {"model": Scores()})
    predicted, labels = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([0, 1, 1, 2, 0])
    batches = [(predicted[rows, None], labels[rows]) for rows in (slice(0, 1), slice(1, 5))]
    found = operator.validate(iter(batches))
    assert found["val_accuracy"] == pytest.approx(3 / 5)
    assert found["val_f1"] == pytest.approx(f1_score(labels, predicted, average="macro"))


def test_an_unknown_architecture_is_refused():
    with pytest.raises(ValueError, match="nothing"):
        run_operator(SequenceClassifier, {**TINY, "model_type": "nothing"})
