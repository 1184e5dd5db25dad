"""Compare the loss, step by step, of a run that loses ten workers with that of one that loses none.

    python examples/benchmarks/losses.py
    python examples/benchmarks/losses.py --num-losses 20 --draw losses.svg

Three workers train on handwritten digits in float64, by AdamW and a OneCycleLR that counts steps.
Of the second run real processes are killed, and replaced. The loss is that over all samples, of the
model as it is after each ten steps.
"""

import argparse
import json
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

NUM_WORKERS, EVERY = 3, 10


class Digits(TrainingOperator):
    """A small net; its steps take a tenth of a second, so that replacement workers come in time."""

    def setup(self, config):
        torch.manual_seed(0)
        pixels, digits = load_digits(return_X_y=True)
        data = TensorDataset(torch.tensor(pixels) / 16, torch.tensor(digits))
        self.register_data(
            train_loader=DataLoader(data, batch_size=config[BATCH_SIZE], shuffle=True),
            validation_loader=DataLoader(data, batch_size=600),
        )
        layers = torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)
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
        return super().train_batch(batch, batch_info)


def run(config, num_losses):
    """Return the loss at each tenth step, the steps at which workers were lost, and the model."""
    with TorchTrainer(
        training_operator_cls=Digits,
        config=config,
        num_workers=NUM_WORKERS,
        scheduler_step_freq="batch",
        elastic=ElasticConfig(resize_cooldown_s=0.0),
    ) as trainer:
        num_steps = config["num_epochs"] * -(-1797 // config[BATCH_SIZE])
        faults = [
            Fault(rank=number % NUM_WORKERS, step=(number + 1) * num_steps // (num_losses + 2))
            for number in range(num_losses)
        ]
        losses = {0: trainer.validate()["val_loss"]}
        with Chaos(trainer, faults) as chaos:
            while (left := num_steps - trainer.global_step) > 0:
                trainer.train(num_steps=min(EVERY, left), max_retries=num_losses)
                losses[trainer.global_step] = trainer.validate()["val_loss"]
        lost = [event.step for event in trainer.events if event.kind == "lost"]
        assert not chaos.pending
        assert len(lost) == num_losses
        return losses, lost, trainer.get_model().state_dict()


def draw(result, path):
    """Draw both curves, one over the other, and where workers were lost."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 3.4))
    for step in result["lost"]:
        axis.axvline(step, color="#e4572e", alpha=0.5, linewidth=1)
    axis.axvline(-9, color="#e4572e", alpha=0.5, linewidth=1, label="a worker is killed")
    undisturbed, disturbed = result["undisturbed"], result["disturbed"]
    looks = {
        "nobody lost": (undisturbed, {"color": "#b9c6d4", "linewidth": 6}),
        f"{len(result['lost'])} losses": (disturbed, {"color": "#1f2d3a", "linewidth": 1.2}),
    }
    for label, (losses, look) in looks.items():
        axis.plot(list(losses), list(losses.values()), label=label, **look)
    axis.set(xlabel="step", ylabel="loss", xlim=(0, max(undisturbed)), yscale="log")
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-losses", type=int, default=10)
    parser.add_argument("--smoke-test", action="store_true", help="two losses, few steps")
    parser.add_argument("--draw", type=Path, help="write a drawing there (.svg)")
    parser.add_argument("--json", type=Path, help="write the result there")
    args = parser.parse_args()
    num_losses, num_epochs = (2, 4) if args.smoke_test else (args.num_losses, 20)
    config = {BATCH_SIZE: 100, "num_epochs": num_epochs, "step_s": 0.1}
    ray.init("local", num_cpus=NUM_WORKERS, include_dashboard=False, log_to_driver=False)
    undisturbed, _, expected = run(config, 0)
    disturbed, lost, found = run(config, num_losses)
    assert undisturbed.keys() == disturbed.keys()
    apart = max(abs(disturbed[step] - loss) for step, loss in undisturbed.items())
    parameters = max((found[name] - each).abs().max().item() for name, each in expected.items())
    print(f"{len(lost)} losses at steps {', '.join(map(str, lost))} of {max(undisturbed)}")
    print(f"losses at most {apart:.1e} apart, parameters in the end {parameters:.1e}")
    result = {"undisturbed": undisturbed, "disturbed": disturbed, "lost": lost}
    if args.json:
        told = {"machine": machine(), "apart": apart, "parameters": parameters}
        args.json.write_text(json.dumps(result | told, indent=2))
    if args.draw:
        draw(result, args.draw)


if __name__ == "__main__":
    main()
