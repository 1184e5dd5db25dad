"""Models whose training must have the same bits on any number of workers."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from raysgd import EqualBits, TrainingOperator
from raysgd.loop.requests import PredictRequest, TrainRequest, ValidateRequest
from raysgd.metrics import merge_worker_metrics
from raysgd.torch.tensors import state_digest
from raysgd.utils import BATCH_SIZE
from tests.unit.torch import cases

NUM_LOGICAL_WORKERS = 6
LENGTH = 5
CLASSES = 4


class Augmented(Dataset):
    """Vectors with noise, or sequences of tokens, and their classes."""

    def __init__(self, num_samples, of_tokens):
        generator = torch.Generator().manual_seed(1)
        if of_tokens:
            self.x = torch.randint(20, (num_samples, LENGTH), generator=generator)
        else:
            self.x = torch.randn(num_samples, 8, generator=generator)
        self.y = torch.randint(CLASSES, (num_samples,), generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index]
        return (x + 0.1 * torch.randn(8) if x.is_floating_point() else x), self.y[index]


class Perceptron(nn.Sequential):
    def __init__(self):
        normed = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3)
        super().__init__(*normed, nn.Linear(16, CLASSES))


class Convolution(nn.Sequential):
    def __init__(self):
        normed = nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 6, 3), nn.BatchNorm1d(6, momentum=None)
        super().__init__(*normed, nn.Flatten(), nn.Linear(36, CLASSES))


class Counting(nn.Module):
    """A model whose buffers are integers, appear late, or change their shape."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, CLASSES)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("late", None)
        self.register_buffer("cache", torch.zeros(0))

    def forward(self, x):
        if self.training:
            self.seen += torch.stack([(x > 1).sum(), (x < 0).sum()])
            self.cache = x[:, 0].detach().clone()
            self.late = self.cache.mean() if self.late is None else self.late
        return self.head(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 12, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x):
        return self.head(self.lstm(self.embedding(x))[0][:, -1])


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(self.layer(self.embedding(x)).mean(1))


class Trains(TrainingOperator):
    def setup(self, config):
        self.case = case = config["case"]
        torch.manual_seed(3)
        model = case.model()
        parameters, optimizers = list(model.parameters()), []
        if case.two_optimizers:
            optimizers = [torch.optim.SGD([parameters.pop()], lr=0.1)]
        if case.late_parameter:
            self.late = parameters.pop()
        if case.optimizer == "SGD":
            optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(parameters, lr=0.01)
        optimizers.append(optimizer)
        self.optimizer = optimizer
        self.model, self.optimizers, self.criterion, self.scheduler = self.register(
            models=model,
            optimizers=optimizers,
            criterion=nn.CrossEntropyLoss(),
            schedulers=torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
            **case.register,
        )
        data = Augmented(case.num_samples, case.of_tokens)
        if case.in_memory:
            data = TensorDataset(data.x, data.y)
        known, size = Augmented(31, case.of_tokens), config[BATCH_SIZE]
        self.register_data(
            train_loader=DataLoader(data, size, shuffle=True),
            validation_loader=DataLoader(TensorDataset(known.x, known.y), size),
        )

    def num_items(self, batch):
        return (batch[0] > 4).sum() if self.case.num_items else None

    def train_epoch(self, iterator, info=None, num_steps=None, epoch_idx=0):
        if self.case.late_parameter and epoch_idx == 1:
            self.optimizer.add_param_group({"params": [self.late]})
        if not self.case.own_loop:
            return super().train_epoch(iterator, info, num_steps, epoch_idx)
        self.train_mode(True)
        noise = torch.randn(8)
        for x, y in iterator:
            self.train_batch((x + noise, y), {})
        return {}

    def train_batch(self, batch, batch_info):
        if not (self.case.own_loop or self.case.two_optimizers):
            return super().train_batch(batch, batch_info)
        x, y = batch
        self.backward(self.criterion(self.model(x), y))
        for optimizer in self.optimizers:
            self.optimizer_step(optimizer)
        return {}

    def validate_batch(self, batch, batch_info):
        if self.case.noisy_validation:
            batch = batch[0] + torch.rand(8), batch[1]
        return super().validate_batch(batch, batch_info)


def digest(tree):
    """Return a hash of all bits of nested containers of tensors and numbers."""
    return state_digest(tree).hex()


@dataclass
class Case(cases.Case):
    """A model and how it is trained."""

    model: type[nn.Module] = Perceptron
    optimizer: str = "AdamW"
    num_samples: int = 64
    num_items: bool = False
    in_memory: bool = False
    own_loop: bool = False
    two_optimizers: bool = False
    noisy_validation: bool = False
    late_parameter: bool = False
    num_logical_workers: int = NUM_LOGICAL_WORKERS
    num_epochs: int = 2
    shares: tuple[float, ...] | None = None
    operator_cls: Any = field(default=Trains, kw_only=True)

    @property
    def of_tokens(self):
        return self.model in (Recurrent, Transformer)

    def make_runner(self, **settings):
        exact = {"exact": EqualBits(self.num_logical_workers), "scheduler_step_freq": "batch"}
        return super().make_runner(**exact, **settings)

    def config(self):
        return {"case": self, BATCH_SIZE: 24}

    def run(self, rank):
        """Train, validate, and predict. Return a hash of the state, metrics, and predictions."""
        runner = self.start(rank)
        until = {"until_epoch": self.num_epochs, "shares": self.shares}
        trained = runner.handle(TrainRequest(call_number=0, **until))
        validated = runner.handle(ValidateRequest(call_number=1))
        data = Augmented(13, self.of_tokens)
        predicted = runner.handle(PredictRequest(loader=DataLoader(data, 3)))
        state = digest(runner._hosted_loop.state_access.read())
        runner.teardown()
        return state, trained, validated, predicted


BFLOAT16 = {"use_fp16": True, "amp_dtype": torch.bfloat16}
CASES = {
    "perceptron": Case(),
    "accumulation": Case(register={"gradient_accumulation_steps": 2}),
    "convolution": Case(Convolution, "SGD", num_samples=61),
    "recurrent": Case(Recurrent, register={"max_grad_norm": 0.1}),
    "transformer": Case(Transformer, num_items=True),
    "bfloat16": Case(settings=BFLOAT16),
    "float16": Case(settings=cases.FLOAT16),
    "in memory": Case(in_memory=True),
    "own loop": Case(own_loop=True),
    "two optimizers": Case(two_optimizers=True),
    "buffers": Case(Counting, noisy_validation=True, late_parameter=True),
}


def merged(results):
    """Return the metrics and the predictions of all workers, for comparison."""
    _, trained, validated, _ = map(list, zip(*results, strict=True))
    metrics, kept = merge_worker_metrics(validated), ("val_loss", "val_accuracy", "num_samples")
    predictions = sorted((each for r in results for each in r[3]), key=lambda pair: pair[0])
    return merge_worker_metrics(trained), {name: metrics[name] for name in kept}, predictions
