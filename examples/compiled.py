"""Train a compiled model, lose a worker, and print which worker compiles when.

    python examples/compiled.py
    python examples/compiled.py --num-workers 1 --backend aot_eager --smoke-test

PyTorch's compiler for CPUs needs a C++ compiler such as g++. ``aot_eager`` does not, but makes
nothing faster.
"""

import argparse
import threading
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator
from raysgd.testing import chaos


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = torch.nn.LayerNorm(width), torch.nn.Linear(width, width)

    def forward(self, features):
        return features + torch.nn.functional.gelu(self.linear(self.norm(features)))


class Deep(torch.nn.Module):
    """Blocks of the same kind, which PyTorch compiles once."""

    def __init__(self, width=128, depth=6):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(depth))
        self.head = torch.nn.Linear(width, 10)

    def forward(self, features):
        for block in self.blocks:
            features = block(features)
        return self.head(features)


class Compiled(TrainingOperator):
    def setup(self, config):
        torch.manual_seed(0)
        model = Deep()
        for block in model.blocks:
            block.compile(backend=config["backend"])
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
            criterion=torch.nn.CrossEntropyLoss(),
        )
        data = TensorDataset(torch.randn(config["num_samples"], 128), torch.arange(10).repeat(800))
        self.register_data(train_loader=DataLoader(data, batch_size=20, shuffle=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--smoke-test", action="store_true", help="one epoch that compiles nothing")
    args = parser.parse_args()

    started = time.perf_counter()
    with TorchTrainer(
        training_operator_cls=Compiled,
        config={
            "num_samples": 8000,
            "backend": "aot_eager" if args.smoke_test else args.backend,
        },
        num_workers=args.num_workers,
        use_local=args.num_workers == 1,  # needs no Ray
    ) as trainer:
        for epoch in range(1, 2 if args.smoke_test else 5):
            if epoch == 3 and args.num_workers > 1:
                threading.Timer(0.1, chaos.kill, (trainer, 1)).start()
            began = time.perf_counter()
            loss = trainer.train()["train_loss"]
            print(f"epoch {epoch}: {time.perf_counter() - began:.2f} s, loss {loss:.3f}")
        for event in trainer.events:
            print(f"{event.kind} at step {event.step}: {event.seconds:.2f} s")
    print(f"done in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
