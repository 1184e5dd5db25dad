"""Metrics of ready-made operators on several workers equal those of one process."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer
from raysgd.operators import SemanticSegmenter
from tests.operators import replica_hash
from tests.unit.operators.samples import shapes


def results(operator_cls, config, num_steps, loader):
    """Train a little. Return the validation metrics and a copy of the model.

    One of the two workers is the driver. A second validation takes two calls: in its last step, one
    worker has no batch. The metrics include the predictions for `loader`, which has the same
    samples.
    """
    with TorchTrainer(
        training_operator_cls=operator_cls,
        config={"seed": 0, **config},
        num_workers=2,
        use_local=True,
        use_gpu=False,
    ) as trainer:
        trainer.train(num_steps=num_steps)
        found = trainer.validate()
        most = trainer.validate(num_steps=math.ceil(found["batch_count"]) - 1)
        rest = trainer.validate()
        assert most["num_samples"] + rest["num_samples"] == found["num_samples"]
        assert rest["batch_count"] < 1
        tested = trainer.test(loader)
        assert tested["num_samples"] == found["num_samples"]
        assert tested["test_loss"] == pytest.approx(found["val_loss"], rel=1e-6)
        found["predicted"] = trainer.predict(loader)
        assert len(set(trainer.apply_all_operators(replica_hash))) == 1
        return found, trainer.get_model().eval()


@pytest.mark.slow("scikit-learn is loaded")
@torch.no_grad()
def test_mean_iou_is_that_of_all_pixels(module_cluster):
    """33 images in batches of 5: the last of seven batches is not full."""
    torch.manual_seed(0)
    images, masks = shapes(33, seed=3)
    masks[7] = 255
    config = {
        "model": nn.Sequential(
            nn.Conv2d(1, 8, 5, padding=2),
            nn.ReLU(),
            nn.Conv2d(8, 8, 5, padding=2),
            nn.ReLU(),
            nn.Conv2d(8, 3, 1),
        ),
        "train_data": shapes(128, seed=4),
        "validation_data": (images, masks),
        "batch_size": 5,
        "lr": 0.02,
    }
    loader = DataLoader(TensorDataset(images, masks), batch_size=2)  # 17 batches, the last of 1
    found, model = results(SemanticSegmenter, config, num_steps=80, loader=loader)
    from sklearn.metrics import jaccard_score

    scores = model(images)
    torch.testing.assert_close(found["predicted"], scores)
    counts = masks != 255
    predicted, target = scores.argmax(dim=1)[counts], masks[counts]
    logs = scores.double().log_softmax(dim=1).permute(0, 2, 3, 1)[counts]
    expected = {
        "num_samples": 33,
        "val_loss": -logs[torch.arange(len(target)), target].mean().item(),
        "val_pixel_accuracy": (predicted == target).double().mean().item(),
        "val_mean_iou": jaccard_score(target, predicted, average="macro"),
    }
    assert {key: found[key] for key in expected} == pytest.approx(expected, abs=1e-6)
    assert 0.34 < found["val_mean_iou"] < 1
