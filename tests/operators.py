"""Operators and data that many tests use."""

import contextlib
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from raysgd import TorchTrainer, TrainingOperator

NUM_SAMPLES = 1003


def on_gpu(test):
    """Mark a test that needs a GPU."""
    lacking = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
    return pytest.mark.gpu(lacking(test))


def set_sync_mode(mode):
    """Make waiting for a GPU an "error" or not ("default")."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode(mode)


@contextlib.contextmanager
def no_synchronization():
    set_sync_mode("error")
    try:
        yield
    finally:
        set_sync_mode("default")


def make_data(num_samples=NUM_SAMPLES):
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(num_samples, 8, generator=generator)
    return TensorDataset(features, (features.sum(dim=1) > 0).long())


class Streamed(IterableDataset):
    """A stream of the given samples."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


def make_model(batch_norm=False):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)]
    if batch_norm:
        layers.insert(1, torch.nn.BatchNorm1d(16))
    return torch.nn.Sequential(*layers)


def register_with_sgd(operator, model, lr=0.1, momentum=0.0, **others):
    """Register a model and its optimizer, and set the attributes that operators usually have."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    registered = operator.register(models=model, optimizers=optimizer, **others)
    for name, each in zip(("model", "optimizer", "criterion"), registered, strict=False):
        setattr(operator, name, each)


class Classifier(TrainingOperator):
    """A small classifier; the config sets what tests vary."""

    def setup(self, config):
        chosen = {name: config[name] for name in ("lr", "momentum") if name in config}
        model, criterion = make_model(config.get("batch_norm", False)), torch.nn.CrossEntropyLoss()
        register_with_sgd(self, model, criterion=criterion, **chosen)
        data = make_data(config.get("num_samples", NUM_SAMPLES))
        settings = {
            "batch_size": config.get("batch_size", 32),
            "num_workers": config.get("num_loader_workers", 0),
        }
        self.register_data(
            train_loader=DataLoader(data, shuffle=config.get("shuffle", True), **settings),
            validation_loader=DataLoader(data, **settings),
        )


def local(operator_cls=Classifier, config=None, **arguments):
    """Return a trainer whose only worker is this process, on CPU by default."""
    given = {"use_local": True, "use_gpu": False, **arguments}
    return TorchTrainer(training_operator_cls=operator_cls, config=config or {}, **given)


class CountsBatches(TrainingOperator):
    """Keeps in its state how many batches it has seen."""

    def train_batch(self, batch, batch_info):
        self.seen += 1
        return super().train_batch(batch, batch_info)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Adversaries(TrainingOperator):
    """Two models: the loss of the second goes through the first, as in a GAN."""

    def setup(self, config):
        torch.manual_seed(0)
        models = [torch.nn.Linear(2, 1), torch.nn.Linear(3, 2)]
        (self.judge, self.maker), self.optimizers = self.register(
            models=models,
            optimizers=[torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.5) for m in models],
            gradient_accumulation_steps=config.get("steps", 1),
        )
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(20, 2, generator=generator), torch.randn(20, 3))
        self.register_data(train_loader=DataLoader(data, batch_size=config["batch_size"]))

    def train_batch(self, batch, batch_info):
        real, noise = batch
        for_judge, for_maker = self.optimizers
        for _ in range(self.config.get("times", 1)):
            with self.autocast():
                loss = self.judge(self.maker(noise).detach()).mean() - self.judge(real).mean()
            self.backward(loss, num_items=len(real))
            self.optimizer_step(for_judge)
        with self.autocast():
            loss = (self.judge(self.maker(noise)) - 1).square().mean()
        self.backward(loss, num_items=len(real))  # also leaves gradients in the judge
        self.optimizer_step(for_maker)
        return {"num_samples": len(real)}


def register_all(operator, **changes):
    """Register a small model, its optimizer, a criterion, and data. Call this in `setup`."""
    model = make_model()
    given = {
        "models": model,
        "optimizers": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "criterion": torch.nn.CrossEntropyLoss(),
    }
    operator.model, operator.optimizer, operator.criterion = operator.register(
        **{**given, **changes}
    )[:3]
    operator.register_data(train_loader=DataLoader(make_data(64), batch_size=16))


def parameters(operator):
    """Return the parameters of an operator's model in one vector."""
    return torch.cat([p.detach().reshape(-1).cpu() for p in operator.model.parameters()])


def replica_hash(operator):
    """Return a hash, equal on two workers only if their models and optimizers are equal.

    The hash covers the models and optimizers in the operator's public attributes.
    """
    found = list(_with_state(value for name, value in vars(operator).items() if name[0] != "_"))
    assert found, "an operator without a model among its attributes"
    return fingerprint(*found)


def fingerprint(*parts):
    """Return a hash, equal only for models and optimizers with equal states."""
    import hashlib
    import pickle

    states = [plain(getattr(part, "module", part).state_dict()) for part in parts]
    return hashlib.sha256(b"".join(pickle.dumps(state) for state in states)).hexdigest()


def _with_state(values):
    for value in values:
        if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
            yield value
        elif isinstance(value, list | tuple):
            yield from _with_state(value)


def plain(tree):
    if isinstance(tree, torch.Tensor):
        return tree.cpu().numpy().tobytes()
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    return [plain(value) for value in tree] if isinstance(tree, list | tuple) else tree
