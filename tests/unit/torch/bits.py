"""Models whose training must have the same bits on any number of workers."""

import hashlib
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from raysgd import EqualBits, TrainingOperator
from raysgd._internal.context import WorkerContext
from raysgd.loop.requests import TrainRequest, ValidateRequest
from raysgd.torch.options import TorchOptions
from raysgd.torch.runner import TorchRunner
from raysgd.utils import BATCH_SIZE

NUM_SHARDS = 6
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


CASES: dict[str, dict[str, Any]] = {
    "perceptron": {"model": Perceptron},
    "accumulation": {"model": Perceptron, "register": {"gradient_accumulation_steps": 2}},
    "convolution": {"model": Convolution, "optimizer": "SGD", "num_samples": 61},
    "recurrent": {"model": Recurrent, "register": {"max_grad_norm": 0.1}},
    "transformer": {"model": Transformer, "num_items": True},
    "bfloat16": {"model": Perceptron, "precision": torch.bfloat16},
    "float16": {"model": Perceptron, "precision": torch.float16},
    "own loop": {"model": Perceptron, "own_loop": True},
}


class Trains(TrainingOperator):
    def setup(self, config):
        self.case = case = config["case"]
        torch.manual_seed(3)
        model = case["model"]()
        if case.get("optimizer") == "SGD":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=model,
            optimizers=optimizer,
            criterion=nn.CrossEntropyLoss(),
            schedulers=torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
            **case.get("register", {}),
        )
        of_tokens = case["model"] in (Recurrent, Transformer)
        data = Augmented(case.get("num_samples", 64), of_tokens)
        size = config[BATCH_SIZE]
        self.register_data(
            train_loader=DataLoader(data, size, shuffle=True),
            validation_loader=DataLoader(Augmented(31, of_tokens), size),
        )

    def num_items(self, batch):
        return (batch[0] > 4).sum() if self.case.get("num_items") else None

    def train_epoch(self, iterator, info=None, num_steps=None, epoch_idx=0):
        if not self.case.get("own_loop"):
            return super().train_epoch(iterator, info, num_steps, epoch_idx)
        self.train_mode(True)
        for x, y in iterator:
            loss = self.criterion(self.model(x), y)
            self.backward(loss)
            self.optimizer_step(self.optimizer)
        return {}


def digest(tree):
    """Return a hash of all bits of nested containers of tensors and numbers."""
    found = hashlib.sha256()

    def add(leaf):
        if isinstance(leaf, torch.Tensor):
            found.update(leaf.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, dict):
            for name, value in leaf.items():
                found.update(str(name).encode())
                add(value)
        elif isinstance(leaf, list | tuple):
            for value in leaf:
                add(value)
        else:
            found.update(repr(leaf).encode())

    add(tree)
    return found.hexdigest()


def make_runner(name, rank, size):
    case = CASES[name]
    dtype = case.get("precision")
    options = TorchOptions(
        training_operator_cls=Trains,
        config={"case": case, BATCH_SIZE: 24},
        num_workers=size,
        exact=EqualBits(NUM_SHARDS),
        scheduler_step_freq="batch",
        use_gpu=False,
        **({} if dtype is None else {"use_fp16": True, "amp_dtype": dtype}),
    )
    return TorchRunner(options)


def run(name, rank, size):
    """Train two epochs and validate. Return a hash of the state, and the metrics."""
    runner = make_runner(name, rank, size)
    context = WorkerContext(world_rank=rank, world_size=size, distributed=size > 1)
    runner.prepare(context)
    runner.setup(context)
    trained = runner.handle(TrainRequest(call=0, until_epoch=2))
    validated = runner.handle(ValidateRequest(call=1))
    state = digest(runner._train_state.training_state())
    runner.teardown()
    return state, trained, validated


def play(rank, size, store):
    """Run all cases, and put the results of this rank into the store."""
    if size > 1:
        group = dist.PrefixStore(f"group{size}", store)
        dist.init_process_group("gloo", store=group, rank=rank, world_size=size)
    for name in CASES:
        store.set(f"{name}/{size}/{rank}", pickle.dumps(run(name, rank, size)))
    print("good")
