"""What the operators weigh updates by."""

import pytest
import torch

from raysgd.operators import ImageClassifier, LanguageModel, SemanticSegmenter
from raysgd.testing import run_operator

TOKENS = torch.tensor([[1, 2, 3], [1, -100, -100]])
MASKS = torch.tensor([[[0, 1], [255, 255]]], dtype=torch.uint8)


@pytest.mark.parametrize(
    ("operator_cls", "config", "batch", "counts"),
    [
        (LanguageModel, {"vocab_size": 5, "hidden_size": 4}, (TOKENS.abs() % 5, TOKENS), [4]),
        (LanguageModel, {"vocab_size": 5, "hidden_size": 4}, (TOKENS[:1],), [2]),
        (
            SemanticSegmenter,
            {"model": torch.nn.Conv2d(3, 2, 1), "num_classes": 2},
            (torch.ones(1, 3, 2, 2), MASKS),
            [2],
        ),
        (ImageClassifier, {"model": torch.nn.Linear(3, 2)}, (torch.ones(4, 3), torch.ones(4)), []),
    ],
)
def test_workers_weigh_by_what_is_not_ignored(operator_cls, config, batch, counts):
    operator, found = run_operator(operator_cls, config), []

    def mean(count):
        found.append(count)
        return count

    operator._train_state.optimization.mean_over_workers = mean
    operator.train_batch(batch, {})
    assert found == counts
