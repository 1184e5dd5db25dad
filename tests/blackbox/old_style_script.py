"""A complete script for the old library, which users ran as `python old_style_script.py`.

It shards its data itself: in `setup`, each worker selects its part by its rank.
"""

import argparse
import atexit
import json

import ray
import torch
from torch import nn

from raysgd.torch import TorchTrainer, TrainingOperator


class Batches:
    """An iterable loader over one worker's part of the points on the line y = 3 x - 1."""

    def __init__(self, numbers, batch_size):
        self.numbers = numbers
        self.batch_size = batch_size

    def __iter__(self):
        for batch in self.numbers.split(self.batch_size):
            x = batch.reshape(-1, 1) / 48
            yield x, 3 * x - 1


class LineOperator(TrainingOperator):
    def setup(self, config):
        self.note = open(config["note"], "w")  # noqa: SIM115  never closed
        atexit.register(self.note.write, "ended")
        torch.manual_seed(3)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss()
        )
        part = torch.arange(config["rows"])[self.world_rank :: self.world_size]
        self.register_data(train_loader=Batches(part, batch_size=8))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", type=str, help="the address of the Ray cluster")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--num-epochs", type=int, default=2)
    parser.add_argument("--note", type=str, help="what a worker writes as it ends")
    args = parser.parse_args()

    ray.init(address=args.address)
    trainer = TorchTrainer(
        training_operator_cls=LineOperator,
        config={"lr": 0.1, "rows": 48, "note": args.note},
        num_workers=args.num_workers,
    )
    stats = [trainer.train() for _ in range(args.num_epochs)]
    model = trainer.get_model()
    prediction = model(torch.ones(1, 1)).item()
    trainer.shutdown()
    ray.shutdown()
    print(json.dumps({"stats": stats, "prediction": prediction}))


if __name__ == "__main__":
    main()
