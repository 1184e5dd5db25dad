"""Train with callbacks: logs, checkpoints, early stopping, and a custom one.

    python examples/callbacks.py
    python examples/callbacks.py --logdir runs/digits     # run it twice: the second run resumes
    tensorboard --logdir runs/digits

One run folder has all files. The first run ends in its third epoch, as if the machine had failed.
The second one resumes from the newest checkpoint.
"""

import argparse
import contextlib
import importlib.util
import json
import logging
import tempfile
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator
from raysgd.callbacks import (
    EMA,
    Callback,
    CheckpointCallback,
    CsvLogger,
    EarlyStopping,
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
    TensorBoardLogger,
    TerminateOnNaN,
)
from raysgd.utils import BATCH_SIZE


class DigitClassifier(TrainingOperator):
    """A small network for images of handwritten digits, with a decaying learning rate."""

    def setup(self, config):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 128),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(128, 10),
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        self.model, self.optimizer, self.criterion, _ = self.register(
            models=model,
            optimizers=optimizer,
            criterion=torch.nn.CrossEntropyLoss(),
            schedulers=scheduler,
        )
        digits = load_digits()
        images = torch.tensor(digits.data, dtype=torch.float32) / 16
        data = TensorDataset(images, torch.tensor(digits.target))
        train, validation = torch.utils.data.random_split(
            data, [1440, 357], generator=torch.Generator().manual_seed(0)
        )
        self.register_data(
            train_loader=DataLoader(train, batch_size=config[BATCH_SIZE], shuffle=True),
            validation_loader=DataLoader(validation, batch_size=config[BATCH_SIZE]),
        )


class Table(Callback):
    """Prints a line per epoch. A custom callback overrides the hooks that it needs."""

    def on_train_start(self, trainer):
        print(f"  starting at epoch {trainer.epoch}, step {trainer.global_step}")

    def on_validation_end(self, trainer, metrics):
        latest = trainer.latest_metrics
        print(
            f"  epoch {trainer.epoch:2d}   lr {latest['lr']:.2e}   "
            f"train_loss {latest['train_loss']:.4f}   val_loss {metrics['val_loss']:.4f}   "
            f"val_accuracy {metrics['val_accuracy']:.2%}"
        )

    def on_event(self, trainer, event):
        print(f"  [{event.kind}, {event.num_workers} workers]")

    def on_exception(self, trainer, error):
        print(f"  cut off at step {trainer.global_step}: {error!r}")


class PowerCut(Callback):
    """Ends the run within an epoch, as if the machine had failed."""

    def next_pause(self, global_step):
        return 55 if global_step < 55 else None

    def on_pause(self, trainer):
        raise KeyboardInterrupt("the power is gone")


def train(args, logdir, *more):
    saving = CheckpointCallback(every=10, keep=2, monitor="val_loss")  # also within epochs
    callbacks = [
        saving,
        EMA(0.9),  # used for validation, and saved with the weights
        TerminateOnNaN(),
        ModelSummary(),
        EarlyStopping("val_loss", patience=4),
        LearningRateMonitor(),
        CsvLogger(),
        Table(),
        *more,
    ]
    if importlib.util.find_spec("tensorboard"):
        callbacks.append(TensorBoardLogger())
    if args.progress:
        callbacks.insert(0, ProgressBar())  # first, so that its line ends before others print
    with TorchTrainer(
        training_operator_cls=DigitClassifier,
        config={"lr": 5e-3, BATCH_SIZE: 64},
        num_workers=args.num_workers,
        use_local=args.num_workers == 1,  # needs no Ray
        use_gpu=args.use_gpu,
        scheduler_step_freq="epoch",
        callbacks=callbacks,
        logdir=logdir,
    ) as trainer:
        history = trainer.fit(5 if args.smoke_test else args.num_epochs)
        trainer.load(saving.best)
        print(f"  the best is of epoch {trainer.epoch}")
        return history


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--num-epochs", type=int, default=30)
    parser.add_argument("--use-gpu", action="store_true", help="one GPU a worker")
    parser.add_argument("--logdir", help="the run folder; a temporary one without")
    parser.add_argument("--progress", action="store_true", help="show a progress bar")
    parser.add_argument("--smoke-test", action="store_true", help="five epochs, no more")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        logdir = Path(args.logdir or temporary)
        if not (logdir / "checkpoints").exists():
            print("the first run, which will be cut off:")
            with contextlib.suppress(KeyboardInterrupt):
                train(args, logdir, PowerCut())
        print("the run that goes on:")
        history = train(args, logdir)
        if history.stop_reason:
            print(f"stopped early: {history.stop_reason}")
        print("in the run folder:")
        for path in sorted(logdir.rglob("*")):
            if path.is_file():
                print(f"  {path.stat().st_size:8,} bytes  {path.relative_to(logdir)}")
        lines = [json.loads(line) for line in (logdir / "metrics.jsonl").read_text().splitlines()]
        print("lines of metrics.jsonl:", " ".join(line["kind"] for line in lines))
    print(f"done in {time.perf_counter() - started:.1f} s")
    if history and history[0]["epoch"] != 3 and not args.logdir:
        raise SystemExit(f"went on at epoch {history[0]['epoch']}, not in the third")
    if not args.smoke_test and history and history[-1]["val_accuracy"] < 0.95:
        raise SystemExit(f"val_accuracy {history[-1]['val_accuracy']:.2%} is below 95 %")


if __name__ == "__main__":
    main()
