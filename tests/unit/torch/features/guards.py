"""Replicas that differ, and legitimate operators whose replicas stay equal, on three workers."""

import contextlib
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TrainingOperator
from raysgd._internal.context import WorkerContext
from raysgd.errors import ReplicasDifferError
from raysgd.loop.requests import (
    ApplyOperatorRequest,
    RngStateRequest,
    TrainRequest,
    ValidateRequest,
)
from raysgd.loop.signal import StepInterruptedError
from raysgd.torch import collectives
from raysgd.torch.collectives import fingerprint
from raysgd.torch.ddp import plain
from raysgd.torch.features.guard import ReplicaGuard
from raysgd.torch.options import TorchOptions
from raysgd.torch.runner import TorchRunner

NUM_WORKERS = 3
BATCH = 4
ODD = 1
"""The rank that differs."""


@dataclass
class Case:
    """A change of an operator, by its name in this module, and when and by which workers."""

    change: str = ""
    when: str = "between calls"
    """Or "in a step", "in setup", "in a join", "before a loss", "with a late report"."""
    ranks: tuple[int, ...] = (ODD,)
    guard: Any = "check"
    settings: dict[str, Any] = field(default_factory=dict)
    register: dict[str, Any] = field(default_factory=dict)
    step: str = "default"
    model: str = "Net"
    wrap: str = ""

    def __str__(self):
        shown = (each for each in vars(self).values() if each not in ("check", "default", "Net"))
        return " ".join(str(each) for each in shown if each and each != (ODD,))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Dropout(0.1)
        )
        self.head = torch.nn.Linear(5, 1)

    def forward(self, x):
        return self.head(self.body(x))


class Caching(Net):
    """Keeps the newest batch of the worker, and sums up all inputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("newest", None, persistent=False)
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x):
        self.newest = x.clone()
        with torch.no_grad():
            self.total += x.sum(0)
        return super().forward(x + 0.001 * self.total)


class Monitored(Net):
    """Has a hook that notes a number on a layer."""

    def __init__(self):
        super().__init__()
        self.head.register_forward_hook(
            lambda head, _, output: setattr(head, "norm", float(output.norm()))
        )


class Bounded(Net):
    """Renormalizes the rows of its embedding that a batch uses."""

    def __init__(self):
        super().__init__()
        self.rows = torch.nn.Embedding(50, 3, max_norm=0.5)

    def forward(self, x):
        return super().forward(x + self.rows((x[:, 0].abs() * 20).long().clamp(max=49)))


class Normalized(Net):
    """Normalizes with statistics that PyTorch changes without their versions."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))

    def forward(self, x):
        x = torch.nn.functional.batch_norm(x, self.mean, self.var, training=self.training)
        return super().forward(x)


class Viewed(Net):
    """Has parameters and buffers that are views of complex numbers."""

    def __init__(self):
        super().__init__()
        numbers = torch.arange(6.0).view(2, 3).to(torch.complex64)
        self.factor = torch.nn.Parameter(numbers[0])
        # DistributedDataParallel sends the only tensor of a type without a copy.
        self.register_buffer("conjugate", numbers[0].to(torch.complex128).conj())
        self.register_buffer("imaginary", numbers[1].conj().imag)
        self.register_buffer("column", numbers.real[:, 1])
        self.register_buffer("element", numbers.real[1:, 1])

    def forward(self, x):
        return super().forward(x + (self.factor * self.conjugate).real.float() + self.imaginary)


class Large(Net):
    """Has a parameter that a comparison after a short call does not read completely."""

    def __init__(self):
        super().__init__()
        self.large = torch.nn.Parameter(torch.zeros(20_000))

    def forward(self, x):
        return super().forward(x + self.large.sum())


class Sparse(Net):
    """Has a sparse buffer with more elements than a comparison after a short call reads."""

    def __init__(self):
        super().__init__()
        self.register_buffer("links", torch.eye(100).to_sparse_csr())

    def forward(self, x):
        return super().forward(x * (self.links @ torch.ones(100, 1))[:3, 0])


class Broken(Net):
    """Computes with an error of one unit in the last place on one worker."""

    def forward(self, x):
        output = super().forward(x)
        if dist.get_rank() == ODD:
            output = output * (1 + torch.finfo(output.dtype).eps)
        return output


# ---- changes: `t` is an operator


def flip(tensor, bit=20):
    """Flip one bit, without PyTorch noticing it."""
    content = tensor.detach().numpy().reshape(-1).view("u1")
    content[bit // 8] ^= 1 << bit % 8


def weights(t):
    return t.model.head.weight


def initializes(t):
    torch.nn.init.normal_(t.model.body[0].weight)


def adds_noise(t):
    with torch.no_grad():
        for parameter in t.model.parameters():
            parameter += 1e-6 * torch.randn_like(parameter)


def sets_data(t):
    t.model.head.weight.data = t.model.head.weight.data * 1.01


def flips_parameter(t):
    flip(weights(t))


def flips_end(t):
    flip(t.model.large, 32 * 19_999)


def flips_sign_bits(t):
    """Negate two elements, whose highest bits would cancel in a sum."""
    weights(t).data[0, :4].neg_()


def swaps_elements(t):
    first, second = weights(t).data[0, :2].tolist()
    weights(t).data[0, :2] = torch.tensor([second, first])


def flips_state(t):
    flip(t.optimizer.state[weights(t)]["exp_avg"])


def flips_count(t):
    flip(t.optimizer.state[weights(t)]["step"])


def flips_teacher(t):
    flip(t.teacher.head.weight)


def flips_buffer(t):
    flip(t.teacher.table)


def sets_buffer(t):
    t.teacher.table.data[0] = 7.0


def flips_averages(t):
    flip(t._train_state.averaging.averages[0]["head.weight"])


def clears_state(t):
    t.optimizer.state.clear()


def scales_state(t):
    for state in t.optimizer.state.values():
        state["exp_avg_sq"].data.mul_(2)


def sets_own_buffer(t):
    t.model.mean.data[0] = 7.0


def weighs_classes(t):
    t.criterion.weight = torch.tensor([1.0, 2.0])


def turns_factor(t):
    t.model.factor.data.mul_(1j)


def sets_rate(t):
    t.optimizer.param_groups[0]["lr"] = 0.2


def sets_decay(t):
    t.optimizer.param_groups[0]["weight_decay"] = 0.5


def steps_scheduler(t):
    t.scheduler.last_epoch += 1


def freezes(t):
    t.model.head.requires_grad_(False)


def evaluates(t):
    t.model.body[2].eval()


def sets_dropout(t):
    t.model.body[2].p = 0.5


def sets_scale(t):
    t._train_state.optimization.precision.scaler.update(1024.0)


def changes_gradients(t):
    """Change the averaged gradients through ``data``, which PyTorch does not count."""
    for parameter in t.model.parameters():
        parameter.grad.data.mul_(1.5)


def replaces_head(t):
    t.model.head = torch.nn.Linear(5, 1)


def deletes_head(t):
    """Replace the head by a module that may have the address of the old one."""
    del t.model.module.head
    t.model.head = torch.nn.Linear(5, 1)


def adds_module(t):
    t.model.body.append(torch.nn.Linear(5, 5))


def adds_parameter(t):
    t.model.body[0].scale = torch.nn.Parameter(torch.ones(5))


def casts(t):
    t.model.head.double()


def parametrizes(t):
    torch.nn.utils.parametrize.register_parametrization(
        plain(t.model).head, "weight", torch.nn.Identity()
    )


def adds_group(t):
    t.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(5))]})


def tags(t):
    t.tag = t.world_rank


def skips_update(t):
    """Skip the update of one step, see `default`."""


def compiled(model):
    return torch.compile(model, backend="eager")


def replicated(model):
    return torch.nn.parallel.DistributedDataParallel(model)


# ---- steps


def default(t, x, y):
    loss = (t.model(x) - y).square().mean()
    t.backward(loss)
    if t.is_changing and t.case.change == "changes_gradients":
        changes_gradients(t)
    if not (t.is_changing and t.case.change == "skips_update"):
        t.optimizer_step(t.optimizer)


def adversarial(t, x, y):
    """Train two models with an optimizer each."""
    t.backward((t.teacher(x) - t.model(x).detach()).square().mean())
    t.optimizer_step(t.other)
    t.backward((t.model(x) - y).square().mean() - 0.1 * t.teacher(x).mean())
    t.optimizer_step(t.optimizer)


def own_averages(t, x, y):
    """Average the gradients without raysgd."""
    (t.model(x) - y).square().mean().backward()
    for parameter in t.model.parameters():
        dist.all_reduce(parameter.grad)
    t.optimizer.step()
    t.optimizer.zero_grad()


def raw(t, x, y):
    (t.model(x) - y).square().mean().backward()
    t.optimizer.step()
    t.optimizer.zero_grad()


def noisy(t, x, y):
    default(t, x + torch.randn_like(x), y)


def head_by_data(t, x, y):
    """Use the head only for some samples, whose state of the optimizer starts late."""
    output = t.model.body(x).mean(1, keepdim=True)
    if t.global_step > 2 and t.world_rank == 0:
        output = output + t.model.head(t.model.body(x))
    t.backward((output - y).square().mean())
    t.optimizer_step(t.optimizer)


def overflows(t, x, y):
    loss = (t.model(x) - y).square().mean()
    t.backward(loss * (1e38 if t.global_step == 2 and t.world_rank == 0 else 1.0))
    t.optimizer_step(t.optimizer)


def closure(t, x, y):
    def evaluate():
        t.optimizer.zero_grad()
        loss = (t.model(x) - y).square().mean()
        loss.backward()
        return loss

    t.optimizer.step(evaluate)


def averages(t):
    t._train_state.averaging.start(0.9, 1)


# ----


class Trains(TrainingOperator):
    def setup(self, config):
        self.case = case = config["case"]
        torch.manual_seed(0)
        model = globals()[case.model]()
        self.teacher = Sparse() if case.model == "Sparse" else Net()
        self.teacher.register_buffer("table", torch.arange(4.0))
        if case.step != "adversarial":
            self.teacher.requires_grad_(False)
        if case.step == "closure":
            optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        optimizers = [optimizer]
        if case.step == "adversarial":
            optimizers.append(torch.optim.SGD(self.teacher.parameters(), lr=0.01))
        if case.wrap:
            model = globals()[case.wrap](model)
        criterion = torch.nn.CrossEntropyLoss(torch.ones(2))
        models, (self.optimizer, *others), self.criterion, _ = self.register(
            models=[model, self.teacher],
            optimizers=optimizers,
            criterion=criterion,
            schedulers=self.scheduler,
            **case.register,
        )
        self.model, self.teacher = models
        self.other = others[0] if others else None
        x = torch.randn(BATCH * NUM_WORKERS * 8, 3)
        loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=BATCH)
        self.register_data(train_loader=loader, validation_loader=loader)
        torch.manual_seed(self.world_rank)
        self.is_changing = False
        if case.when == "in setup":
            self.maybe_change()

    def on_world_change(self):
        if self.case.when == "in a join" and self.global_step:
            self.maybe_change()

    def maybe_change(self):
        if self.case.change and self.world_rank in self.case.ranks:
            globals()[self.case.change](self)

    def train_batch(self, batch, batch_info):
        is_time = self.case.when == "in a step" and self.global_step == 3
        self.is_changing = is_time and self.world_rank in self.case.ranks
        globals()[self.case.step](self, *batch)
        if is_time and self.case.change != "changes_gradients":
            self.maybe_change()
        return {"num_samples": len(batch[0])}

    def validate_batch(self, batch, batch_info):
        x, y = batch
        return {"val_loss": (self.model(x) - y).square().mean().item(), "num_samples": len(x)}


@contextlib.contextmanager
def interrupted():
    """Interrupt the report of a difference."""

    def interrupt(*_):
        raise StepInterruptedError

    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.suppress(StepInterruptedError),
    ):
        patch.setattr(collectives, "broadcast_object", interrupt)
        yield


@contextlib.contextmanager
def late_report(rank):
    """Let `ODD` get the last report when the others end theirs. It fails if they have raised."""
    store = dist.distributed_c10d._get_default_store()
    broadcast, handle = collectives.broadcast_object, ReplicaGuard._handle

    def late_broadcast(thing, source):
        result = broadcast(thing, source)
        if source == NUM_WORKERS - 1:
            store.wait(["ended"])
            assert not store.check(["raised"])
        return result

    def watched_handle(guard, *arguments):
        with pytest.MonkeyPatch.context() as patch:
            minimum = collectives.minimum
            patch.setattr(collectives, "minimum", lambda *a: store.set("ended", "") or minimum(*a))
            try:
                handle(guard, *arguments)
            finally:
                store.set("raised", "")
                store.set("ended", "")

    with pytest.MonkeyPatch.context() as patch:
        if rank == ODD:
            patch.setattr(collectives, "broadcast_object", late_broadcast)
        else:
            patch.setattr(ReplicaGuard, "_handle", watched_handle)
        yield


def run(case, rank):
    """Return the error, the committed steps, the repair, and a parameter."""
    options = TorchOptions(
        training_operator_cls=Trains,
        config={"case": case},
        num_workers=NUM_WORKERS,
        scheduler_step_freq="batch",
        use_gpu=False,
        guard=case.guard,
        **case.settings,
    )
    runner = TorchRunner(options)
    torch.manual_seed(rank)
    context = WorkerContext(world_rank=rank, world_size=NUM_WORKERS, distributed=True)
    try:
        runner.setup(context)
    except ValueError as error:
        return {"problem": str(error)}
    if case.change == "flips_averages":
        runner.handle(ApplyOperatorRequest(function=averages))
    problem, error = "", None
    try:
        runner.handle(TrainRequest(call=0, until_step=2, until_epoch=99))
        if case.when == "between calls":
            runner.handle(ApplyOperatorRequest(function=Trains.maybe_change))
        elif case.when == "with a late report":
            runner.handle(ApplyOperatorRequest(function=Trains.maybe_change))
            with late_report(rank):
                runner.handle(TrainRequest(call=1, until_step=6, until_epoch=99))
        elif case.when == "before a loss":
            runner.handle(ApplyOperatorRequest(function=Trains.maybe_change))
            with interrupted():  # the driver has the error of another worker
                runner.handle(RngStateRequest())
            runner.rejoin(context, 0)
        elif case.when == "in a join":
            for feature in runner.operator._train_state.features:
                if rank in case.ranks and isinstance(feature, ReplicaGuard):
                    feature._equal_at = 0  # as in a new process
            runner.rejoin(context, 0)
        if case.when not in ("in a join", "before a loss"):
            runner.handle(ValidateRequest(call=1))
        if case.when != "before a loss" or rank == 0:  # rank 0 raises before it waits for others
            runner.handle(TrainRequest(call=2, until_step=6, until_epoch=99))
            runner.handle(TrainRequest(call=3, until_step=10, until_epoch=99))
            runner.handle(RngStateRequest())
    except (ReplicasDifferError, RuntimeError) as found:
        problem, error = str(found), found
    result = {
        "problem": problem,
        "kind": type(error).__name__,
        "ranks": getattr(error, "ranks", ()),
        "step": runner.operator.global_step,
        "repaired": runner.progress().repaired,
        "weight": plain(runner.operator.model).head.weight.detach().clone(),
        "state": fingerprint(runner.operator._train_state.training_state()),
        "random": torch.rand(1).item(),
    }
    runner.teardown()
    return result
