"""A float64 operator whose schedules count steps, and the equivalent plain training loop."""

import math
import threading

import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TrainingOperator
from raysgd.utils import BATCH_SIZE

SEED = 7


class Meeting:
    """A barrier at which workers in threads exchange values."""

    def __init__(self, size):
        self.barrier = threading.Barrier(size, timeout=30)
        self.told = [None] * size

    def gather(self, rank, value):
        self.told[rank] = value
        self.barrier.wait()
        told = list(self.told)
        self.barrier.wait()
        return told


class OneEach(torch.nn.Module):
    """A small network and a parameter per sample, which shows when the sample was trained on."""

    def __init__(self, num_samples):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
        )
        self.own = torch.nn.Parameter(torch.zeros(num_samples))

    def forward(self, features, ids):
        return self.net(features).squeeze(1) + self.own[ids]


def make_data(num_samples):
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(num_samples, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(features, torch.arange(num_samples), features.sin().sum(dim=1))


def make_parts(config, num_updates):
    """Return a model, its optimizers, schedulers that count steps, and a plateau scheduler."""
    torch.manual_seed(SEED)
    model = OneEach(config["num_samples"]).double()
    groups = model.net[0].parameters(), model.net[2].parameters(), [model.own]
    optimizers = [torch.optim.AdamW(group, lr=0.01) for group in groups]
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(optimizers[0], max_lr=0.02, total_steps=num_updates),
        torch.optim.lr_scheduler.LambdaLR(
            optimizers[1], lambda n: min((n + 1) / 4, 1 - n / (num_updates + 1))
        ),
    ]
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers[2], threshold=0.5, patience=0)
    return model, optimizers, schedulers, plateau


class Exact(TrainingOperator):
    """An operator that trains with the helper methods. The config sets the samples and batches."""

    def setup(self, config):
        data = make_data(config["num_samples"])
        self.register_data(
            validation_loader=DataLoader(data, batch_size=4),
            train_loader=DataLoader(
                data,
                batch_size=config[BATCH_SIZE] if BATCH_SIZE in config else config["batch_size"],
                shuffle=config.get("shuffle", False),
                drop_last=config.get("drop_last", False),
            ),
        )
        assert len(self.train_loader) == self.steps_per_epoch
        accumulated = config.get("accumulated", 1)
        per_epoch = math.ceil(self.steps_per_epoch / accumulated)
        num_updates = config["num_epochs"] * per_epoch
        model, optimizers, schedulers, self.plateau = make_parts(config, num_updates)
        self.model, self.optimizers, self.schedulers = self.register(
            models=model,
            optimizers=optimizers,
            schedulers=schedulers,
            gradient_accumulation_steps=accumulated,
            **config.get("register", {}),
        )
        self.largest = 0

    def train_batch(self, batch, batch_info):
        features, ids, target = batch
        self.largest = max(self.largest, len(ids))
        loss = (self.model(features, ids) - target).square().mean()
        self.backward(loss, num_items=len(ids) if self.config.get("counts", True) else None)
        for optimizer in self.optimizers:
            self.optimizer_step(optimizer)
        return {"train_loss": loss.detach(), "num_samples": len(ids)}

    def validate_batch(self, batch, batch_info):
        features, ids, target = batch
        loss = (self.model(features, ids) - target).square().mean()
        return {"val_loss": loss, "num_samples": len(ids)}

    def state_dict(self):
        return self.plateau.state_dict()

    def load_state_dict(self, state):
        self.plateau.load_state_dict(state)


def flat(model):
    """Return all parameters of a model in one vector."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def plain_run(config, global_batch, reacts=False):
    """Train in a hand-written loop. Return the parameters and the number of steps.

    With `reacts`, the plateau scheduler steps with the loss of each epoch.
    """
    data, size = make_data(config["num_samples"]), config["num_samples"]
    end = size // global_batch * global_batch if config.get("drop_last") else size
    starts = range(0, end, global_batch)
    accumulated = config.get("accumulated", 1)
    per_epoch = math.ceil(len(starts) / accumulated)
    num_updates = config["num_epochs"] * per_epoch
    model, optimizers, schedulers, plateau = make_parts(config, num_updates)
    for epoch in range(config["num_epochs"]):
        order = torch.arange(size)
        if config.get("shuffle"):
            order = torch.randperm(size, generator=torch.Generator().manual_seed(SEED + epoch))
        for first in range(0, len(starts), accumulated):
            group = starts[first : first + accumulated]
            chosen = order[group[0] : min(group[-1] + global_batch, end)]
            features, ids, target = data[chosen]
            loss = (model(features, ids) - target).square().mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for scheduler in schedulers:
                scheduler.step()
        if reacts:
            features, ids, target = data[:]
            with torch.no_grad():
                plateau.step((model(features, ids) - target).square().mean().item())
    return flat(model), config["num_epochs"] * len(starts)
