"""Train a PyTorch model with Horovod instead of DistributedDataParallel, on two workers.

    python examples/horovod_digits.py
    python examples/horovod_digits.py --num-workers 1 --smoke-test

docs/horovod.md describes how to install Horovod.
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator
from raysgd.utils import BATCH_SIZE


class DigitClassifier(TrainingOperator):
    """Two linear layers. Gradients travel as float16."""

    def setup(self, config):
        import horovod.torch as hvd

        model = torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
        )
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.Adam(model.parameters(), lr=config["lr"]),
            criterion=torch.nn.CrossEntropyLoss(),
            horovod_args={"compression": hvd.Compression.fp16},
        )
        data = load_digits()
        images = torch.tensor(data.images, dtype=torch.float32).flatten(1) / 16
        labels = torch.tensor(data.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        train, validation = (
            TensorDataset(images[part], labels[part]) for part in (order[:1440], order[1440:])
        )
        self.register_data(
            train_loader=DataLoader(train, batch_size=config[BATCH_SIZE], shuffle=True),
            validation_loader=DataLoader(validation, batch_size=config[BATCH_SIZE]),
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--num-epochs", type=int, default=12)
    parser.add_argument("--smoke-test", action="store_true", help="two epochs, no more")
    args = parser.parse_args()

    started = time.perf_counter()
    with TorchTrainer(
        training_operator_cls=DigitClassifier,
        config={"lr": 3e-3, BATCH_SIZE: 64},
        num_workers=args.num_workers,
        use_local=args.num_workers == 1,  # needs no Ray
        backend="horovod",
    ) as trainer:
        for _ in range(2 if args.smoke_test else args.num_epochs):
            train, validation = trainer.train(), trainer.validate()
            print(
                f"epoch {train['epoch']:2d}   train_loss {train['train_loss']:.4f}   "
                f"val_accuracy {validation['val_accuracy']:.2%}"
            )
    print(f"done in {time.perf_counter() - started:.1f} s")
    if not args.smoke_test and validation["val_accuracy"] < 0.95:
        raise SystemExit(f"val_accuracy {validation['val_accuracy']:.2%} is below 95 %")


if __name__ == "__main__":
    main()
