"""Operators that record their samples, and fail if a test asks for it."""

import contextlib

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, TrainingOperator
from raysgd._internal.runner import WorkerContext
from raysgd.errors import RemoteError
from raysgd.torch.options import TorchOptions
from raysgd.torch.runner import TorchRunner


class Recorder(TrainingOperator):
    """An operator that trains on the numbers from 0: each sample is its own index."""

    width = 4

    def setup(self, config):
        torch.manual_seed(config.get("seed", 0))
        width = self.width
        layers = [torch.nn.Linear(1, width), torch.nn.Dropout(config.get("dropout", 0.0))]
        if config.get("batch_norm"):
            layers.append(torch.nn.BatchNorm1d(width))
        model = torch.nn.Sequential(*layers, torch.nn.Linear(width, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        given = {}
        if "scheduler" in config:
            given["schedulers"] = config["scheduler"](optimizer)
        self.model, self.optimizer, self.criterion, *_ = self.register(
            models=model, optimizers=optimizer, criterion=torch.nn.MSELoss(), **given
        )
        self.register_data(**self.make_loaders(config))
        self.trained, self.validated, self.infos = [], [], []
        self.fail = idle

    def make_loaders(self, config):
        numbers = torch.arange(float(config["num_samples"])).reshape(-1, 1)
        data = TensorDataset(numbers, numbers / len(numbers))
        batch_size = config["batch_size"]
        return {
            "train_loader": DataLoader(
                data, batch_size=batch_size, shuffle=config.get("shuffle", False)
            ),
            "validation_loader": DataLoader(data, batch_size=batch_size),
        }

    def train_batch(self, batch, batch_info):
        """Train as usual, and call ``self.fail`` before and after the update."""
        self.infos.append(batch_info)
        self.model(batch[0])  # changes the buffers before a failure
        self.fail(batch_info, "before")
        result = super().train_batch(batch, batch_info)
        self.fail(batch_info, "after")
        self.trained += batch[0].reshape(-1).int().tolist()
        return result

    def validate_batch(self, batch, batch_info):
        self.infos.append(batch_info)
        self.fail(batch_info, "validate")
        self.validated += batch[0].reshape(-1).int().tolist()
        return super().validate_batch(batch, batch_info)


def idle(batch_info, when):
    """Break nothing."""


@contextlib.contextmanager
def failure(operator, step=None, when="before", error=ValueError):
    """Make a `Recorder` raise at a step (None: at any). Check that the block raises this error."""

    def fail(batch_info, now):
        if now == when and step in (None, batch_info["global_step"]):
            raise error("bad batch")

    operator.fail = fail
    raised = RemoteError if error is SystemExit else error
    with pytest.raises(raised, match="bad batch") as caught:
        yield caught
    operator.fail = idle


class Unsized:
    """An iterable of batches that has no length."""

    def __init__(self, batches):
        self._batches = batches

    def __iter__(self):
        return iter(self._batches)


def batches_of(num_samples, batch_size):
    """Return the batches of `Recorder` as a list."""
    if num_samples == 0:
        return []  # split would return one empty batch
    numbers = torch.arange(float(num_samples)).reshape(-1, 1)
    return [(part, part / num_samples) for part in numbers.split(batch_size)]


class Streaming(Recorder):
    """A `Recorder` whose loaders are ``config["wrap"](batches)`` and not DataLoaders."""

    def make_loaders(self, config):
        wrap = config.get("wrap", Unsized)
        batches = batches_of(config["num_samples"], config["batch_size"])
        return {"train_loader": wrap(batches), "validation_loader": wrap(batches)}


def make_runner(operator_cls=Recorder, config=None, context=None, **options):
    """Return a runner in this process whose epochs have five batches of eight samples."""
    config = {"num_samples": 40, "batch_size": 8, **(config or {})}
    runner = TorchRunner(TorchOptions(training_operator_cls=operator_cls, config=config, **options))
    context = context or WorkerContext(is_in_driver=True)
    runner.prepare(context)
    runner.setup(context)
    return runner


def runner_with_snapshots(every, config=None, **options):
    """Return a runner that takes snapshots, as only those in other processes do."""
    runner = make_runner(config=config, elastic=ElasticConfig(snapshot_every=every), **options)
    runner.operator._train_state.settings.context = WorkerContext()
    return runner
