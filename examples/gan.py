"""Train a GAN to write digits, with two workers.

    python examples/gan.py
    python examples/gan.py --num-workers 1 --smoke-test

scikit-learn contains the 1,797 real images of 8x8 pixels, so nothing is downloaded. The losses of a
GAN say little. Look at the generated digits.
"""

import argparse
import functools
import time

import torch
from sklearn.datasets import load_digits
from torch import nn

from raysgd import TorchTrainer
from raysgd.operators import GAN
from raysgd.utils import BATCH_SIZE

LATENT_SIZE = 32
SHADES = " .:-=+*#%@"


def digits(config):
    """Return the images as (1, 8, 8) floats from -1 to 1."""
    images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1)
    return (images / 8 - 1,)


class DigitGAN(GAN):
    """Both models are convolutional. The config contains the rest."""

    def build_generator(self, config):
        return nn.Sequential(
            nn.Linear(LATENT_SIZE, 64 * 2 * 2),
            nn.Unflatten(1, (64, 2, 2)),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.ConvTranspose2d(64, 32, kernel_size=4, stride=2, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.ConvTranspose2d(32, 1, kernel_size=4, stride=2, padding=1),
            nn.Tanh(),
        )

    def build_discriminator(self, config):
        return nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(32, 64, kernel_size=4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(64 * 4 * 4, 1),
        )


def shown(images):
    """Return images as text, next to each other."""
    levels = ((images[:, 0] + 1) / 2 * (len(SHADES) - 1)).round().long()
    return "\n".join(
        "   ".join("".join(2 * SHADES[level] for level in image[row]) for image in levels)
        for row in range(8)
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--num-epochs", type=int, default=60)
    parser.add_argument("--use-gpu", action="store_true", help="one GPU a worker")
    parser.add_argument("--smoke-test", action="store_true", help="two epochs, no more")
    args = parser.parse_args()
    num_epochs = 2 if args.smoke_test else args.num_epochs

    started = time.perf_counter()
    config = {
        "train_data": digits,
        "validation_data": digits,
        "latent_size": LATENT_SIZE,
        "lr": 1e-3,
        "label_smoothing": 0.1,
        "seed": 0,
        BATCH_SIZE: 64,
    }
    with TorchTrainer(
        training_operator_cls=DigitGAN,
        config=config,
        num_workers=args.num_workers,
        use_local=args.num_workers == 1,  # needs no Ray
        use_gpu=args.use_gpu,
    ) as trainer:
        print(f"{trainer.num_workers} workers ready after {time.perf_counter() - started:.1f} s")
        for epoch in range(1, num_epochs + 1):
            train = trainer.train()
            if epoch % 5 and epoch != num_epochs:
                continue
            validation = trainer.validate()
            print(
                f"epoch {epoch:2d}   "
                f"generator_loss {train['train_generator_loss']:.3f}   "
                f"discriminator_loss {train['train_discriminator_loss']:.3f}   "
                f"discriminator_accuracy {validation['val_discriminator_accuracy']:.1%}"
            )
        made = trainer.apply_all_operators(functools.partial(GAN.sample, num_samples=5, seed=1))[0]
    print(f"\nfive generated digits\n{shown(made)}")
    print(f"done in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
