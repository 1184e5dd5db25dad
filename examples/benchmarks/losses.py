"""Compare the loss of a run whose workers are killed with that of an undisturbed run.

    python examples/benchmarks/losses.py
    python examples/benchmarks/losses.py --num-kills 20 --draw losses.svg
    python examples/benchmarks/losses.py --exact --draw equal_bits.svg

Four workers train a small network on handwritten digits in float64, with AdamW and a OneCycleLR
that counts steps. In the second run real processes are killed and replaced. The loss is the mean
over all samples, measured after every tenth step. Rank 0 logs how many workers made each step.
``--exact`` trains with batch normalization, dropout, and ``exact="bits"``. The two runs must then
be equal bit for bit.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import ray
import torch
from _workloads import machine
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, TorchTrainer, TrainingOperator
from raysgd.testing.chaos import Chaos, Fault
from raysgd.utils import BATCH_SIZE

NUM_WORKERS, EVERY = 4, 10
TEXT, CURVE, KILL = "#767d89", "#2f81f7", "#e4572e"  # legible on white and on black


class Digits(TrainingOperator):
    """A small network. A step takes a tenth of a second, so that replacements arrive in time."""

    def setup(self, config):
        torch.manual_seed(0)
        pixels, digits = load_digits(return_X_y=True)
        data = TensorDataset(torch.tensor(pixels) / 16, torch.tensor(digits))
        self.register_data(
            train_loader=DataLoader(data, batch_size=config[BATCH_SIZE], shuffle=True),
            validation_loader=DataLoader(data, batch_size=600),
        )
        layers = torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)
        if config["exact"]:
            layers = layers[0], torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.3), *layers[1:]
        model = torch.nn.Sequential(*layers).double()
        optimizer = torch.optim.AdamW(model.parameters())
        self.model, self.optimizer, self.criterion, _ = self.register(
            models=model,
            optimizers=optimizer,
            criterion=torch.nn.CrossEntropyLoss(),
            schedulers=torch.optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=0.02, total_steps=config["num_epochs"] * self.steps_per_epoch
            ),
        )

    def train_batch(self, batch, batch_info):
        time.sleep(self.config["step_s"])
        metrics = super().train_batch(batch, batch_info)
        if self.world_rank == 0:
            with open(self.config["log"], "a") as log:
                log.write(f"{batch_info['global_step']} {self.world_size}\n")
        return metrics


def spread_kills(num_kills, num_steps):
    """Return kills at evenly spaced steps. Every third one shares the step of the one before."""
    return [
        Fault(
            rank=kill % NUM_WORKERS,
            step=(kill + (kill % 3 != 2)) * num_steps // (num_kills + 1),
        )
        for kill in range(num_kills)
    ]


def run(config, num_kills):
    """Train once. Return what to compare and draw."""
    with (
        tempfile.NamedTemporaryFile("r") as log,
        TorchTrainer(
            training_operator_cls=Digits,
            config=config | {"log": log.name},
            num_workers=NUM_WORKERS,
            scheduler_step_freq="batch",
            elastic=ElasticConfig(resize_cooldown_s=0.0),
            exact="bits" if config["exact"] else None,
        ) as trainer,
    ):
        num_steps = config["num_epochs"] * -(-1797 // config[BATCH_SIZE])
        losses = {0: trainer.validate()["val_loss"]}
        with Chaos(trainer, spread_kills(num_kills, num_steps)) as chaos:
            while (left := num_steps - trainer.global_step) > 0:
                trainer.train(num_steps=min(EVERY, left), max_retries=num_kills)
                losses[trainer.global_step] = trainer.validate()["val_loss"]
        killed = [injection.fault.step for injection in chaos.injected]
        assert not chaos.pending
        # a step that was redone has several lines, and the last one counts
        workers = dict(map(int, line.split()) for line in log)
        return {
            "losses": losses,
            "workers": workers,
            "killed": killed,
            "model": trainer.get_model().state_dict(),
        }


def draw(undisturbed, disturbed, path):
    """Draw both loss curves, and below them how many workers made each step."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {"font.size": 12, "svg.hashsalt": "raysgd"}
        | dict.fromkeys(
            ["text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"], TEXT
        )
    )
    figure, (top, bottom) = pyplot.subplots(
        2, sharex=True, figsize=(7, 4.2), height_ratios=(3, 1.2), layout="constrained"
    )
    num_kills = len(disturbed["killed"])
    curves = {
        "no failures": (undisturbed, {"linewidth": 8, "alpha": 0.35}),
        f"{num_kills} workers killed": (disturbed, {"linewidth": 1.8}),
    }
    for label, (each, look) in curves.items():
        losses = each["losses"]
        top.plot(list(losses), list(losses.values()), label=label, color=CURVE, **look)
    top.set(ylabel="training loss", yscale="log", xlim=(0, max(losses)))
    top.yaxis.set_major_formatter("{x:g}")
    top.legend(frameon=False)
    workers = disturbed["workers"]
    bottom.step(list(workers), list(workers.values()), where="mid", color=KILL, linewidth=1.8)
    bottom.set(xlabel="step", ylabel="workers", ylim=(0, NUM_WORKERS + 0.5))
    bottom.set_yticks(range(0, NUM_WORKERS + 1, 2))
    for axis in (top, bottom):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, transparent=True, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-kills", type=int, default=10)
    parser.add_argument("--exact", action="store_true", help='train with exact="bits"')
    parser.add_argument("--smoke-test", action="store_true", help="two kills, few steps")
    parser.add_argument("--draw", type=Path, help="write a drawing there (.svg)")
    parser.add_argument("--json", type=Path, help="write the result there")
    args = parser.parse_args()
    num_kills, num_epochs = (2, 4) if args.smoke_test else (args.num_kills, 20)
    config = {BATCH_SIZE: 100, "num_epochs": num_epochs, "step_s": 0.1, "exact": args.exact}
    ray.init("local", num_cpus=NUM_WORKERS, include_dashboard=False, log_to_driver=False)
    undisturbed, disturbed = run(config, 0), run(config, num_kills)
    expected, found = undisturbed.pop("model"), disturbed.pop("model")
    losses = undisturbed["losses"]
    assert losses.keys() == disturbed["losses"].keys()
    apart = max(abs(disturbed["losses"][step] - loss) for step, loss in losses.items())
    parameters = max((found[name] - each).abs().max().item() for name, each in expected.items())
    print(f"workers killed at steps {', '.join(map(str, disturbed['killed']))} of {max(losses)}")
    print(f"losses differ by at most {apart:.1e}, final parameters by at most {parameters:.1e}")
    assert not args.exact or (apart, parameters) == (0, 0)
    if args.json:
        result = {"undisturbed": undisturbed, "disturbed": disturbed, "machine": machine()}
        differences = {"loss_difference": apart, "parameter_difference": parameters}
        args.json.write_text(json.dumps(result | differences, indent=2))
    if args.draw:
        draw(undisturbed, disturbed, args.draw)


if __name__ == "__main__":
    main()
