"""Gradients are averaged when the optimizer steps, whatever produced them."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from raysgd import Guard, TrainingOperator
from raysgd.loop.requests import TrainRequest
from tests.unit.torch import cases
from tests.unit.torch.cases import FLOAT16

NUM_WORKERS = 2
BATCH = 4
NUM_STEPS = 3


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
        return getattr(self, which)(h)

    def energy(self, x):
        return self.body(x).square().mean()


def seeded():
    return torch.Generator().manual_seed(0)


def data():
    x = torch.randn(BATCH * NUM_WORKERS * NUM_STEPS, 3, dtype=torch.float64, generator=seeded())
    return x, x.sum(1, keepdim=True)


def mse(output, y):
    return (output - y).square().mean()


def with_complex(model):
    model.second = torch.nn.Linear(5, 1, dtype=torch.cdouble)
    model.second.register_forward_pre_hook(lambda _, inputs: inputs[0].cdouble())
    model.second.register_forward_hook(lambda *arguments: arguments[-1].abs())
    return torch.optim.SGD(model.parameters(), lr=0.1)


def with_sparse(model):
    trained = model.second.weight.requires_grad
    model.second = torch.nn.Embedding(3, 1, sparse=True).double().requires_grad_(trained)
    model.second.register_forward_pre_hook(lambda _, inputs: (inputs[0][:, 0].long() % 3,))
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.3, eps=1e-3)


def searching(model):
    return torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")


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


# ---- steps: `t` is an operator, or stands for it in one process. A step returns its losses, or
# None if it makes the update itself


def one_forward(t, x, y):
    first, rest = t.model(x)
    return [mse(first, y) + mse(rest["second"], y)]


def two_forwards(t, x, y):
    a, b = t.model(x, "sum"), t.model(x * 0.5, "sum")
    return [mse(a, y), mse(b, y)]


def two_heads(t, x, y):
    a, b = t.model(x, "first"), t.model(x, "second")
    return [mse(a, y), mse(b, -y)]


def task_by_task(t, x, y):
    first, rest = t.model(x)
    t.backward(mse(first, y), retain_graph=True)
    return [mse(rest["second"], -y)]


def retained(t, x, y):
    loss = mse(t.model(x, "sum"), y)
    loss.backward(retain_graph=True)
    loss.backward()
    return []


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
    return []


def own_gradients(t, x, y):
    loss = mse(t.model(x, "sum"), y)
    trained = list(t.model.parameters())
    for p, g in zip(trained, torch.autograd.grad(loss, trained), strict=True):
        p.grad = g
    return []


def penalty(t, x, y):
    """Add a gradient penalty, whose inner pass computes no gradients of parameters."""
    x = x.clone().requires_grad_()
    output = t.model(x, "sum")
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return [mse(output, y) + (slope.norm(dim=1) - 1).square().mean()]


def other_method(t, x, y):
    yield mse(t.model(x, "sum"), y)
    yield t.model.energy(x)


def clips_by_hand(t, x, y):
    a, b = t.model(x, "sum"), t.model(x * 0.5, "sum")
    a.mean().backward()
    b.square().mean().backward()
    torch.nn.utils.clip_grad_norm_(t.model.parameters(), 0.1)
    return []


def one_head(t, x, y):
    """Leave the second head without gradients on all workers."""
    return [mse(t.model(x, "first"), y)]


def heads_of_objects(t, x, y):
    a, b = t.model(x, "object"), t.model(2 * x, "object")
    return [mse(a.first, y), mse(b.second, -y)]


def heads_by_data(t, x, y):
    """Use the second head for some samples, which not all workers have in each step."""
    large = y[:, 0] > 0.8
    loss = mse(t.model(x)[0], y)
    if large.any():
        output = t.model(x[large], "object").second
        loss = loss + (output - y[large]).square().sum() / len(x)
    return [loss]


def one_or_the_other(t, x, y):
    """Use one head or the other, depending on the worker. The mean over both is the loss."""
    rank = getattr(t, "world_rank", None)
    halves = (
        [(x, y, rank)]
        if rank is not None
        else [(x[:BATCH], y[:BATCH], 0), (x[BATCH:], y[BATCH:], 1)]
    )
    losses = [mse(t.model(a, ["first", "second"][which]), b) for a, b, which in halves]
    return [sum(losses) / len(losses)]


def closure(t, x, y, returns=False):
    def evaluate():
        t.optimizer.zero_grad()
        losses = [mse(output, y) for output in (t.model(x, "sum"), t.model(x * 0.5, "sum"))]
        for loss in losses[: 1 if returns else 2]:
            loss.backward()
        return losses[0] if returns else None

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
    return [mse(t.model(2 * x, "sum"), y)]


def discards(t, x, y):
    """Zero the gradients of a first loss, as for a loss that is only logged."""
    mse(t.model(x, "second"), y).backward()
    t.optimizer.zero_grad()
    return [mse(t.model(x, "first"), y)]


def keeps_zeros(t, x, y):
    """Zero gradients in place, so that later losses add to tensors of zeros."""
    for p in t.model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad.zero_()
    return heads_by_data(t, x, y)


def forward_only(t, x, y):
    """Run a forward pass whose output no loss uses."""
    t.model(x, "second")
    t.backward(mse(t.model(x, "first"), y))
    t.model(x, "sum")
    return []


def skips(t, x, y, at=1, ranks=(1,), runs=False):
    """Skip a batch on some workers, as after a loss that is NaN."""
    if t.global_step != at or getattr(t, "world_rank", 0) not in ranks:
        return one_forward(t, x, y)
    if runs:
        t.model(x)
    return None


def in_turn(t, x, y, at=None, skipped=None):
    """Train several models. One worker may skip a model in one batch."""
    for number, (model, optimizer) in enumerate(zip(t.models, t.optimizers, strict=True)):
        if (t.global_step, number) != (at, skipped) or getattr(t, "world_rank", 0) == 0:
            t.backward(mse(model(x, "first"), y))
            t.optimizer_step(optimizer)


def second_model_rarely(t, x, y):
    """Train the second model in every other batch, on all workers."""
    for model, optimizer in list(zip(t.models, t.optimizers, strict=True))[: 1 + t.global_step % 2]:
        t.backward(mse(model(x, "sum"), y))
        t.optimizer_step(optimizer)


# ---- an operator, and plain PyTorch in one process


class Trains(TrainingOperator):
    def setup(self, config):
        self.case = case = config["case"]
        models = case.make_models()
        self.models, self.optimizers = self.register(
            models=models, optimizers=list(map(case.optimizer, models)), **case.register
        )
        self.model, self.optimizer = self.models[0], self.optimizers[0]
        batch = BATCH // case.register.get("gradient_accumulation_steps", 1)
        self.register_data(train_loader=DataLoader(TensorDataset(*data()), batch_size=batch))
        case.change(self.models, case.after)

    def train_batch(self, batch, batch_info):
        self.case.train(self, *batch)
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


class Plain:
    """Stands for an operator in one process."""

    def __init__(self, case):
        self.case, self.models, self.global_step = case, case.make_models(), 0
        case.change(self.models, case.after)
        self.optimizers = list(map(case.optimizer, self.models))
        self.model, self.optimizer = self.models[0], self.optimizers[0]

    def backward(self, loss, retain_graph=False):
        loss.backward(retain_graph=retain_graph)

    def optimizer_step(self, optimizer):
        if norm := self.case.register.get("max_grad_norm"):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), norm)
        optimizer.step()
        optimizer.zero_grad()


@dataclass
class Case(cases.Case):
    """A step, and the settings of its operator."""

    step: Any
    """A function, or an expression."""
    raw: bool = False
    """Whether the step calls ``loss.backward()`` and ``optimizer.step()``."""
    before: tuple[str, bool] | None = None
    """Prefixes of parameters, and whether these are trained, before `register`."""
    after: tuple[str, bool] | None = None
    """The same after `register`."""
    optimizer: Callable[..., torch.optim.Optimizer] = adam
    num_models: int = 1
    num_steps: int | None = None
    """None for the epoch."""

    operator_cls = Trains

    def make_models(self):
        models = [Heads() for _ in range(self.num_models)]
        self.change(models, self.before)
        return models

    def change(self, models, change):
        for model in models if change else ():
            prefixes, is_trained = change
            for name, parameter in getattr(model, "module", model).named_parameters():
                if name.startswith(tuple(prefixes.split(" "))):
                    parameter.requires_grad_(is_trained)

    def train(self, t, x, y):
        given = {"t": t, "x": x, "y": y}
        losses = (
            eval(self.step, globals(), given) if isinstance(self.step, str) else self.step(**given)
        )
        for loss in losses or ():
            t.backward(loss)
        if losses is not None:
            t.optimizer_step(t.optimizer)

    def run(self, rank):
        # without a driver, no process interrupts a worker that waits for a comparison of the guard
        self.settings = {"guard": None, **self.settings}
        runner = self.start(rank)
        before = parameters(runner.operator)
        try:
            runner.handle(TrainRequest(call_number=0, until_epoch=1, until_step=self.num_steps))
        except RuntimeError as error:
            return str(error), torch.equal(before, parameters(runner.operator))
        found = parameters(runner.operator)
        runner.teardown()
        return found

    def expected(self):
        """Return the parameters of plain PyTorch in one process with the global batch."""
        t = Plain(self)
        for batch in zip(*(each.split(BATCH * NUM_WORKERS) for each in data()), strict=True):
            self.train(t, *batch)
            t.global_step += 1
        return parameters(t)


def parameters(t):
    return torch.cat([p.detach().reshape(-1) for model in t.models for p in model.parameters()])


@pytest.mark.parametrize(
    "case",
    [
        Case(one_forward),
        Case(two_forwards),
        Case(two_forwards, raw=True),
        Case(two_forwards, settings=FLOAT16),
        Case(two_forwards, register={"max_grad_norm": 0.1}),
        Case(two_forwards, register={"sharding": "optimizer"}),
        Case(two_forwards, register={"gradient_accumulation_steps": 2}),
        Case(two_heads),
        Case(two_heads, raw=True),
        Case(task_by_task),
        Case(retained, raw=True),
        Case(surgery),
        Case(own_gradients),
        Case(own_gradients, raw=True),
        Case(penalty),
        Case(other_method),
        Case("[t.model.energy(x)]"),
        Case("[mse(t.model(x, 'sum'), y) + t.model.energy(x)]"),
        Case(clips_by_hand),
        Case(closure),
        Case("closure(t, x, y, returns=True)", optimizer=searching),
        Case(sharpness, optimizer=Sharpness),
        Case(without_sync),
        Case(discards),
        Case(keeps_zeros),
        Case(forward_only),
        Case(one_head, register={"ddp_args": {"find_unused_parameters": True}}),
        Case(heads_by_data, register={"ddp_args": {"gradient_as_bucket_view": True}}),
        Case(two_heads, register={"ddp_args": {"gradient_as_bucket_view": True}}),
        Case(two_forwards, register={"ddp_args": {"bucket_cap_mb": 1e-5}}),
        Case(one_head, register={"ddp_args": {"bucket_cap_mb": 1e-5}}),
        Case(own_gradients, register={"sharding": "optimizer", "max_grad_norm": 0.1}),
        Case(heads_by_data, register={"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}),
        Case("skips(t, x, y, ranks=(0, 1))"),
        Case("skips(t, x, y, at=0, ranks=(0, 1), runs=True)"),
        Case(second_model_rarely, num_models=2),
        Case(one_head),
        Case(one_head, raw=True),
        Case(one_head, register={"gradient_accumulation_steps": 2}),
        Case("[mse(t.model(x, 'object').first, y)]"),
        Case("[mse(t.model(x, 'object').first, y)]", register={"gradient_accumulation_steps": 2}),
        Case("[mse(t.model(x, 'checkpointed').first, y)]"),
        Case(heads_of_objects, raw=True),
        Case(heads_by_data),
        Case(one_or_the_other),
        Case(one_or_the_other, optimizer=with_complex),
        Case(one_or_the_other, optimizer=with_sparse),
        Case(one_head, after=("body", False)),
        Case(one_forward, after=("body", False)),
        Case(two_heads, after=("body.0.bias second", False), raw=True),
        Case(one_forward, register={"sharding": "optimizer"}, after=("body.0.bias second", False)),
        Case(one_forward, before=("body.0.bias second", False), after=("", True)),
        Case(two_heads, before=("body", False), after=("", True)),
        Case(two_forwards, before=("", False), after=("", True)),
        Case(heads_by_data, optimizer=with_sparse, before=("second", False), after=("", True)),
    ],
    ids=str,
)
def test_update_equals_that_of_one_process(workers, case):
    compared = {"guard": Guard(every=1), **case.settings}
    first, second = workers(replace(case, settings=compared))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, case.expected(), atol=1e-14, rtol=1e-13)


@pytest.mark.parametrize(
    ("step", "num_models", "at"),
    [(partial(skips, at=0), 1, 1), (skips, 1, 2), (partial(skips, runs=True), 1, 2)]
    + [(partial(in_turn, at=1, skipped=each), 2, 2) for each in (0, 1)],
)
def test_what_one_worker_skips_is_an_error_in_that_step(workers, step, num_models, at):
    _, (message, is_unchanged) = workers(Case(step, num_models=num_models, num_steps=at))
    assert "self.backward(loss, num_items=0)" in message
    assert is_unchanged == (at == 1)


@pytest.mark.parametrize("step", [task_by_task, surgery, own_gradients, without_sync, None])
def test_gradients_without_their_scale_are_an_error(workers, step):
    case = Case(task_by_task, register={"gradient_accumulation_steps": 2})
    for message, is_unchanged in workers(Case(step, settings=FLOAT16) if step else case):
        assert ("native AMP" if step else "Accumulation scales") in message
        assert "self.backward(loss)" in message
        assert is_unchanged


def test_step_within_a_backward_pass_is_an_error(workers):
    for message, is_unchanged in workers(Case(steps_in_hook)):
        assert "step() runs within a backward pass" in message
        assert is_unchanged
