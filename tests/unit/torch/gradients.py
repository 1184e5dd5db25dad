"""Steps whose gradients no single backward pass averages, on two workers and in one process."""

import contextlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TrainingOperator
from raysgd._internal.context import WorkerContext
from raysgd.loop.requests import TrainRequest
from raysgd.torch.options import TorchOptions
from raysgd.torch.runner import TorchRunner

NUM_WORKERS = 2
BATCH = 4
NUM_STEPS = 3


@dataclass
class Case:
    """A step, by its name in this module, and the settings of its operator."""

    step: str
    register: dict[str, Any] = field(default_factory=dict)
    scaled: bool = False
    before: str = ""
    """Name of a function that changes the model before `register`."""
    after: str = ""
    """Name of a function that changes the model after `register`."""
    num_steps: int | None = None
    """None for the epoch."""
    optimizer: str = "make_optimizer"
    """Name of a function of the model."""
    raw: bool = False
    """Whether the step calls ``loss.backward()`` and ``optimizer.step()``."""
    num_models: int = 1


class Heads(torch.nn.Module):
    """An encoder with two heads."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh())
        self.first, self.second = torch.nn.Linear(5, 1), torch.nn.Linear(5, 1)
        self.double()

    def forward(self, x, which="both"):
        if which == "checkpointed":
            h = checkpoint(self.body, x.clone().requires_grad_(), use_reentrant=True)
            return SimpleNamespace(first=self.first(h), second=self.second(h))
        h = self.body(x)
        if which == "both":
            return self.first(h), {"second": self.second(h)}
        if which == "sum":
            return self.first(h) + self.second(h)
        if which == "object":
            return SimpleNamespace(first=self.first(h), second=self.second(h), scale=1)
        if which == "kept":
            self.kept = self.first(h)
            return [None, lambda: self.second(h)]
        return getattr(self, which)(h)

    def energy(self, x):
        return self.body(x).square().mean()


def data():
    x = torch.randn(BATCH * NUM_WORKERS * NUM_STEPS, 3, dtype=torch.float64, generator=seeded())
    return x, x.sum(1, keepdim=True)


def seeded():
    return torch.Generator().manual_seed(0)


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.3, eps=1e-3)


class Sharpness(torch.optim.Optimizer):
    """Moves the parameters up their gradients, before another optimizer steps."""

    def __init__(self, model):
        self.base = torch.optim.SGD(model.parameters(), lr=0.1)
        super().__init__(self.base.param_groups, {})
        self.param_groups = self.base.param_groups

    def parameters(self):
        return self.param_groups[0]["params"]

    def first_step(self):
        self.held = [p.detach().clone() for p in self.parameters()]
        with torch.no_grad():
            for p in self.parameters():
                p += 0.1 * p.grad
        self.zero_grad()

    def second_step(self):
        with torch.no_grad():
            for p, held in zip(self.parameters(), self.held, strict=True):
                p.copy_(held)
        self.base.step()
        self.zero_grad()

    def step(self, closure=None):
        raise NotImplementedError


def searching(model):
    return torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")


def mse(output, y):
    return (output - y).square().mean()


# ---- steps: `t` is an operator, or stands for it in one process


def one_forward(t, x, y):
    first, rest = t.model(x)
    t.backward(mse(first, y) + mse(rest["second"], y))
    t.optimizer_step(t.optimizer)


def two_forwards(t, x, y):
    a, b = t.model(x, "sum"), t.model(x * 0.5, "sum")
    t.backward(mse(a, y))
    t.backward(mse(b, y))
    t.optimizer_step(t.optimizer)


def three_forwards_reversed(t, x, y):
    outputs = [t.model(x * scale, "sum") for scale in (1, 0.5, 2)]
    for output in reversed(outputs):
        t.backward(mse(output, y))
    t.optimizer_step(t.optimizer)


def two_heads(t, x, y):
    a, b = t.model(x, "first"), t.model(x, "second")
    t.backward(mse(a, y))
    t.backward(mse(b, -y))
    t.optimizer_step(t.optimizer)


def task_by_task(t, x, y):
    first, rest = t.model(x)
    t.backward(mse(first, y), retain_graph=True)
    t.backward(mse(rest["second"], -y))
    t.optimizer_step(t.optimizer)


def retained(t, x, y):
    loss = mse(t.model(x, "sum"), y)
    loss.backward(retain_graph=True)
    loss.backward()
    t.optimizer_step(t.optimizer)


def surgery(t, x, y):
    """Project conflicting gradients of two tasks, which is not linear."""
    first, rest = t.model(x)
    found = []
    for loss in (mse(first, y), mse(rest["second"], -y)):
        t.optimizer.zero_grad()
        loss.backward(retain_graph=True)
        gradients = [p.grad for p in t.model.parameters()]
        found.append([torch.zeros(()) if g is None else g.clone() for g in gradients])
    for p, a, b in zip(t.model.parameters(), *found, strict=True):
        dot = (a * b).sum()
        p.grad = a + b - (dot < 0) * dot / b.square().sum().clamp(min=1e-9) * b + 0 * p.detach()
    t.optimizer_step(t.optimizer)


def own_gradients(t, x, y):
    loss = mse(t.model(x, "sum"), y)
    trained = list(t.model.parameters())
    for p, g in zip(trained, torch.autograd.grad(loss, trained), strict=True):
        p.grad = g
    t.optimizer_step(t.optimizer)


def penalty(t, x, y):
    """Add a gradient penalty, whose inner pass computes no gradients of parameters."""
    x = x.clone().requires_grad_()
    output = t.model(x, "sum")
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    t.backward(mse(output, y) + (slope.norm(dim=1) - 1).square().mean())
    t.optimizer_step(t.optimizer)


def other_method(t, x, y):
    t.backward(mse(t.model(x, "sum"), y))
    t.backward(t.model.energy(x))
    t.optimizer_step(t.optimizer)


def only_other_method(t, x, y):
    t.backward(t.model.energy(x))
    t.optimizer_step(t.optimizer)


def in_one_loss(t, x, y):
    t.backward(mse(t.model(x, "sum"), y) + t.model.energy(x))
    t.optimizer_step(t.optimizer)


def clips_by_hand(t, x, y):
    a, b = t.model(x, "sum"), t.model(x * 0.5, "sum")
    a.mean().backward()
    b.square().mean().backward()
    torch.nn.utils.clip_grad_norm_(t.model.parameters(), 0.1)
    t.optimizer_step(t.optimizer)


def one_head(t, x, y):
    """Leave the second head without gradients on all workers."""
    t.backward(mse(t.model(x, "first"), y))
    t.optimizer_step(t.optimizer)


def one_head_of_object(t, x, y):
    t.backward(mse(t.model(x, "object").first, y))
    t.optimizer_step(t.optimizer)


def one_head_of_checkpointed(t, x, y):
    t.backward(mse(t.model(x, "checkpointed").first, y))
    t.optimizer_step(t.optimizer)


def heads_of_objects(t, x, y):
    a, b = t.model(x, "object"), t.model(2 * x, "object")
    t.backward(mse(a.first, y))
    t.backward(mse(b.second, -y))
    t.optimizer_step(t.optimizer)


def one_head_of_kept(t, x, y):
    """Use an output that the model keeps, and not the one that it returns."""
    t.model(x, "kept")
    t.backward(mse(t.model.kept, y))
    t.optimizer_step(t.optimizer)


def heads_by_data(t, x, y):
    """Use the second head for some samples, which not all workers have in each step."""
    large = y[:, 0] > 0.8
    loss = mse(t.model(x)[0], y)
    if large.any():
        output = t.model(x[large], "second")
        loss = loss + (output - y[large]).square().sum() / len(x)
    t.backward(loss)
    t.optimizer_step(t.optimizer)


def one_or_the_other(t, x, y):
    """Use one head or the other, depending on the worker. The mean over both is the loss."""
    rank = getattr(t, "world_rank", None)
    halves = (
        [(x, y, rank)]
        if rank is not None
        else [(x[:BATCH], y[:BATCH], 0), (x[BATCH:], y[BATCH:], 1)]
    )
    losses = [mse(t.model(a, ["first", "second"][which]), b) for a, b, which in halves]
    t.backward(sum(losses) / len(losses))
    t.optimizer_step(t.optimizer)


def closure(t, x, y):
    def evaluate():
        t.optimizer.zero_grad()
        a, b = t.model(x, "sum"), t.model(x * 0.5, "sum")
        mse(a, y).backward()
        mse(b, y).backward()
        return None

    t.optimizer.step(evaluate)


def line_search(t, x, y):
    def evaluate():
        t.optimizer.zero_grad()
        loss = mse(t.model(x, "sum"), y)
        loss.backward()
        return loss

    t.optimizer.step(evaluate)


def sharpness(t, x, y):
    """Step an optimizer that the registered one contains, with gradients of another method."""
    mse(t.model(x, "sum"), y).backward()
    t.optimizer.first_step()
    (mse(t.model.first(t.model.body(x)), y) + mse(t.model.second(t.model.body(x)), y)).backward()
    t.optimizer.second_step()


def steps_in_hook(t, x, y):
    bias = t.model.body[0].bias
    bias.register_post_accumulate_grad_hook(lambda p: t.optimizer.step())
    t.backward(mse(t.model(x, "sum"), y))


def without_sync(t, x, y):
    """Compute the first gradients without an exchange."""
    with t.model.no_sync() if hasattr(t.model, "no_sync") else contextlib.nullcontext():
        mse(t.model(x, "sum"), y).backward()
    t.backward(mse(t.model(2 * x, "sum"), y))
    t.optimizer_step(t.optimizer)


def never_sync(t, x, y):
    with t.model.no_sync() if hasattr(t.model, "no_sync") else contextlib.nullcontext():
        t.backward(mse(t.model(x, "sum"), y))
    t.optimizer_step(t.optimizer)


def checkpointed(t, x, y):
    """Recompute the encoder in the backward pass, once for each loss."""
    h = checkpoint(t.model.body, x.clone().requires_grad_(), use_reentrant=True)
    t.backward(mse(t.model.first(h), y), retain_graph=True)
    t.backward(mse(t.model(x, "sum"), y))
    t.optimizer_step(t.optimizer)


def discards(t, x, y):
    """Zero the gradients of a first loss, as for a loss that is only logged."""
    mse(t.model(x, "second"), y).backward()
    t.optimizer.zero_grad()
    t.backward(mse(t.model(x, "first"), y))
    t.optimizer_step(t.optimizer)


def keeps_zeros(t, x, y):
    """Zero gradients in place, so that later losses add to tensors of zeros."""
    for p in t.model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad.zero_()
    heads_by_data(t, x, y)


def forward_only(t, x, y):
    """Run a forward pass whose output no loss uses."""
    t.model(x, "second")
    t.backward(mse(t.model(x, "first"), y))
    t.model(x, "sum")
    t.optimizer_step(t.optimizer)


def skips(t, x, y, at=1, ranks=(1,), after=lambda t, x: None):
    """Skip a batch on some workers, as after a loss that is NaN."""
    t.count = getattr(t, "count", -1) + 1
    if t.count == at and getattr(t, "world_rank", 0) in ranks:
        after(t, x)
    else:
        one_forward(t, x, y)


def skips_first(t, x, y):
    skips(t, x, y, at=0)


def skips_after_forward(t, x, y):
    skips(t, x, y, after=lambda t, x: t.model(x))


def all_skip(t, x, y):
    skips(t, x, y, ranks=(0, 1))


def all_skip_first(t, x, y):
    skips(t, x, y, at=0, ranks=(0, 1), after=lambda t, x: t.model(x))


def in_turn(t, x, y, at=None, skipped=None):
    """Train several models. One worker may skip a model in one batch."""
    t.count = getattr(t, "count", -1) + 1
    for number, (model, optimizer) in enumerate(zip(t.models, t.optimizers, strict=True)):
        if (t.count, number) != (at, skipped) or getattr(t, "world_rank", 0) == 0:
            t.backward(mse(model(x, "first"), y))
            t.optimizer_step(optimizer)


def skips_first_model(t, x, y):
    in_turn(t, x, y, at=1, skipped=0)


def skips_second_model(t, x, y):
    in_turn(t, x, y, at=1, skipped=1)


def second_model_rarely(t, x, y):
    """Train the second model in every other batch, on all workers."""
    t.count = getattr(t, "count", -1) + 1
    for model, optimizer in list(zip(t.models, t.optimizers, strict=True))[: 1 + t.count % 2]:
        t.backward(mse(model(x, "sum"), y))
        t.optimizer_step(optimizer)


def freeze_body(model):
    model.body.requires_grad_(False)


def freeze_some(model):
    model.body[0].bias.requires_grad_(False)
    model.second.requires_grad_(False)


def freeze_all(model):
    model.requires_grad_(False)


def unfreeze(model):
    model.requires_grad_(True)


def changed(model, how):
    if how:
        globals()[how](model)
    return model


# ----


class Trains(TrainingOperator):
    def setup(self, config):
        self.case = case = config["case"]
        models = [changed(Heads(), case.before) for _ in range(case.num_models)]
        self.models, self.optimizers = self.register(
            models=models, optimizers=list(map(globals()[case.optimizer], models)), **case.register
        )
        self.model, self.optimizer = self.models[0], self.optimizers[0]
        batch = BATCH // case.register.get("gradient_accumulation_steps", 1)
        self.register_data(train_loader=DataLoader(TensorDataset(*data()), batch_size=batch))
        for model in self.models:
            changed(model, case.after)

    def train_batch(self, batch, batch_info):
        globals()[self.case.step](self, *batch)
        return {"num_samples": len(batch[0])}

    def backward(self, loss, retain_graph=False):
        if self.case.raw or retain_graph:
            loss.backward(retain_graph=retain_graph)
        else:
            super().backward(loss)

    def optimizer_step(self, optimizer):
        if self.case.raw:
            optimizer.step()
            optimizer.zero_grad()
        else:
            super().optimizer_step(optimizer)


def run(case, rank):
    precision: dict[str, Any] = {"use_fp16": True, "amp_dtype": torch.float16}
    options = TorchOptions(
        training_operator_cls=Trains,
        config={"case": case},
        num_workers=NUM_WORKERS,
        use_gpu=False,
        guard=None,  # without a driver, nobody interrupts a worker that waits for a comparison
        **(precision if case.scaled else {}),
    )
    runner = TorchRunner(options)
    runner.setup(WorkerContext(world_rank=rank, world_size=NUM_WORKERS, distributed=True))
    before = parameters(runner.operator.models)
    try:
        runner.handle(TrainRequest(call=0, until_epoch=1, until_step=case.num_steps))
    except RuntimeError as error:
        return str(error), torch.equal(before, parameters(runner.operator.models))
    found = parameters(runner.operator.models)
    runner.teardown()
    return found


def parameters(models):
    return torch.cat([p.detach().reshape(-1) for model in models for p in model.parameters()])


def expected(case):
    """Return the parameters of plain PyTorch in one process with the global batch."""
    models = [changed(changed(Heads(), case.before), case.after) for _ in range(case.num_models)]
    optimizers = list(map(globals()[case.optimizer], models))

    def backward(loss, retain_graph=False):
        loss.backward(retain_graph=retain_graph)

    def step(optimizer):
        if norm := case.register.get("max_grad_norm"):
            torch.nn.utils.clip_grad_norm_(models[0].parameters(), norm)
        optimizer.step()
        optimizer.zero_grad()

    t = SimpleNamespace(
        models=models,
        model=models[0],
        optimizers=optimizers,
        optimizer=optimizers[0],
        backward=backward,
        optimizer_step=step,
    )
    for batch in zip(*(each.split(BATCH * NUM_WORKERS) for each in data()), strict=True):
        globals()[case.step](t, *batch)
    return parameters(models)
