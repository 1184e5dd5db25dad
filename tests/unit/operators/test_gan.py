"""Two models that train each other."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from raysgd.operators import GAN
from raysgd.testing import run_operator
from tests.operators import local
from tests.unit.operators.samples import digits

CONFIG = {
    "generator": lambda config: nn.Sequential(
        nn.Linear(16, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid()
    ),
    "discriminator": lambda config: nn.Sequential(
        nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)
    ),
    "latent_size": 16,
}


def flat_digits():
    return tuple((images.flatten(1),) for images, _ in digits())


def test_learns_to_make_digits():
    train, held_out = flat_digits()
    config = {**CONFIG, "train_data": train, "validation_data": held_out, "lr": 1e-3, "seed": 0}
    with local(GAN, config) as trainer:
        for _ in range(15):
            metrics = trainer.train()
        after = trainer.validate()
        (made,) = trainer.apply_all_operators(lambda op: op.sample(100, seed=0))
    assert 0.5 <= after["val_discriminator_accuracy"] < 0.95
    assert metrics["train_discriminator_loss"] < 2
    assert (made.shape, made.dtype) == ((100, 64), torch.float32)
    assert made.std(dim=0).mean() > 0.05  # the images differ
    assert (made.mean(dim=0) - train[0].mean(dim=0)).abs().mean() < 0.1


class Plain(nn.Module):
    """Multiplies its input by one parameter, and does so again in the backward pass."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(float(weight)))

    def forward(self, samples):
        return checkpoint(lambda each: self.weight * each, samples, use_reentrant=False)


def plain(**config):
    config = {"latent_size": 1, "optimizer": "sgd", "momentum": 0.0, "lr": 1.0, **config}
    given = {"generator": Plain(2), "discriminator": Plain(1), **config}
    operator = run_operator(GAN, given)
    operator.noise = lambda num_samples, generator=None: torch.tensor([[0.5], [-1.0]])
    return operator


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_both_steps_follow_the_gradients_of_the_losses_as_defined(smoothing):
    operator = plain(label_smoothing=smoothing)
    real, noise = torch.tensor([[1.0], [3.0]]), torch.tensor([[0.5], [-1.0]])
    g, d = (torch.tensor(v, requires_grad=True) for v in (2.0, 1.0))
    of_real, of_fake = (d * real).sigmoid(), (d * (g.detach() * noise)).sigmoid()
    told = -(1 - smoothing) * of_real.log() - smoothing * (1 - of_real).log()
    loss_d = told.mean() - (1 - of_fake).log().mean()
    new_d = (d - torch.autograd.grad(loss_d, d)[0]).detach()
    loss_g = -(new_d * (g * noise)).sigmoid().log().mean()
    new_g = g - torch.autograd.grad(loss_g, g)[0]

    metrics = operator.train_batch((real,), {})
    assert metrics["train_discriminator_loss"].item() == pytest.approx(loss_d.item(), rel=1e-5)
    assert metrics["train_generator_loss"].item() == pytest.approx(loss_g.item(), rel=1e-5)
    assert metrics["train_real_score"].item() == pytest.approx(of_real.mean().item(), rel=1e-5)
    assert operator.discriminator.weight.item() == pytest.approx(new_d.item(), rel=1e-5)
    assert operator.generator.weight.item() == pytest.approx(new_g.item(), rel=1e-5)
    assert all(p.requires_grad for p in operator.discriminator.parameters())


def test_an_error_in_the_generators_step_leaves_a_discriminator_that_can_be_trained():
    class Faulty(Plain):
        def forward(self, samples):
            if not self.weight.requires_grad:
                raise KeyError("judge")
            return super().forward(samples)

    operator = plain(discriminator=Faulty(1))
    with pytest.raises(KeyError):
        operator.train_batch(torch.ones(2, 1), {})
    assert operator.discriminator.weight.requires_grad


def test_validation_draws_the_same_noise_each_time():
    _, held_out = flat_digits()
    operator = run_operator(GAN, {**CONFIG, "validation_data": held_out, "seed": 0})
    found = [operator.validate(iter(operator.validation_loader)) for _ in range(2)]
    assert found[0] == found[1]
