"""Operators with a ledger: a parameter per sample counts how often it was trained on."""

import os
import time

import torch
from torch.utils.data import DataLoader, Dataset

from raysgd import TorchTrainer, TrainingOperator
from raysgd.utils import BATCH_SIZE
from tests.operators import fingerprint, register_with_sgd


class Ids(Dataset):
    """Samples that are their own indices."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index


class Weights(torch.nn.Module):
    """A model with one parameter per sample."""

    def __init__(self, size):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(size))

    def forward(self, ids):
        return self.weights[ids]


class Ledger(TrainingOperator):
    """An operator that adds 1 to the parameter of a sample whenever it trains on the sample."""

    def setup(self, config):
        model = Weights(config["num_samples"])
        register_with_sgd(self, model, lr=1.0, **config.get("register", {}))
        self.register_data(train_loader=self.make_loader(config))

    def make_loader(self, config):
        # A process of the loader that outlives its worker looks for it this often.
        torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 60.0
        return DataLoader(
            Ids(config["num_samples"]),
            batch_size=config.get(BATCH_SIZE, config.get("batch_size")),
            shuffle=True,
            num_workers=config.get("num_loader_workers", 0),
        )

    def train_batch(self, batch, batch_info):
        loss = -self.model(batch).sum() * self.world_size
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"num_samples": len(batch)}


def wait_if_short(operator, size):
    """Delay a step of a smaller group, so that replacements join long before the last step."""
    if operator.world_size < size:
        time.sleep(1.0)  # an epoch lasts longer than the start of a worker on a busy machine


class SlowLedger(Ledger):
    """A ledger that trains slowly until the group is full, and creates a file after `setup`."""

    def setup(self, config):
        super().setup(config)
        if folder := config.get("folder"):
            with open(os.path.join(folder, f"set-up-{os.getpid()}"), "w"):
                pass

    def train_batch(self, batch, batch_info):
        wait_if_short(self, self.config["until_size"])
        return super().train_batch(batch, batch_info)


def ledger_trainer(
    num_workers,
    num_samples=3000,
    elastic=None,
    operator_cls=SlowLedger,
    use_local=False,
    min_workers=1,
    **config,
):
    """Return a trainer of a ledger. With `SlowLedger`, epochs end with all workers."""
    if BATCH_SIZE not in config:
        config.setdefault("batch_size", 4)
    return TorchTrainer(
        training_operator_cls=operator_cls,
        config={"num_samples": num_samples, "until_size": num_workers, **config},
        num_workers=num_workers,
        min_workers=min_workers,
        elastic=elastic,
        use_local=use_local,
    )


def ledger_of(trainer):
    """Return how often each sample was trained on."""
    return trainer.get_model().weights.detach()


def check_ledger(trainer, metrics):
    """Check that each sample was trained on once. The last step may repeat a few samples."""
    num_samples = trainer.config["num_samples"]
    ledger = ledger_of(trainer)
    repeats = int((ledger == 2).sum())
    assert int((ledger == 1).sum()) + repeats == num_samples
    assert repeats < trainer.max_workers
    # the metrics of lost workers are missing
    assert 0 < metrics["num_samples"] <= num_samples, metrics
    assert metrics["epoch"] == 1
    assert len(set(trainer.apply_all_operators(lambda op: fingerprint(op.model)))) == 1
