"""Measure the cost of saving by pairs of training segments with and without a save.

    python examples/benchmarks/saving.py
    python examples/benchmarks/saving.py --num-steps 100 --pairs 8 --json saving.json

A trainer trains a model of 25 million floats in segments of equal length. One segment of each pair
begins with a save of ``CheckpointCallback(blocking=False)``, which copies the state to the driver
and writes it during training. The order within the pairs alternates.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import ray
import torch
from _workloads import machine
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator
from raysgd.callbacks import CheckpointCallback

WIDTH = 2048
NUM_LAYERS = 6  # 25 million floats


class Wide(TrainingOperator):
    def setup(self, config):
        layers = []
        for _ in range(NUM_LAYERS):
            layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
        model = torch.nn.Sequential(*layers)
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
            criterion=torch.nn.MSELoss(),
        )
        features = torch.randn(1024, WIDTH, generator=torch.Generator().manual_seed(0))
        self.register_data(
            train_loader=DataLoader(TensorDataset(features, features), batch_size=16)
        )


def segment(trainer, num_steps, saving=None):
    """Train `num_steps` steps, after a save if there is a callback. Return the seconds."""
    started = time.perf_counter()
    saved = 0.0
    if saving is not None:
        saving.on_pause(trainer)
        saved = time.perf_counter() - started
    trainer.train(num_steps=num_steps)
    return time.perf_counter() - started, saved


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--num-steps", type=int, default=60, help="steps of a segment")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--smoke-test", action="store_true", help="one pair of two steps")
    parser.add_argument("--json", type=Path, help="write the result there")
    args = parser.parse_args()
    num_steps, pairs = (2, 1) if args.smoke_test else (args.num_steps, args.pairs)

    ray.init("local", num_cpus=max(args.num_workers, os.cpu_count()), include_dashboard=False)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        saving = CheckpointCallback(folder, every=10**9, blocking=False)
        trainer = TorchTrainer(
            training_operator_cls=Wide, num_workers=args.num_workers, callbacks=[saving]
        )
        segment(trainer, num_steps)  # warm-up
        for pair in range(pairs):
            times = {}
            for saves in (pair % 2 == 0, pair % 2 == 1):
                times[saves] = segment(trainer, num_steps, saving if saves else None)
            rows.append(
                {
                    "without_s": times[False][0],
                    "with_s": times[True][0],
                    "call_s": times[True][1],
                    "ratio": times[True][0] / times[False][0],
                }
            )
            print(
                f"pair {pair + 1}: without {rows[-1]['without_s']:.2f} s, with a save "
                f"{rows[-1]['with_s']:.2f} s (the call {rows[-1]['call_s']:.2f} s), "
                f"ratio {rows[-1]['ratio']:.3f}",
                flush=True,
            )
        trainer.shutdown()
        size = max(file.stat().st_size for file in Path(folder).iterdir())
    ratios = [row["ratio"] for row in rows]
    print(
        f"\n{size / 1e6:.0f} MB saved every {statistics.median(r['without_s'] for r in rows):.0f} s"
        f" of training: {100 * (statistics.median(ratios) - 1):+.1f} % "
        f"({100 * (min(ratios) - 1):+.1f} to {100 * (max(ratios) - 1):+.1f} %), "
        f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}"
    )
    if args.json:
        result = {"machine": machine(), "bytes": size, "pairs": rows}
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
