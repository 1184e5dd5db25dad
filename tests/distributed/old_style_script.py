"""A whole program in one file, as users of the old library ran them: python old_style_script.py.

It reads a Ray Dataset: each worker takes its own part of it in setup, by its rank.
"""

import argparse
import json

import ray
import ray.data
import torch
from torch import nn

from raysgd.torch import TorchTrainer, TrainingOperator


class Batches:
    """An iterable loader over one worker's part of a Ray Dataset."""

    def __init__(self, part, batch_size):
        self.part = part
        self.batch_size = batch_size

    def __iter__(self):
        batches = self.part.iter_torch_batches(batch_size=self.batch_size)
        for columns in batches:
            yield columns["x"].float(), columns["y"].float()


class LineOperator(TrainingOperator):
    def setup(self, config):
        torch.manual_seed(3)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss()
        )
        rows = [{"x": [i / 48], "y": [3 * i / 48 - 1]} for i in range(config["rows"])]
        parts = ray.data.from_items(rows).split(self.world_size, equal=True)
        self.register_data(train_loader=Batches(parts[self.world_rank], batch_size=8))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--num-epochs", type=int, default=2)
    args = parser.parse_args()

    ray.init(num_cpus=args.num_workers + 2, include_dashboard=False)
    trainer = TorchTrainer(
        training_operator_cls=LineOperator,
        config={"lr": 0.1, "rows": 48},
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
