"""Train a function on several workers, and kill one of them on the way.

    python examples/functions.py
    python examples/functions.py --num-workers 4 --num-epochs 20

The function trains on scikit-learn's handwritten digits and saves a checkpoint after each epoch. A
worker is killed during the run. Then all workers restart, and the function resumes from the newest
checkpoint.
"""

import argparse
import os
import signal
import tempfile
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import train
from raysgd.train import Trainer, TrainingCallback


def digits():
    data = load_digits()
    pixels = torch.tensor(data.data, dtype=torch.float32) / 16
    return TensorDataset(pixels, torch.tensor(data.target))


def train_digits(config):
    """The training function: runs on every worker."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    state = train.load_checkpoint()
    if state is not None:
        model.load_state_dict(state["model"])
    first = 0 if state is None else state["epoch"] + 1
    prepared = train.torch.prepare_model(model)
    if state is not None:  # after the model is on its GPU, where the optimizer state must be
        optimizer.load_state_dict(state["optimizer"])
    batch_size = config["batch_size"] // train.world_size()
    loader = DataLoader(digits(), batch_size=batch_size, shuffle=True)
    loader = train.torch.prepare_data_loader(loader)
    for epoch in range(first, config["num_epochs"]):
        if epoch == config["die_in"] and first == 0 and train.world_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        correct = total = 0
        for pixels, target in loader:
            optimizer.zero_grad()
            output = prepared(pixels)
            nn.functional.cross_entropy(output, target).backward()
            optimizer.step()
            correct += (output.argmax(1) == target).sum().item()
            total += len(target)
        train.report(epoch=epoch, accuracy=correct / total, started_from=first)
        train.save_checkpoint(
            epoch=epoch, model=model.state_dict(), optimizer=optimizer.state_dict()
        )
    return correct / total


class Progress(TrainingCallback):
    def handle_result(self, results, **info):
        accuracy = sum(result["accuracy"] for result in results) / len(results)
        print(
            f"epoch {results[0]['epoch']}   accuracy {accuracy:.2%}   {len(results)} workers, "
            f"started from epoch {results[0]['started_from']}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--num-epochs", type=int, default=10)
    parser.add_argument("--smoke-test", action="store_true", help="three epochs, no more")
    args = parser.parse_args()
    num_epochs = 3 if args.smoke_test else args.num_epochs

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer("torch", num_workers=args.num_workers, logdir=folder)
        trainer.start()
        try:
            config = {"lr": 0.1, "batch_size": 64, "num_epochs": num_epochs}
            config["die_in"] = num_epochs // 2
            trainer.run(train_digits, config=config, callbacks=[Progress()])
            for event in trainer.events:
                print(f"{event.kind}: workers {list(event.ranks)} {event.cause}")
            print(f"newest checkpoint: epoch {trainer.latest_checkpoint['epoch']}")
        finally:
            trainer.shutdown()
    print(f"done in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
