"""Kill workers during training, and check that no sample is lost or repeated.

    python examples/elastic.py
    python examples/elastic.py --num-workers 4 --num-epochs 4 --num-kills 6 --seed 2

The model is a ledger with one parameter per sample. It starts at 0, and training on the sample adds
1. After three epochs, every parameter must be 3. Meanwhile, workers are killed (SIGKILL) at random
steps. The others continue, and a replacement worker joins.
"""

import argparse
import hashlib
import math
import os
import threading
import time

import ray
import torch
from torch.utils.data import DataLoader, Dataset

from raysgd import TorchTrainer, TrainingOperator
from raysgd.testing.chaos import Chaos, draw_faults
from raysgd.utils import BATCH_SIZE


class Ids(Dataset):
    """Samples that are their own index."""

    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        return index


class Counts(torch.nn.Module):
    """One parameter per sample."""

    def __init__(self, num_samples):
        super().__init__()
        self.counts = torch.nn.Parameter(torch.zeros(num_samples))

    def forward(self, ids):
        return self.counts[ids]


class Ledger(TrainingOperator):
    """Adds 1 to the parameter of each sample."""

    def setup(self, config):
        model = Counts(config["num_samples"])
        self.model, self.optimizer = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=1.0)
        )
        data = Ids(config["num_samples"])
        self.register_data(
            train_loader=DataLoader(data, batch_size=config[BATCH_SIZE], shuffle=True)
        )

    def train_batch(self, batch, batch_info):
        time.sleep(self.config["step_s"])  # simulates a larger model
        # Gradients are averaged over the workers, but this needs their sum.
        loss = -self.model(batch).sum() * self.world_size
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"num_samples": len(batch)}


def fingerprint(operator):
    """Return a hash of a worker's model."""
    digest = hashlib.sha256()
    for tensor in operator.model.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


class EventPrinter(threading.Thread):
    """Prints the events of a trainer as they occur."""

    def __init__(self, trainer, started):
        super().__init__(daemon=True)
        self.trainer, self.started = trainer, started
        self.over = threading.Event()

    def run(self):
        num_printed, over = 0, False
        while not over:
            over = self.over.wait(0.05)  # one more pass after the end, for the last events
            for event in self.trainer.events[num_printed:]:
                num_printed += 1
                ranks = ", ".join(map(str, event.ranks)) or "none"
                text = f"{event.kind}: workers {ranks}, {event.seconds:.2f} s  {event.cause[:60]}"
                print(f"{event.time - self.started:6.2f} s   step {event.step:4d}   {text}")

    def __enter__(self):
        self.start()

    def __exit__(self, *error):
        self.over.set()
        self.join()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=3)
    parser.add_argument("--num-epochs", type=int, default=3)
    parser.add_argument("--num-kills", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--smoke-test", action="store_true", help="two short epochs, two kills")
    args = parser.parse_args()
    num_epochs, num_kills = (2, 2) if args.smoke_test else (args.num_epochs, args.num_kills)
    num_steps = 100 if args.smoke_test else 500

    # Any number of the workers can share this batch, so the epoch has no uneven end.
    batch_size = 8 * math.lcm(*range(1, args.num_workers + 1))
    num_samples = num_steps * batch_size
    if "RAY_ADDRESS" not in os.environ and not ray.is_initialized():
        # The workers mostly sleep and do not need a CPU each.
        ray.init("local", num_cpus=max(args.num_workers, os.cpu_count()), log_to_driver=False)
    kills = draw_faults(args.seed, num_kills, args.num_workers, num_steps=num_epochs * num_steps)
    print("to be killed:", ", ".join(f"worker {k.rank} at step {k.step}" for k in kills))

    started = time.time()
    with TorchTrainer(
        training_operator_cls=Ledger,
        config={"num_samples": num_samples, "step_s": 0.01, BATCH_SIZE: batch_size},
        num_workers=args.num_workers,
    ) as trainer:
        with EventPrinter(trainer, started), Chaos(trainer, kills) as chaos:
            for _ in range(num_epochs):
                metrics = trainer.train(max_retries=num_kills)
                print(
                    f"{time.time() - started:6.2f} s   step {trainer.global_step:4d}   "
                    f"epoch {metrics['epoch']} is over: {metrics['num_samples']:,} samples"
                )
        num_killed, num_left = len(chaos.injected), len(chaos.pending)
        ledger = trainer.get_model().counts.detach()
        prints = trainer.apply_all_operators(fingerprint)

    once = bool((ledger == num_epochs).all())
    print(f"\n{num_killed} workers were killed; {num_left} kills found none of that rank in time")
    print(
        f"ledger: {int((ledger == num_epochs).sum()):,} of {num_samples:,} samples were trained on "
        f"{num_epochs} times in {num_epochs} epochs"
        + (": each one exactly once an epoch" if once else "")
    )
    same = len(set(prints)) == 1
    print(
        f"replicas: the {len(prints)} workers hold {'' if same else 'DIFFERENT models, not '}"
        f"bit-identical models ({prints[0][:12]})"
    )
    print(f"done in {time.time() - started:.1f} s")
    if not (once and same):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
