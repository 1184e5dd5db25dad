"""Train on a Ray Dataset: read it in parallel, and give each worker its part.

    python examples/ray_data.py
    python examples/ray_data.py --num-workers 1 --smoke-test

The script writes scikit-learn's handwritten digits to Parquet files. Ray Data reads them, scales
the pixels, and splits the rows before the trainer starts. Its tasks need CPUs and would wait
forever for those that the workers have reserved.
"""

import argparse
import logging
import os
import tempfile
import time
from pathlib import Path

import pandas
import ray
import ray.data
import torch
from sklearn.datasets import load_digits

from raysgd import TorchTrainer, TrainingOperator

BATCH = 32


class Batches:
    """A loader over this worker's parts of a Ray Dataset."""

    def __init__(self, operator, parts, shuffle):
        self.operator = operator
        self.parts = parts
        self.shuffle = shuffle
        self.epoch = 0

    def __iter__(self):
        # Evaluated in each epoch: after a loss, the remaining workers share all parts.
        mine = self.parts[self.operator.world_rank :: self.operator.world_size]
        self.epoch += 1
        for part in mine:
            batches = part.iter_torch_batches(
                batch_size=BATCH,
                dtypes=torch.float32,
                local_shuffle_buffer_size=8 * BATCH if self.shuffle else None,
                local_shuffle_seed=self.epoch if self.shuffle else None,
            )
            for columns in batches:
                yield columns["pixels"], columns["digit"].long()


class DigitClassifier(TrainingOperator):
    """A small network for images of handwritten digits."""

    def setup(self, config):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
        )
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.Adam(model.parameters(), lr=config["lr"]),
            criterion=torch.nn.CrossEntropyLoss(),
        )
        self.register_data(
            train_loader=Batches(self, config["train"], shuffle=True),
            validation_loader=Batches(self, config["validation"], shuffle=False),
        )


def write_files(folder):
    """Write the digits to eight Parquet files of rows with 64 pixels and a digit."""
    digits = load_digits()
    rows = pandas.DataFrame({"pixels": list(digits.data), "digit": digits.target})
    rows = rows.sample(frac=1, random_state=0)
    for number in range(8):
        rows.iloc[number::8].to_parquet(folder / f"part-{number}.parquet")


def scale(columns):
    """Scale pixels from 0..16 to 0..1, in a Ray Data task per batch of rows."""
    columns["pixels"] = columns["pixels"] / 16
    return columns


def read(folder, num_parts):
    """Return training and validation parts for each worker.

    Training parts have equal length, because the workers make their steps together. Validation
    parts contain every row.
    """
    rows = ray.data.read_parquet(str(folder)).map_batches(scale)
    train, validation = rows.train_test_split(0.2, shuffle=True, seed=0)
    return train.split(num_parts, equal=True), validation.repartition(num_parts).split(num_parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--num-epochs", type=int, default=15)
    parser.add_argument("--use-gpu", action="store_true", help="one GPU a worker")
    parser.add_argument("--smoke-test", action="store_true", help="two epochs, no more")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    started = time.monotonic()
    num_epochs = 2 if args.smoke_test else args.num_epochs
    if not ray.is_initialized():
        # Do not connect to an earlier cluster, which may have ended.
        address = None if "RAY_ADDRESS" in os.environ else "local"
        ray.init(
            address, include_dashboard=False, logging_level=logging.WARNING, log_to_driver=False
        )
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False

    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder))
        train, validation = read(Path(folder), args.num_workers)
    print(f"{sum(p.count() for p in train)} rows to train on, in {len(train)} parts")
    with TorchTrainer(
        training_operator_cls=DigitClassifier,
        config={"lr": 3e-3, "train": train, "validation": validation},
        num_workers=args.num_workers,
        use_gpu=args.use_gpu,
    ) as trainer:
        for epoch in range(num_epochs):
            measured = trainer.train() | trainer.validate()
            print(
                f"epoch {epoch + 1:2d}   train_loss {measured['train_loss']:.4f}   "
                f"val_loss {measured['val_loss']:.4f}   val_accuracy {measured['val_accuracy']:.2%}"
            )
    print(f"done in {time.monotonic() - started:.0f} s")
    if not args.smoke_test and measured["val_accuracy"] < 0.95:
        raise SystemExit(f"val_accuracy {measured['val_accuracy']:.2%} is below 95 %")


if __name__ == "__main__":
    main()
