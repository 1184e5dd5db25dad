"""Train on masked tokens with workers in separate processes, and with one process."""

import itertools
import pickle
import traceback
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, TrainingOperator
from raysgd._internal.context import WorkerContext
from raysgd.loop.requests import TrainRequest, ValidateRequest
from raysgd.metrics import Sums, ratio
from raysgd.torch.options import TorchOptions
from raysgd.torch.runner import TorchRunner

NUM_RANKS = 3
BATCH = 3
LENGTH = 2


class OwnBatches(list):
    """A list with the attribute that says that user code selects a part."""


@dataclass
class Case:
    """A training problem, its number of workers, and its settings."""

    targets: list[list[float]]
    """The tokens of each sample. NaN marks a masked token."""
    num_workers: int = 1
    accumulation: int = 1
    num_parts: int = 1
    num_losses: int = 1
    """Losses per batch. More than 1 selects `SeveralLosses` instead of the default loop."""
    sharding: str | None = None
    max_grad_norm: float | None = None
    scaled: bool = False
    """Whether to scale the loss, as for float16."""
    shares: tuple[float, ...] | None = None
    """Relative shares of the workers."""
    num_missing: int = 0
    """Workers that the group lacks, so that batches are larger, and are split."""
    kind: str = "tokens"
    """The loss: a mean over unmasked "tokens", or a mean over "samples", or a "sum"."""
    by_hand: bool = False
    """Whether user code partitions the data, so that raysgd does not know the sizes."""

    skipped: int | None = None
    """The number of the batch for which `SeveralLosses` computes no loss."""

    @property
    def full_size(self):
        return self.num_workers + self.num_missing

    @property
    def is_valid(self):
        """Whether raysgd supports this combination."""
        is_one_loss = self.num_losses == 1
        if not self.by_hand:
            return is_one_loss or self.kind != "sum"
        is_plain = self.shares is None and not self.num_missing
        fits = all(stop - start >= self.num_workers for start, stop in self.steps())
        return is_plain and fits and (is_one_loss or self.kind == "tokens")

    def steps(self):
        """Return the first and the last sample of each step."""
        size = BATCH * self.full_size
        bounds = [*range(0, len(self.targets), size), len(self.targets)]
        return list(itertools.pairwise(bounds))

    def data(self):
        generator = torch.Generator().manual_seed(1)
        features = torch.randn(len(self.targets), LENGTH, 2, generator=generator).double()
        targets = torch.tensor(self.targets, dtype=torch.float64)
        return features, targets if self.kind == "tokens" else targets.nan_to_num()

    def own_batches(self, rank):
        """Return the batches of one worker, whose sizes differ."""
        features, targets = self.data()
        batches = OwnBatches()
        batches.num_replicas = self.num_workers
        for start, stop in self.steps():
            own = slice(start + rank, stop, self.num_workers)
            batches.append((features[own], targets[own]))
        return batches


def make_model():
    torch.manual_seed(3)
    layers = torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1), torch.nn.Flatten(-2)
    return torch.nn.Sequential(*layers).double()


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)


def errors(output, target):
    return (output - target.nan_to_num()) * ~target.isnan()


def count_items(target):
    return (~target.isnan()).sum()


def mean_loss(output, target):
    """Return the mean over the unmasked tokens, or NaN if all are masked."""
    return errors(output, target).square().sum() / count_items(target)


class Tokens(TrainingOperator):
    def setup(self, config):
        self.case = case = config["case"]
        model = make_model()
        criterion = torch.nn.MSELoss(reduction="sum") if case.kind == "sum" else mean_loss
        arguments = {"sharding_args": {"wrap": torch.nn.Linear}} if case.sharding == "full" else {}
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=make_optimizer(model),
            criterion=criterion,
            gradient_accumulation_steps=case.accumulation,
            max_grad_norm=case.max_grad_norm,
            sharding=case.sharding,
            **arguments,
        )
        loader = train_loader = DataLoader(TensorDataset(*case.data()), batch_size=BATCH)
        if case.by_hand:
            train_loader = case.own_batches(self.world_rank)
        self.register_data(train_loader=train_loader, validation_loader=loader)


class Masked(Tokens):
    def num_items(self, batch):
        return count_items(batch[1])


class SeveralLosses(Tokens):
    def train_batch(self, batch, batch_info):
        features, target = batch
        if batch_info["batch_idx"] == self.case.skipped:
            return {}
        self.optimizer.zero_grad()  # keeps the gradients of earlier batches in the group
        output, count = self.model(features), count_items(target)
        given = {"num_samples": count} if self.case.kind == "tokens" else {}
        self.backward(mean_loss(output, target), **given)
        for _ in range(self.case.num_losses - 1):
            loss = errors(self.model(features), target).abs().sum() / count
            self.backward(loss, **given)
        self.optimizer_step(self.optimizer)
        total = errors(output.detach(), target).square().sum()
        return {"train_loss": Sums(ratio, total=total, weight=count), "num_samples": len(target)}

    def validate_batch(self, batch, batch_info):
        total = errors(self.model(batch[0]), batch[1]).square().sum()
        loss = Sums(ratio, total=total, weight=count_items(batch[1]))
        return {"val_loss": loss, "num_samples": len(batch[1])}


def make_runner(case):
    precision: dict[str, Any] = {"use_fp16": True, "amp_dtype": torch.float16}
    default = Masked if case.kind == "tokens" else Tokens
    shares = {"node": 1.0} if case.shares else "even"
    return TorchRunner(
        TorchOptions(
            training_operator_cls=default if case.num_losses == 1 else SeveralLosses,
            config={"case": case},
            num_workers=case.full_size,
            elastic=ElasticConfig(shares=shares),
            use_gpu=False,
            **(precision if case.scaled else {}),
        )
    )


def run(case, rank):
    """Train for an epoch and validate; return parameters and metrics."""
    runner = make_runner(case)
    distributed = case.num_workers > 1
    runner.setup(
        WorkerContext(world_rank=rank, world_size=case.num_workers, distributed=distributed)
    )
    train_state, operator = runner._train_state, runner.operator
    if case.num_parts > 1:
        train_state.micro_batching.raise_split(case.num_parts)
    trained = runner.handle(TrainRequest(call=0, until_epoch=1, shares=case.shares))
    validated = runner.handle(ValidateRequest(call=1))
    parameters = [
        (each.full_tensor() if hasattr(each, "full_tensor") else each).detach().clone()
        for each in operator.unwrapped(operator.model).parameters()
    ]
    runner.teardown()
    return parameters, [trained, validated]


def expected(case):
    """Return the parameters and losses of a plain PyTorch loop in one process."""
    (features, targets), model = case.data(), make_model()
    optimizer = make_optimizer(model)
    total = 0.0
    step = BATCH * case.full_size
    for start in range(0, len(targets), step * case.accumulation):
        target = targets[start : start + step * case.accumulation]
        error = errors(model(features[start : start + len(target)]), target)
        total += error.detach().square().sum()
        loss = error.square().sum() + (case.num_losses - 1) * error.abs().sum()
        (loss if case.kind == "sum" else loss / max(1, count_items(target))).backward()
        if case.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    parameters = [each.detach() for each in model.parameters()]
    with torch.no_grad():
        validated = errors(model(features), targets).square().sum()
    count = len(targets) if case.kind == "sum" else count_items(targets)
    return parameters, (total / count).item(), (validated / count).item()


def play(rank, store):
    """Run cases from the store until one is None."""
    for number in itertools.count():
        case = pickle.loads(store.get(f"cases/{number}"))
        if case is None:
            break
        if rank >= case.num_workers:
            continue
        if case.num_workers > 1:
            own = dist.PrefixStore(f"group-{number}", store)
            dist.init_process_group("gloo", store=own, rank=rank, world_size=case.num_workers)
        try:
            result = run(case, rank)
        except Exception:
            result = traceback.format_exc()
        store.set(f"results/{number}/{rank}", pickle.dumps(result))
        if case.num_workers > 1:
            dist.destroy_process_group()
    print("good")
