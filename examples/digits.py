"""Train a small convolutional network on handwritten digits with two workers.

    python examples/digits.py
    python examples/digits.py --num-workers 1 --smoke-test

scikit-learn contains the 1,797 images of 8x8 pixels, so nothing is downloaded.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator
from raysgd.utils import BATCH_SIZE


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,440 and 357 images, as (1, 8, 8) floats from 0 to 1, with their digits."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, validation = order[:1440], order[1440:]
    return (
        TensorDataset(images[train], labels[train]),
        TensorDataset(images[validation], labels[validation]),
    )


class DigitClassifier(TrainingOperator):
    """Two convolutions and a linear layer."""

    def setup(self, config):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(1, 32, kernel_size=3, padding=1),
            torch.nn.ReLU(),
            torch.nn.Conv2d(32, 64, kernel_size=3, padding=1),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Dropout(0.25),
            torch.nn.Linear(64 * 4 * 4, 10),
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=torch.nn.CrossEntropyLoss()
        )
        train, validation = digits()
        self.register_data(
            train_loader=DataLoader(train, batch_size=config[BATCH_SIZE], shuffle=True),
            validation_loader=DataLoader(validation, batch_size=config[BATCH_SIZE]),
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--num-epochs", type=int, default=15)
    parser.add_argument("--use-gpu", action="store_true", help="one GPU a worker")
    parser.add_argument("--smoke-test", action="store_true", help="two epochs, no more")
    args = parser.parse_args()
    num_epochs = 2 if args.smoke_test else args.num_epochs

    started = time.perf_counter()
    with TorchTrainer(
        training_operator_cls=DigitClassifier,
        config={"lr": 2e-3, BATCH_SIZE: 64},  # the global batch, which the workers share
        num_workers=args.num_workers,
        use_local=args.num_workers == 1,  # needs no Ray
        use_gpu=args.use_gpu,
    ) as trainer:
        print(f"{trainer.num_workers} workers ready after {time.perf_counter() - started:.1f} s")
        for _ in range(num_epochs):
            train, validation = trainer.train(), trainer.validate()
            print(
                f"epoch {train['epoch']:2d}   train_loss {train['train_loss']:.4f}   "
                f"val_loss {validation['val_loss']:.4f}   "
                f"val_accuracy {validation['val_accuracy']:.2%}"
            )
        with tempfile.TemporaryDirectory() as folder:
            path = trainer.save(Path(folder) / "digits.pt")
            trainer.load(path)
        print(f"saved and loaded after {trainer.global_step} steps")
        _, held_out = digits()
        scores = trainer.predict(DataLoader(held_out, batch_size=64))  # in the order of the data

    labels, predicted = held_out.tensors[1], scores.argmax(dim=1)
    print(f"digits    {labels[:8].tolist()}\npredicted {predicted[:8].tolist()}")
    print(f"done in {time.perf_counter() - started:.1f} s")
    if not args.smoke_test and validation["val_accuracy"] < 0.97:
        raise SystemExit(f"val_accuracy {validation['val_accuracy']:.2%} is below 97 %")


if __name__ == "__main__":
    main()
