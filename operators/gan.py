"""Generative adversarial networks."""

import contextlib
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.nn.functional import softplus

from raysgd.metrics import NUM_SAMPLES
from raysgd.operators.base import ConfiguredOperator, evaluating
from raysgd.torch.precision import to_full_precision


class GAN(ConfiguredOperator):
    """Trains a generator G, and a discriminator D that separates generated samples from real ones.

    Goodfellow et al. 2014, "Generative Adversarial Nets", arXiv:1406.2661. The discriminator gives
    each sample x a score. The logistic function of the score is D(x), the probability that x is
    real. Each batch causes two steps:

    - The discriminator minimizes ``-log D(x) - log(1 - D(G(z)))``.
    - The generator minimizes ``-log D(G(z))``, the non-saturating loss of section 3 of that paper.

    The losses are means over the samples x of the batch and over as many noise vectors z, drawn
    from a standard normal distribution. With one-sided label smoothing s (Salimans et al. 2016,
    arXiv:1606.03498), the discriminator's loss for x is ``-(1 - s) log D(x) - s log(1 - D(x))``.

    ==============================  ==========  ================================================
    key                             default     meaning
    ==============================  ==========  ================================================
    ``generator``                   None        a module that maps noise (batch, latent_size) to
                                                samples, or a function of the config that returns
                                                one; not needed if you override `build_generator`
    ``discriminator``               None        a module that gives each sample a score, any
                                                number; or a function, as for ``generator``
    ``latent_size``                 64          numbers in z
    ``generator_lr``                None        learning rate of G; None for ``lr``
    ``discriminator_lr``            None        learning rate of D; None for ``lr``
    ``lr``                          0.0002      with ``betas`` (0.5, 0.999) for "adam" and
                                                "adamw" as in Radford et al. 2016 (DCGAN,
                                                arXiv:1511.06434)
    ``optimizer``                   "adam"
    ``label_smoothing``             0.0         s above, from 0 to below 0.5
    ==============================  ==========  ================================================

    It also has the keys of :class:`ConfiguredOperator`. Batches are samples, or tuples that begin
    with samples.

    Metrics have the prefixes ``train_`` and ``val_``. ``discriminator_loss`` and ``generator_loss``
    are in nats. ``real_score`` and ``fake_score`` are the means of D(x) and D(G(z)). In validation,
    ``val_discriminator_accuracy`` is the fraction of real and generated samples that D classifies
    correctly (0.5 by guessing). Each validation on the same number
    of workers uses the same noise. :class:`WithMetrics` updates its metrics with (generated
    samples, real samples).
    """

    OPTIONS: ClassVar[Mapping[str, Any]] = {
        **ConfiguredOperator.OPTIONS,
        "generator": None,
        "discriminator": None,
        "latent_size": 64,
        "generator_lr": None,
        "discriminator_lr": None,
        "lr": 2e-4,
        "optimizer": "adam",
        "label_smoothing": 0.0,
    }

    # ---- methods to override

    def build_generator(self, config: dict[str, Any]) -> torch.nn.Module:
        return self.build_module("generator", config)

    def build_discriminator(self, config: dict[str, Any]) -> torch.nn.Module:
        return self.build_module("discriminator", config)

    def real_samples(self, batch: Any) -> torch.Tensor:
        """Return the samples of a batch."""
        return batch if isinstance(batch, torch.Tensor) else batch[0]

    def noise(self, num_samples: int, generator: torch.Generator | None = None) -> torch.Tensor:
        """Return noise z of the shape (num_samples, latent_size)."""
        shape = (num_samples, self.options["latent_size"])
        device = self.device if generator is None else generator.device
        return torch.randn(shape, generator=generator, device=device).to(self.device)

    # ---- the steps

    def setup_models(self, config: dict[str, Any]) -> None:
        models = self.build_generator(config), self.build_discriminator(config)
        optimizers = []
        for model, key in zip(models, ("generator_lr", "discriminator_lr"), strict=True):
            optimizer = self.build_optimizer(model.parameters(), config)
            for group in optimizer.param_groups:
                if "betas" in group and not callable(self.options["optimizer"]):
                    group["betas"] = (0.5, 0.999)
                if self.options[key] is not None:
                    group["lr"] = self.options[key]
            optimizers.append(optimizer)
        schedulers = [self.build_scheduler(optimizer, config) for optimizer in optimizers]
        (self.generator, self.discriminator), optimizers, *_ = self.register(
            models=list(models),
            optimizers=optimizers,
            schedulers=None if None in schedulers else schedulers,
            **self.register_options,
        )
        self.generator_optimizer, self.discriminator_optimizer = optimizers

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        real = self.real_samples(self.to_device(batch))
        smoothing, count = self.options["label_smoothing"], len(real)
        with self.autocast():
            fake = self.generator(self.noise(count))
            on_real = to_full_precision(self.discriminator(real))
            loss_real = _loss(on_real, 1 - smoothing)
        # Use separate passes: normalization layers must not mix real and generated samples, and a
        # layer that changes its buffers needs its backward pass before the next forward pass.
        counted = self.count_items(batch, count)
        self.backward(loss_real, counted)
        with self.autocast():
            on_fake = to_full_precision(self.discriminator(fake.detach()))
            loss_fake = _loss(on_fake, 0.0)
        self.backward(loss_fake, counted)
        self.optimizer_step(self.discriminator_optimizer)

        judge = self.unwrapped(self.discriminator)
        # Gradients pass through these parameters. Checkpointing reads them again in `backward`.
        with contextlib.ExitStack() as stack:
            for parameter in judge.parameters():
                stack.callback(parameter.requires_grad_, parameter.requires_grad)
                parameter.requires_grad_(False)
            with self.autocast():
                loss = _loss(to_full_precision(judge(fake)), 1.0)
            self.backward(loss, counted)
        self.optimizer_step(self.generator_optimizer)
        return {
            "train_discriminator_loss": (loss_real + loss_fake).detach(),
            "train_generator_loss": loss.detach(),
            "train_real_score": on_real.detach().sigmoid().mean(),
            "train_fake_score": on_fake.detach().sigmoid().mean(),
            NUM_SAMPLES: count,
        }

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        real = self.real_samples(self.to_device(batch))
        seed = batch_info["batch_idx"] * 100_003 + self.world_rank
        noise = self.noise(len(real), torch.Generator().manual_seed(seed))
        with self.timers.record("eval_fwd"), self.autocast():
            fake = self.generator(noise)
            on_real = to_full_precision(self.discriminator(real))
            on_fake = to_full_precision(self.discriminator(fake))
        right = ((on_real > 0).double().mean() + (on_fake <= 0).double().mean()) / 2
        self.update_metrics(fake, real)
        return {
            "val_discriminator_loss": _loss(on_real, 1.0) + _loss(on_fake, 0.0),
            "val_generator_loss": _loss(on_fake, 1.0),
            "val_real_score": on_real.sigmoid().mean(),
            "val_fake_score": on_fake.sigmoid().mean(),
            "val_discriminator_accuracy": right,
            NUM_SAMPLES: len(real),
        }

    def sample(self, num_samples: int, seed: int | None = None) -> torch.Tensor:
        """Return generated samples on the CPU. Call it on a worker.

        `seed` is the seed of the noise. None uses PyTorch's global generator.
        """
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        model = self.unwrapped(self.generator)
        with evaluating(model), self.autocast():
            made: torch.Tensor = to_full_precision(model(self.noise(num_samples, generator)))
        return made.cpu()


def _loss(scores: torch.Tensor, fraction_real: float) -> torch.Tensor:
    """Return the mean of ``-q log D - (1 - q) log(1 - D)`` with q = `fraction_real`."""
    # For D = sigmoid(s), the logarithms are -softplus(-s) and -softplus(s), which do not overflow.
    return (fraction_real * softplus(-scores) + (1 - fraction_real) * softplus(scores)).mean()
