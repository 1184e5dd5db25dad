"""Save within an epoch, resume with another number of workers, and survive a damaged file.

    python examples/checkpoints.py
    python examples/checkpoints.py --num-workers 3 --num-workers-after 2

The model is a ledger with one parameter per sample. It starts at 0, and training on the sample adds
1. After one epoch, every parameter must be 1, regardless of interruptions.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from raysgd import TorchTrainer, TrainingOperator
from raysgd.checkpoint import CheckpointStore, read_manifest
from raysgd.errors import CheckpointError

NUM_SAMPLES = 600


class Ids(Dataset):
    """Samples that are their own index."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return index


class Counts(torch.nn.Module):
    """One parameter per sample."""

    def __init__(self):
        super().__init__()
        self.counts = torch.nn.Parameter(torch.zeros(NUM_SAMPLES))

    def forward(self, ids):
        return self.counts[ids]


class Ledger(TrainingOperator):
    """Adds 1 to the parameter of each sample."""

    def setup(self, config):
        model = Counts()
        self.model, self.optimizer = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=1.0)
        )
        self.register_data(train_loader=DataLoader(Ids(), batch_size=10, shuffle=True))

    def train_batch(self, batch, batch_info):
        # Gradients are averaged over the workers, but this needs their sum.
        (-self.model(batch).sum() * self.world_size).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"num_samples": len(batch)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--num-workers-after", type=int, default=1, help="when the run goes on")
    parser.add_argument("--use-gpu", action="store_true", help="one GPU a worker")
    parser.add_argument("--smoke-test", action="store_true", help="the same; it is short")
    args = parser.parse_args()

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder) / "first.pt"
        store = CheckpointStore(Path(folder) / "run", keep=3, experiment="ledger")
        with TorchTrainer(
            training_operator_cls=Ledger,
            num_workers=args.num_workers,
            use_local=args.num_workers == 1,  # needs no Ray
            use_gpu=args.use_gpu,
        ) as trainer:
            trainer.train(num_steps=5)
            trainer.save(first)
            for _ in range(2):
                trainer.train(num_steps=5)
                store.save(trainer.state_dict(), world_size=trainer.num_workers)
        manifest = read_manifest(first)
        print(
            f"saved at step {manifest.global_step} by {manifest.world_size} workers with torch "
            f"{manifest.versions['torch']}, and twice more into a folder"
        )
        print(f"by the command {manifest.provenance.get('command', 'unknown')}")

        newest = sorted((Path(folder) / "run").glob("*.ckpt"))[-1]
        damaged = bytearray(newest.read_bytes())
        damaged[len(damaged) // 2] ^= 1  # one bit
        newest.write_bytes(damaged)
        path, state = store.restore()
        print(f"one bit of {newest.name} was flipped: passed over, and {Path(path).name} taken")
        if Path(path) == newest:
            raise SystemExit("the damaged checkpoint was taken")

        with TorchTrainer(
            training_operator_cls=Ledger,
            num_workers=args.num_workers_after,
            use_local=args.num_workers_after == 1,
            use_gpu=args.use_gpu,
        ) as trainer:
            try:
                trainer.load(newest)
            except CheckpointError as error:
                print(f"loading it all the same: {str(error).splitlines()[0][:96]}...")
            trainer.load_state_dict(state)
            metrics = trainer.train()
            counts = trainer.get_model().counts.detach()
            print(
                f"{trainer.num_workers} workers trained on the other {metrics['num_samples']} "
                f"samples of the epoch: each of the {NUM_SAMPLES} was trained on "
                f"{counts.min():.0f} to {counts.max():.0f} times"
            )
            weights = trainer.save_model(Path(folder) / "weights.safetensors")
            print(f"the weights alone: {Path(weights).stat().st_size} bytes")
    print(f"done in {time.perf_counter() - started:.1f} s")
    if not bool((counts == 1).all()):
        raise SystemExit("the ledger shows samples that were lost or repeated")


if __name__ == "__main__":
    main()
