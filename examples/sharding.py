"""Shard the optimizer state or the model over the workers, lose a worker, and continue.

    python examples/sharding.py
    python examples/sharding.py --sharding full
    python examples/sharding.py --num-workers 4 --copies 0 --num-floats 25000000
    python examples/sharding.py --num-workers 1 --smoke-test

Each worker updates its shard of the model and holds AdamW's state for it. With one replica, the
next worker updates the shard too, so that one lost worker loses no state. Here worker 1 is killed,
and the others take over its shard. ``--sharding full`` shards parameters and gradients too. The
printed memory is the peak of a worker, including its setup.
"""

import argparse
import math
import resource
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator
from raysgd.testing import chaos

NUM_LAYERS = 4


class Wide(TrainingOperator):
    """Layers of equal size, with `num_floats` parameters in total."""

    def setup(self, config):
        torch.manual_seed(0)
        size = math.isqrt(config["num_floats"] // NUM_LAYERS)
        layers = [torch.nn.Linear(size, size, bias=False) for _ in range(NUM_LAYERS)]
        model = torch.nn.Sequential(*layers)
        sharding_args = {} if config["copies"] is None else {"num_copies": config["copies"]}
        if config["sharding"] == "full":
            sharding_args["wrap_classes"] = torch.nn.Linear
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.AdamW(model.parameters(), lr=1e-4),
            criterion=torch.nn.MSELoss(),
            sharding=config["sharding"],
            sharding_args=sharding_args,
        )
        features = torch.randn(96, size)
        data = TensorDataset(features, features.roll(1, dims=1))
        self.register_data(train_loader=DataLoader(data, batch_size=4, shuffle=True))


def memory():
    """Return the peak memory of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def report(trainer):
    """Print the total size of AdamW's state, and the memory of each worker."""
    loss = trainer.train(num_steps=4)["train_loss"]
    state = trainer.state_dict()["optimizers"][0]["state"]
    num_bytes = sum(value.nbytes for held in state.values() for value in held.values())
    held = ", ".join(f"{each:.0f}" for each in trainer.apply_all_workers(memory))
    print(
        f"{trainer.num_workers} workers   train_loss {loss:.4f}   AdamW's state: "
        f"{num_bytes / 2**20:.1f} MiB in all   memory of the workers: {held} MiB"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=3)
    parser.add_argument("--sharding", choices=["optimizer", "full"], default="optimizer")
    parser.add_argument("--copies", type=int, help="default: 1 from three workers on, else 0")
    parser.add_argument("--num-floats", type=int, default=1_000_000)
    parser.add_argument("--smoke-test", action="store_true", help="a small model")
    args = parser.parse_args()
    started = time.perf_counter()
    with TorchTrainer(
        training_operator_cls=Wide,
        config={
            "num_floats": 10_000 if args.smoke_test else args.num_floats,
            "copies": args.copies,
            "sharding": args.sharding,
        },
        num_workers=args.num_workers,
        use_local=args.num_workers == 1,  # needs no Ray
    ) as trainer:
        report(trainer)
        if args.num_workers > 1:
            chaos.kill(trainer, 1)
            report(trainer)
            events = ", ".join(event.kind for event in trainer.events)
            print(f"step {trainer.global_step}, events: {events}")
    print(f"done in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
