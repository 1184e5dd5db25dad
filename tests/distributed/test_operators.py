"""Metrics of ready-made operators on several workers equal those of one process."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer
from raysgd.operators import (
    GAN,
    SemanticSegmenter,
)
from tests.operators import replica_hash
from tests.unit.operators.samples import digits, shapes


def results(operator_cls, config, num_steps, loader=None):
    """Train a little, and return the metrics of validation and the model, as the driver has it.

    There are two workers, one of which is the driver. Validation is done a second time in two
    calls: in the last step of all one of them has no batch. What is predicted for a `loader` of the
    same samples comes with the metrics.
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
        if loader is not None:
            tested = trainer.test(loader)
            assert tested["num_samples"] == found["num_samples"]
            assert tested["test_loss"] == pytest.approx(found["val_loss"], rel=1e-6)
            found["predicted"] = trainer.predict(loader)
        assert len(set(trainer.apply_all_operators(replica_hash))) == 1
        models = trainer.get_model()
        for model in models if isinstance(models, list) else [models]:
            model.eval()
        return found, models


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
        "num_classes": 3,
        "train_data": shapes(128, seed=4),
        "validation_data": (images, masks),
        "batch_size": 5,
        "lr": 0.02,
    }
    loader = DataLoader(TensorDataset(images, masks), batch_size=2)  # 17 batches, one a half
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


def test_a_gan_trains_on_two_workers_and_its_replicas_stay_the_same(module_cluster):
    """Accumulated too, with models that have batch and spectral normalization."""
    train, held_out = ((images.flatten(1),) for images, _ in digits())
    config = {
        "generator": nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid()
        ),
        "discriminator": make_discriminator,
        "latent_size": 8,
        "features": first_features,
        "train_data": train,
        "validation_data": (held_out[0][:340],),
        "lr": 2e-3,
        "gradient_accumulation_steps": 2,
    }
    found, models = results(GAN, config, num_steps=40)
    assert nn.utils.parametrize.is_parametrized(models[1][3]), "its spectral norm came along"
    assert found["num_samples"] == 340
    assert 0 < found["val_frechet_distance"] < math.inf
    assert 0 < found["val_fake_score"] < 1


def make_discriminator(config):
    return nn.Sequential(
        nn.Linear(64, 32),
        nn.BatchNorm1d(32),
        nn.LeakyReLU(0.2),
        nn.utils.parametrizations.spectral_norm(nn.Linear(32, 1)),
    )


def first_features(images):
    return images[:, :4]
