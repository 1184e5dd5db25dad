"""Models, data, and statistics that the benchmarks share."""

import importlib.metadata
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TrainingOperator

NUM_WORKERS = 2
BATCH_SIZES = {"mlp": 32, "resnet": 32, "loader": 512}
NUM_STEPS = {"mlp": 400, "resnet": 12, "loader": 60}
LEARNING_RATE = 0.01


class Residual(torch.nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            torch.nn.BatchNorm2d(outputs),
            torch.nn.ReLU(),
            torch.nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            torch.nn.BatchNorm2d(outputs),
        )
        self.shortcut = torch.nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, images):
        return torch.relu(self.body(images) + self.shortcut(images))


def make_model(name):
    """Return a model: *mlp* measures overhead, *resnet* arithmetic, *loader* the data loader."""
    torch.manual_seed(0)
    if name == "loader":
        return torch.nn.Linear(32, 1)
    if name == "mlp":
        return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    return torch.nn.Sequential(
        Residual(3, 16, 1),
        Residual(16, 32, 2),
        Residual(32, 64, 2),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 1),
    )


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def make_data(name, num_steps):
    """Return the data of all workers for `num_steps` steps."""
    size = (3, 32, 32) if name == "resnet" else (32,)
    generator = torch.Generator().manual_seed(1)
    num_samples = num_steps * BATCH_SIZES[name] * NUM_WORKERS
    features = torch.randn(num_samples, *size, generator=generator)
    return TensorDataset(features, features.flatten(1).mean(dim=1, keepdim=True))


class Floats(TrainingOperator):
    """A model with a given number of floats and a cheap step."""

    def setup(self, config):
        model = self.make_model(config["floats"])
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
            criterion=torch.nn.MSELoss(),
        )
        loader = DataLoader(self.samples(config), batch_size=1)
        self.register_data(train_loader=loader, validation_loader=loader)

    def make_model(self, floats):
        return torch.nn.Linear(floats, 1, bias=False)

    def samples(self, config):
        features = torch.zeros(64, 1).expand(64, config["floats"])
        return TensorDataset(features, torch.zeros(64, 1))


def _cpu():
    """Return the model of the CPU, and its best vector instructions in PyTorch."""
    about, name = Path("/proc/cpuinfo"), platform.machine()
    for line in about.read_text().splitlines() if about.exists() else ():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def _commit():
    command = ["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None


def spread(values):
    """Return the median and the spread of some figures."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "runs": len(values),
    }


def in_turn(runs, sides, warm_up=1):
    """Call all sides in turn in each run, and return their results after the warm-up.

    Args:
        runs: Number of counted runs.
        sides: Functions of the run's number, by name.
        warm_up: Number of earlier runs that do not count.
    """
    measured = {name: [] for name in sides}
    for run in range(warm_up + runs):
        for name, call in sides.items():
            figure = call(run)
            if run >= warm_up:
                measured[name].append(figure)
    return measured


def machine():
    """Describe the machine, the day, and the commit of a result."""
    return {
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ray": importlib.metadata.version("ray"),
        "raysgd": importlib.metadata.version("raysgd"),
    }
