"""A complete script for the old library. Its arguments are an address and a file for a worker.

It shards its data itself: in `setup`, each worker selects its part by its rank.
"""

import atexit
import json
import sys

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
    address, note = sys.argv[1:]
    ray.init(address=address)
    trainer = TorchTrainer(
        training_operator_cls=LineOperator,
        config={"lr": 0.1, "rows": 48, "note": note},
        num_workers=1,
    )
    stats = [trainer.train() for _ in range(3)]
    model = trainer.get_model()
    prediction = model(torch.ones(1, 1)).item()
    trainer.shutdown()
    ray.shutdown()
    print(json.dumps({"stats": stats, "prediction": prediction}))


if __name__ == "__main__":
    main()
