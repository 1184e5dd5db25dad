"""Train with batches that do not fit into memory: raysgd repeats a failed step in parts.

    python examples/out_of_memory.py
    python examples/out_of_memory.py --num-workers 1 --smoke-test

A Linux limit of the address space simulates a shortage of memory.
"""

import argparse
import functools
import resource
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator

ROOM = 100 * 2**20
"""Bytes that a step may use. The activations of a whole batch need twice as much."""


class Wide(TrainingOperator):
    """A network whose activations need most of the memory."""

    def setup(self, config):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 2**15),
            torch.nn.Tanh(),
            torch.nn.Tanh(),
            torch.nn.Linear(2**15, 1),
        ).double()
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=1e-4),
            criterion=torch.nn.MSELoss(),
        )
        features = torch.randn(2048, 4, dtype=torch.float64)
        data = TensorDataset(features, features.sum(dim=1, keepdim=True))
        self.register_data(train_loader=DataLoader(data, batch_size=256))


def limit(room):
    """Limit this process to its current memory plus `room` bytes."""
    status = Path("/proc/self/status").read_text()
    held = int(status.partition("VmSize:")[2].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (held + room, resource.RLIM_INFINITY))


def train(args, room=None):
    """Train, with limited memory after the first step. Return the trained weights."""
    with TorchTrainer(
        training_operator_cls=Wide,
        num_workers=args.num_workers,
        use_local=args.num_workers == 1,
    ) as trainer:
        trainer.train(num_steps=1)
        if room is not None:
            trainer.apply_all_workers(functools.partial(limit, room))
        trainer.train(num_steps=1 if args.smoke_test else None)
        splits = [event for event in trainer.events if event.kind == "out_of_memory"]
        for event in splits:
            print(f"worker {event.ranks[0]} had no memory left at step {event.step}: {event.cause}")
        print(f"{trainer.global_step} steps, at last with each batch in {trainer.num_splits} parts")
        assert bool(splits) == (room is not None)
        return torch.cat([each.detach().flatten() for each in trainer.get_model().parameters()])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--smoke-test", action="store_true", help="two steps")
    args = parser.parse_args()
    started = time.perf_counter()
    difference = (train(args) - train(args, ROOM)).abs().max().item()
    print(f"largest difference to a run with more memory: {difference:.1e}")
    assert difference < 1e-12
    print(f"done in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
