"""An operator that fails or waits when a test orders it, and counts the uses of each sample."""

import contextlib
import os
import signal
import threading
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator
from tests.conftest import wait_until
from tests.ledger import Weights, wait_if_short
from tests.operators import NUM_SAMPLES, fingerprint, make_data, make_model


class Faulty(TrainingOperator):
    """An operator that obeys an order file once, on one rank at one step. See `order`.

    The first model is a classifier with batch normalization and momentum. The second model counts
    how often each sample was trained on.
    """

    def setup(self, config):
        self.folder = config["folder"]
        models = [make_model(batch_norm=True), Weights(NUM_SAMPLES)]
        (self.model, self.ledger), (self.optimizer, self.counter), self.criterion = self.register(
            models=models,
            optimizers=[
                torch.optim.SGD(models[0].parameters(), lr=config.get("lr", 0.1), momentum=0.9),
                torch.optim.SGD(models[1].parameters(), lr=1.0),
            ],
            criterion=torch.nn.CrossEntropyLoss(),
        )
        self.data = TensorDataset(*make_data().tensors, torch.arange(NUM_SAMPLES))
        self.register_data(
            train_loader=self.make_loader(config),
            validation_loader=DataLoader(self.data, batch_size=config.get("batch_size", 32)),
        )
        self.num_validated = 0
        self.tokens_per_sample = 1
        self.maybe("setup", step=0)

    def make_loader(self, config):
        return DataLoader(self.data, batch_size=config.get("batch_size", 32), shuffle=True)

    def train_batch(self, batch, batch_info):
        self.maybe("train")
        wait_if_short(self, self.asked("until_size"))
        features, target, ids = batch
        loss = self.criterion(self.model(features), target)
        self.backward(loss)
        self.optimizer_step(self.optimizer)
        self.maybe("between")
        # not self.backward(), which would weight this sum like a mean over samples
        (-self.ledger(ids).sum() * self.world_size).backward()
        self.optimizer_step(self.counter)
        return {"train_loss": loss.detach(), "num_samples": len(ids) * self.tokens_per_sample}

    def validate(self, val_iterator, info):
        self.control = val_iterator.control
        return super().validate(val_iterator, info)

    def validate_batch(self, batch, batch_info):
        self.num_validated += 1
        self.maybe("validate")
        features, target, ids = batch
        loss = self.criterion(self.model(features), target)
        return {"val_loss": loss.detach(), "num_samples": len(ids)}

    def maybe(self, when, step=None):
        what = self.take(f"{when}-{self.world_rank}-{self.global_step if step is None else step}")
        if what == "raise":
            raise KeyError("a mistake of the user")
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what in ("wait", "wait for the interruption"):
            with open(os.path.join(self.folder, "waiting"), "w"):
                pass
            go = os.path.join(self.folder, "go")
            while not (os.path.exists(go) if what == "wait" else self.control.is_interrupted):
                time.sleep(0.01)

    def take(self, name):
        """Return the order in a file and delete the file. Return None if there is no order."""
        path = os.path.join(self.folder, name)
        if not os.path.exists(path):
            return None
        with open(path) as file:
            what = file.read()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return what

    def asked(self, name):
        """Return the number in a file, or 0 if there is no file."""
        path = os.path.join(self.folder, name)
        if not os.path.exists(path):
            return 0
        with open(path) as file:
            return int(file.read() or 0)


def faulty_trainer(folder, num_workers, operator_cls=Faulty, config=None, **arguments):
    """Return a trainer of `Faulty` that reads its orders from a folder."""
    return TorchTrainer(
        training_operator_cls=operator_cls,
        config={"folder": str(folder), **(config or {})},
        num_workers=num_workers,
        **arguments,
    )


def order(folder, when, rank, step, what):
    """Order a rank to "raise", "die", or "wait" at a step. It waits until a file "go" exists.

    After a validation, the order can be "wait for the interruption", which the driver requests.
    """
    (folder / f"{when}-{rank}-{step}").write_text(what)


def pids_of(trainer):
    """Return the process IDs of the workers."""
    return trainer.apply_all_workers(os.getpid)


def fingerprints(trainer):
    """Return a hash per worker, equal only if models and optimizers are equal."""
    return trainer.apply_all_operators(
        lambda op: fingerprint(op.model, op.ledger, op.optimizer, op.counter)
    )


def check_epoch(trainer, epoch=1):
    """Check that each epoch trained on each sample once and that all replicas are equal."""
    ledger = trainer.state_dict()["models"][1]["weights"]
    assert trainer.epoch == epoch
    assert int((ledger < epoch).sum()) == 0
    # the last step of an epoch may repeat samples, so that every worker has one
    assert int((ledger - epoch).sum()) < epoch * trainer.max_workers
    assert len(set(fingerprints(trainer))) == 1


@contextlib.contextmanager
def interrupted_when(condition):
    """Send SIGINT to this process when a condition holds."""

    over = threading.Event()

    def interrupt():
        wait_until(lambda: over.is_set() or condition())
        if not over.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
