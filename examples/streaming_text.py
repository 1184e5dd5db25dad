"""Train a language model on a stream of text, lose a worker, and resume with another number.

    python examples/streaming_text.py
    python examples/streaming_text.py --num-workers 1 --smoke-test

The stream packs the lines of Python's standard library into blocks of characters. One run is not
disturbed. The other one loses a worker, is saved within the epoch, and continues with one worker.
Both train on the same blocks in the same steps, so they end with the same losses.
"""

import argparse
import sysconfig
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from raysgd import TorchTrainer, TrainingOperator
from raysgd.data import Stream, text
from raysgd.testing import chaos
from raysgd.utils import BATCH_SIZE

BLOCK = 65
NUM_CHARACTERS = 128


def pack(lines):
    """Pack lines into blocks of characters. The rest of the group is dropped."""
    joined = "\n".join(lines).encode("ascii", errors="replace")
    codes = torch.frombuffer(bytearray(joined), dtype=torch.uint8).long()
    return codes[: len(codes) // BLOCK * BLOCK].reshape(-1, BLOCK)


class CharacterModel(torch.nn.Module):
    """Predicts the next character."""

    def __init__(self, width):
        super().__init__()
        self.embedding = torch.nn.Embedding(NUM_CHARACTERS, width)
        self.memory = torch.nn.GRU(width, width, batch_first=True)
        self.head = torch.nn.Linear(width, NUM_CHARACTERS)

    def forward(self, codes):
        return self.head(self.memory(self.embedding(codes))[0])


class Reader(TrainingOperator):
    def setup(self, config):
        torch.manual_seed(0)
        model = CharacterModel(config["width"]).double()  # shows that the results are equal
        self.model, self.optimizer = self.register(
            models=model, optimizers=torch.optim.Adam(model.parameters(), lr=5e-3)
        )
        folder = sysconfig.get_path("stdlib")
        lines = text(f"{folder}/[a-z]*.py", cache_dir=config["cache"])
        blocks = Stream(lines, transform=pack, group_size=256, shuffle=10_000, seed=1)
        held_out = Stream(
            text(f"{folder}/this.py", cache_dir=config["cache"]), transform=pack, group_size=256
        )
        self.register_data(
            train_loader=DataLoader(blocks, batch_size=config[BATCH_SIZE]),
            validation_loader=DataLoader(held_out, batch_size=8),
        )

    def loss_of(self, codes):
        output = self.model(codes[:, :-1])
        return torch.nn.functional.cross_entropy(output.flatten(0, 1), codes[:, 1:].flatten())

    def train_batch(self, batch, batch_info):
        loss = self.loss_of(batch)
        self.optimizer.zero_grad()
        self.backward(loss)
        self.optimizer_step(self.optimizer)
        return {"train_loss": loss.detach(), "num_samples": len(batch)}

    def validate_batch(self, batch, batch_info):
        return {"val_loss": self.loss_of(batch), "num_samples": len(batch)}


def train(trainer, num_calls, num_steps):
    """Return the losses of held-out text after each call."""
    losses = []
    for _ in range(num_calls):
        metrics = trainer.train(num_steps=num_steps)
        losses.append(trainer.validate()["val_loss"])
        print(
            f"step {trainer.global_step:4d}   {trainer.num_workers} workers   "
            f"train_loss {metrics['train_loss']:.3f}   val_loss {losses[-1]:.12f}"
        )
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--smoke-test", action="store_true", help="train for a few steps")
    args = parser.parse_args()
    started = time.perf_counter()
    num_steps = 3 if args.smoke_test else 50
    with tempfile.TemporaryDirectory() as folder:
        config = {"width": 16 if args.smoke_test else 64, BATCH_SIZE: 32, "cache": folder}

        def start(num_workers):
            return TorchTrainer(
                training_operator_cls=Reader,
                config=config,
                num_workers=num_workers,
                use_local=num_workers == 1,  # needs no Ray
            )

        with start(args.num_workers) as trainer:
            print(trainer.describe_data()["train"])
            undisturbed = train(trainer, 4, num_steps)
        with start(args.num_workers) as trainer:
            disturbed = train(trainer, 1, num_steps)
            if args.num_workers > 1:
                print(f"killed process {chaos.kill(trainer, 1)}")
            disturbed += train(trainer, 1, num_steps)
            saved = trainer.save(Path(folder, "state.pt"))
        with start(1) as trainer:
            trainer.load(saved)
            disturbed += train(trainer, 2, num_steps)
    difference = max(abs(a - b) for a, b in zip(undisturbed, disturbed, strict=True))
    print(f"largest difference of the losses: {difference:.1e}")
    print(f"done in {time.perf_counter() - started:.1f} s")
    if difference > 1e-10:
        raise SystemExit("The runs differ.")


if __name__ == "__main__":
    main()
