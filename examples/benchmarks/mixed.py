"""Compare even and measured shares on workers of different speed.

    python examples/benchmarks/mixed.py
    python examples/benchmarks/mixed.py --draw docs/images/mixed.svg

A worker sleeps for a fixed time per sample, several times longer on slow workers. The ideal time of
an epoch is the work divided by the sum of the speeds. In the last part, a worker becomes three
times slower during the run and recovers later.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import ray
import torch
from _workloads import machine
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, TorchTrainer, TrainingOperator
from raysgd.utils import BATCH_SIZE

SAMPLE_S, NUM_SAMPLES, GLOBAL_BATCH = 0.001, 3600, 120
GROUPS = {
    "equal": [1, 1],
    "one 3 times slower": [1, 3],
    "one 5 times slower": [1, 5],
    "three speeds": [1, 2, 3],
}
TEXT, EVEN, MEASURED = "#767d89", "#e4572e", "#2f81f7"  # legible on white and on black


class Paced(TrainingOperator):
    """A small network in float64 with a cost per sample."""

    slower = 1.0

    def setup(self, config):
        torch.manual_seed(0)
        model = torch.nn.Linear(32, 1).double()
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
            criterion=torch.nn.MSELoss(),
        )
        inputs = torch.randn(NUM_SAMPLES, 32, generator=torch.Generator().manual_seed(1)).double()
        data = TensorDataset(inputs, inputs.mean(dim=1, keepdim=True))
        self.register_data(
            train_loader=DataLoader(data, batch_size=config[BATCH_SIZE], shuffle=True)
        )
        self.slower = config["slower"][self.world_rank]

    def train_batch(self, batch, batch_info):
        time.sleep(len(batch[0]) * SAMPLE_S * self.slower)
        return super().train_batch(batch, batch_info)


def make_trainer(slower, shares):
    return TorchTrainer(
        training_operator_cls=Paced,
        config={BATCH_SIZE: GLOBAL_BATCH, "slower": slower},
        num_workers=len(slower),
        elastic=ElasticConfig(shares=shares),
    )


def timed_epoch(trainer):
    began = time.perf_counter()
    trainer.train()
    return time.perf_counter() - began


def compare(slower, num_epochs):
    """Return the epoch time of both kinds of shares as a multiple of the ideal time."""
    ideal_s = NUM_SAMPLES * SAMPLE_S / sum(1 / factor for factor in slower)
    found, weights = {}, {}
    for shares in ("even", "measured"):
        with make_trainer(slower, shares) as trainer:
            first_s = timed_epoch(trainer)
            timed_epoch(trainer)  # measured shares have changed by its end
            rest_s = statistics.median(timed_epoch(trainer) for _ in range(num_epochs - 2))
            found[shares] = {"first": first_s / ideal_s, "then": rest_s / ideal_s}
            weights[shares] = trainer.get_model().weight.detach()
    found["difference"] = float((weights["even"] - weights["measured"]).abs().max())
    return found


def follow(num_epochs):
    """Return the epoch times of a run in which a worker becomes slower, and recovers."""
    with make_trainer([1, 1], "measured") as trainer:
        times = []
        for epoch in range(num_epochs):
            slow = num_epochs // 4 <= epoch < num_epochs * 5 // 8
            trainer.apply_all_operators(_Pace(3.0 if slow else 1.0))
            times.append(timed_epoch(trainer))
        changes = [(e.step, e.shares) for e in trainer.events if e.kind == "rebalanced"]
    return {"epoch_s": times, "rebalanced": changes}


class _Pace:
    """Sets the pace of worker 1."""

    def __init__(self, slower):
        self.slower = slower

    def __call__(self, operator):
        if operator.world_rank == 1:
            operator.slower = self.slower


def draw(results, run, path):
    """Draw the epoch times of each group, and those of the run with a change."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    names = ["text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"]
    pyplot.rcParams.update({"font.size": 11, "svg.hashsalt": "raysgd"} | dict.fromkeys(names, TEXT))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for offset, (shares, color) in enumerate([("even", EVEN), ("measured", MEASURED)]):
        heights = [results[group][shares]["then"] for group in GROUPS]
        places = [index + 0.4 * offset for index in range(len(GROUPS))]
        bars = left.bar(places, heights, 0.38, color=color, label=f"{shares} shares")
        left.bar_label(bars, fmt="%.2f", color=TEXT, fontsize=9)
    left.axhline(1.0, color=TEXT, linewidth=1, linestyle="--")
    labels = [group.replace(" 3", "\n3").replace(" 5", "\n5") for group in GROUPS]
    left.set_xticks([index + 0.2 for index in range(len(GROUPS))], labels, fontsize=9)
    left.set_ylabel("epoch time / ideal time")
    left.legend(frameon=False)
    right.step(range(len(run["epoch_s"])), run["epoch_s"], where="mid", color=MEASURED)
    right.set_xlabel("epoch; a worker is slower in the middle")
    right.set_ylabel("seconds per epoch")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, transparent=True, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-epochs", type=int, default=4)
    parser.add_argument("--draw", type=Path, help="SVG file to write")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--smoke-test", action="store_true", help="one group, two epochs")
    args = parser.parse_args()
    ray.init("local", num_cpus=4, log_to_driver=False)
    print(machine())
    results = {}
    groups = dict([*GROUPS.items()][1:2]) if args.smoke_test else GROUPS
    for group, slower in groups.items():
        found = results[group] = compare(slower, 2 if args.smoke_test else args.num_epochs)
        even, measured = found["even"], found["measured"]
        print(
            f"{group:20} even {even['then']:.2f}   measured {measured['then']:.2f} of ideal "
            f"(first epoch {measured['first']:.2f})   difference {found['difference']:.0e}"
        )
    if args.smoke_test:
        return
    run = follow(4 * args.num_epochs)
    print("a worker 3 times slower in between:", [round(s, 2) for s in run["epoch_s"]])
    for step, shares in run["rebalanced"]:
        print(f"  step {step}: shares {shares}")
    if args.json:
        args.json.write_text(json.dumps({"groups": results, "run": run}, indent=2))
    if args.draw:
        draw(results, run, args.draw)


if __name__ == "__main__":
    main()
