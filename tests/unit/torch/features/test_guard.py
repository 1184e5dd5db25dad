"""Workers compare their replicas, and report a difference. Legitimate operators train."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from raysgd import Guard, TrainingOperator
from raysgd._internal import step_timing
from raysgd._internal.runner import WorkerContext
from raysgd._internal.step_timing import FORWARD
from raysgd.errors import ReplicasDifferError
from raysgd.loop.loop_control import StepInterruptedError
from raysgd.loop.requests import (
    ApplyOperatorRequest,
    PrepareExportRequest,
    TrainRequest,
    ValidateRequest,
)
from raysgd.torch.collectives import TorchCollectives
from raysgd.torch.features.guard import ReplicaGuard
from raysgd.torch.modules import user_module
from tests.conftest import needs_full_sharding
from tests.operators import on_gpu, set_sync_mode
from tests.unit.torch import cases
from tests.unit.torch.cases import FLOAT16

NUM_WORKERS = 3
BATCH = 4
ODD = 1
"""The rank that differs."""


def guard_of(state):
    return next(each for each in state.features if isinstance(each, ReplicaGuard))


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
        self.large = torch.nn.Parameter(torch.ones(20_000))

    def forward(self, x):
        return super().forward(x) + self.large.mean()


class Sparse(Net):
    """Has a sparse buffer with more elements than a comparison after a short call reads."""

    def __init__(self):
        super().__init__()
        self.register_buffer("links", torch.eye(100).to_sparse_csr())

    def forward(self, x):
        return super().forward(x * (self.links @ torch.ones(100, 1))[:3, 0])


# ---- steps: `t` is an operator


def flip(tensor, bit=20):
    """Flip one bit, without PyTorch noticing it."""
    content = tensor.detach().numpy().reshape(-1).view("u1")
    content[bit // 8] ^= 1 << bit % 8


def state(t):
    return t.optimizer.state[t.model.head.weight]


def squares(t, x, y):
    return (t.model(x) - y).square().mean()


def default(t, x, y):
    t.backward(squares(t, x, y))
    t.maybe_change("before the update")
    t.optimizer_step(t.optimizer)


def adversarial(t, x, y):
    """Train two models with an optimizer each."""
    t.backward((t.teacher(x) - t.model(x).detach()).square().mean())
    t.optimizer_step(t.other)
    t.backward(squares(t, x, y) - 0.1 * t.teacher(x).mean())
    t.optimizer_step(t.optimizer)


def own_averages(t, x, y):
    """Average the gradients without raysgd."""
    squares(t, x, y).backward()
    for parameter in t.model.parameters():
        dist.all_reduce(parameter.grad)
    t.optimizer.step()
    t.optimizer.zero_grad()


def noisy(t, x, y):
    default(t, x + torch.randn_like(x), y)


def overflows(t, x, y):
    is_time = t.global_step == 2 and t.world_rank == 0
    t.backward(squares(t, x, y) * (1e38 if is_time else 1.0))
    t.optimizer_step(t.optimizer)


class Trains(TrainingOperator):
    def setup(self, config):
        self.case = case = config["case"]
        torch.manual_seed(0)
        model = case.model()
        self.teacher = Sparse() if case.model is Sparse else Net()
        self.teacher.register_buffer("table", torch.arange(4.0))
        if case.step is not adversarial:
            self.teacher.requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        optimizers = [optimizer]
        if case.step is adversarial:
            optimizers.append(torch.optim.SGD(self.teacher.parameters(), lr=0.01))
        (self.model, self.teacher), (self.optimizer, *others), self.criterion, _ = self.register(
            models=[case.wrap(model) if case.wrap else model, self.teacher],
            optimizers=optimizers,
            criterion=torch.nn.CrossEntropyLoss(torch.ones(2)),
            schedulers=self.scheduler,
            **case.register,
        )
        self.other = others[0] if others else None
        x = torch.randn(BATCH * NUM_WORKERS * 8, 3)
        loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=BATCH)
        self.register_data(train_loader=loader, validation_loader=loader)
        torch.manual_seed(self.world_rank)

    def on_world_change(self):
        if self.global_step:
            self.maybe_change("in a join")

    def maybe_change(self, when):
        case = self.case
        is_time = self.global_step == 3 or when not in ("before the update", "in a step")
        if case.when == when and is_time and self.world_rank in case.ranks:
            model, (group,) = self.model, self.optimizer.param_groups
            weight = user_module(model).head.weight
            given = {"t": self, "model": model, "weight": weight, "group": group}
            exec(case.change, globals() | given | {"parameters": [*model.parameters()]})

    def train_batch(self, batch, batch_info):
        self.case.step(self, *batch)
        self.maybe_change("in a step")
        return {"num_samples": len(batch[0])}

    def validate_batch(self, batch, batch_info):
        return {"val_loss": squares(self, *batch).item(), "num_samples": len(batch[0])}


@dataclass
class Case(cases.Case):
    """A change of an operator `t`, when it happens, and on which workers."""

    change: str = ""
    when: str = "between calls"
    """Or "before the update", "in a step", "in a join", "before a loss", "with a late report"."""
    ranks: tuple[int, ...] = (ODD,)
    guard: Any = "check"
    step: Callable[..., None] = default
    model: type[torch.nn.Module] = Net
    wrap: Any = None
    averaged: bool = False
    num_workers: int = field(default=NUM_WORKERS, kw_only=True)

    operator_cls = Trains

    def run(self, rank):
        """Return the error, the committed steps, and a parameter."""
        torch.manual_seed(rank)
        options = {"scheduler_step_freq": "batch", "guard": self.guard}
        runner, context = self.make_runner(**options), self.context(rank)
        runner.setup(context)
        operator = runner.operator
        assert operator._train_state.data.seed == 0  # of rank 0

        def train(until_step):
            goal = {"until_step": until_step, "until_epoch": 99}
            runner.handle(TrainRequest(call_number=until_step, **goal))

        if self.averaged:
            operator._update_features.averaging.start(0.9, 1)
        problem, error = "", None
        try:
            train(2)
            if self.when in ("between calls", "before a loss", "with a late report"):
                change = partial(Trains.maybe_change, when=self.when)
                runner.handle(ApplyOperatorRequest(function=change))
            if self.when == "with a late report":
                with late_report(rank):
                    train(6)
            elif self.when == "before a loss":
                with interrupted():  # the driver has the error of another worker
                    runner.handle(PrepareExportRequest())
                runner.rejoin(context, 0)
            elif self.when == "in a join":
                if rank in self.ranks:
                    guard_of(operator._train_state)._equal_step = 0  # a new process
                runner.rejoin(context, 0)
            else:
                runner.handle(ValidateRequest(call_number=1))
            if self.when != "before a loss" or rank == 0:  # it raises before it waits for others
                train(6)
                train(10)
                runner.handle(PrepareExportRequest())
        except (ReplicasDifferError, RuntimeError) as found:
            problem, error = str(found), found
        result = {
            "problem": problem,
            "ranks": getattr(error, "ranks", ()),
            "step": operator.global_step,
            "weight": user_module(operator.model).head.weight.detach().clone(),
        }
        runner.teardown()
        return result


@contextlib.contextmanager
def interrupted():
    """Interrupt the report of a difference."""

    def interrupt(*_):
        raise StepInterruptedError

    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.suppress(StepInterruptedError),
    ):
        patch.setattr(TorchCollectives, "broadcast", interrupt)
        yield


@contextlib.contextmanager
def late_report(rank):
    """Let `ODD` get the last report when the others end theirs. It fails if they have raised."""
    store = dist.distributed_c10d._get_default_store()
    broadcast, handle = TorchCollectives.broadcast, ReplicaGuard._report_difference

    def late_broadcast(group, make, source):
        result = broadcast(group, make, source)
        if source == NUM_WORKERS - 1:
            store.wait(["ended"])
            assert not store.check(["raised"])
        return result

    def watched_handle(guard, *arguments):
        with pytest.MonkeyPatch.context() as patch:
            low, ends = TorchCollectives.all_reduce_min, lambda: store.set("ended", "")
            patch.setattr(TorchCollectives, "all_reduce_min", lambda *a: ends() or low(*a))
            try:
                handle(guard, *arguments)
            finally:
                store.set("raised", "")
                store.set("ended", "")

    with pytest.MonkeyPatch.context() as patch:
        if rank == ODD:
            patch.setattr(TorchCollectives, "broadcast", late_broadcast)
        else:
            patch.setattr(ReplicaGuard, "_report_difference", watched_handle)
        yield


BEFORE = "before the update"
ADDS_NOISE = "torch.no_grad()(lambda: [p.add_(1e-6 * torch.randn_like(p)) for p in parameters])()"
SCALES_STATE = "[each['exp_avg_sq'].data.mul_(2) for each in t.optimizer.state.values()]"
SCALES_GRADIENTS = "[p.grad.data.mul_(1.5) for p in parameters]"  # keeps their versions
SKIPS_UPDATE = "t.optimizer_step = lambda optimizer: vars(t).pop('optimizer_step')"
FREEZES = "model.head.requires_grad_(False)"
REPLACES_HEAD = "model.head = torch.nn.Linear(5, 1)"
PARAMETRIZES = """from torch.nn.utils import parametrize
parametrize.register_parametrization(user_module(model).head, "weight", torch.nn.Identity())"""
SETS_DROPOUT = "model.body[2].p = 0.5"
DROPOUT = "models[0].body.2.p (0.1 on workers 0, 2, 0.5 on worker 1)"
SETS_RATE = "group['lr'] = 0.2"
FLIPS_AVERAGES = "flip(t._update_features.averaging.averages[0]['head.weight'])"
ADDS_GROUP = "t.optimizer.add_param_group({'params': [torch.nn.Parameter(torch.ones(5))]})"
RESCALES = "t._train_state.precision.scaler.update(1024.0)"
NEEDS = {
    "model.factor.data.mul_(1j)": {"model": Viewed},
    "model.mean.data[0] = 7.0": {"model": Normalized},
    FLIPS_AVERAGES: {"averaged": True},
    RESCALES: {"settings": FLOAT16},
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("torch.nn.init.normal_(model.body[0].weight)", "models[0].body.0.weight"),
        (ADDS_NOISE, "and 1 more"),
        ("weight.data = weight.data * 1.01", "models[0].head.weight"),
        ("flip(weight)", "models[0].head.weight"),
        # their highest bits would cancel in a sum
        ("weight.data[0, :4].neg_()", "models[0].head.weight"),
        ("weight.data[0, :2] = weight.data[0, [1, 0]]", "models[0].head.weight"),
        ("flip(state(t)['exp_avg'])", "optimizers[0].state[4]['exp_avg']"),
        ("flip(state(t)['step'])", "optimizers[0].state[4]['step']"),
        ("t.optimizer.state.clear()", "optimizers[0].state[0]['exp_avg']"),
        (SCALES_STATE, "optimizers[0].state[0]['exp_avg_sq']"),
        ("flip(t.teacher.head.weight)", "models[1].head.weight"),
        ("flip(t.teacher.table)", "models[1].table"),
        ("t.teacher.table.data[0] = 7.0", "models[1].table"),
        ("model.factor.data.mul_(1j)", "models[0].factor"),
        (FLIPS_AVERAGES, "averages[0]['head.weight']"),
        (SETS_RATE, "optimizers[0].param_groups[0]['lr']"),
        ("group['weight_decay'] = 0.5", "optimizers[0].param_groups[0]['weight_decay']"),
        ("t.scheduler.last_epoch += 1", "schedulers[0]['last_epoch']"),
        (FREEZES, "models[0].head.weight"),
        (PARAMETRIZES, "models[0].head.parametrizations.weight.original"),
        (RESCALES, "scaler[0]"),
    ],
)
def test_difference_is_an_error_before_the_next_step(workers, change, named):
    for result in workers(Case(change, **NEEDS.get(change, {}))):
        assert named in result["problem"]
        assert f"worker {ODD} and the majority differ in" in result["problem"]
        assert "They were equal after step 2" in result["problem"]
        assert result["ranks"] == (ODD,)
        assert result["step"] == 2


@pytest.mark.parametrize(
    ("change", "when", "named"),
    [
        (SCALES_GRADIENTS, BEFORE, "models[0].body.0.weight"),
        (SKIPS_UPDATE, BEFORE, "models[0].body.0.weight"),
        ("weight.data = weight.data * 1.01", "in a step", "models[0].head.weight"),
        ("flip(state(t)['exp_avg'])", "in a step", "optimizers[0].state[4]['exp_avg']"),
        (SETS_RATE, "in a step", "optimizers[0].param_groups[0]['lr']"),
    ],
)
@pytest.mark.parametrize("every", [500, 1])
def test_difference_within_a_call_is_an_error(workers, change, when, named, every):
    for result in workers(Case(change, when, guard=Guard(every=every))):
        assert named in result["problem"]
        assert result["step"] == (6 if every == 500 else 4)


@pytest.mark.parametrize(
    ("change", "when", "step"),
    [(SCALES_GRADIENTS, BEFORE, 6), ("flip(model.large, 32 * 19_999 + 20)", "in a step", 10)],
)
def test_difference_that_a_short_call_leaves_is_an_error_before_the_state_leaves(
    workers, change, when, step
):
    """A comparison after a short call reads a part of large tensors."""
    for result in workers(Case(change, when, model=Large)):
        assert "models[0].large" in result["problem"]
        assert result["step"] == step


def test_difference_without_a_report_is_an_error_after_a_loss(workers):
    """Otherwise, the worker that differs would silently take the state of the others."""
    leader, *_ = workers(Case("flip(weight)", "before a loss"))
    assert "the workers differ" in leader["problem"]
    assert leader["step"] == 2


@pytest.mark.parametrize(
    ("change", "when", "named", "step"),
    [
        ("flip(weight)", "in a join", "models[0].head.weight", 2),
        ("flip(state(t)['exp_avg'])", "in a join", "optimizers[0].state[4]['exp_avg']", 2),
        ("flip(t.teacher.table)", "in a join", "models[1].table", 2),
        ("model.mean.data[0] = 7.0", "in a join", "models[0].mean", 2),
        ("t.criterion.weight = torch.tensor([1.0, 2.0])", "in a join", "criteria[0]['weight']", 3),
        (SETS_DROPOUT, "in a join", DROPOUT, 3),
        (SETS_DROPOUT, "between calls", DROPOUT, 3),
        ("model.body[2].eval()", "in a step", "modes of models[0]", 4),
    ],
)
def test_worker_that_joins_with_a_difference_is_an_error(workers, change, when, named, step):
    guard = Guard(every=1) if step == 4 else "check"
    for result in workers(Case(change, when, guard=guard, **NEEDS.get(change, {}))):
        assert named in result["problem"]
        assert "They were equal after step 0" not in result["problem"]
        assert ("States do not contain options" in result["problem"]) == (step == 3)
        assert result["step"] == step


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (REPLACES_HEAD, "its parameter head.weight is new"),
        # the new module may have the address of the old one
        (f"del model.module.head; {REPLACES_HEAD}", "its parameter head.weight is new"),
        pytest.param(
            f"{REPLACES_HEAD}  # sharded",
            "its parameter head.weight is new",
            marks=needs_full_sharding,
        ),
        ("model.body.append(torch.nn.Linear(5, 5))", "its parameter body.3.weight is new"),
        ("model.body[0].scale = torch.nn.Parameter(torch.ones(5))", "body.0.scale is new"),
        ("model.head.double()", "was cast from torch.float32 to torch.float64"),
        (ADDS_GROUP, "An optimizer got 1 parameters after register()"),
    ],
)
def test_added_parameters_are_an_error_before_they_are_trained(workers, change, named):
    register = {"sharding": "full"} if "sharded" in change else {}
    for result in workers(Case(change, "in a step", (0, 1, 2), register=register)):
        assert named in result["problem"]
        assert result["step"] == 4


UNSYNCED = {"ddp_args": {"broadcast_buffers": False}}


def compiled(model):
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(step=noisy),
        Case(step=overflows, settings=FLOAT16),
        Case(model=Caching),
        Case(model=Caching, register=UNSYNCED),
        Case(model=Monitored),
        Case(model=Bounded),
        Case(model=Normalized),
        Case(model=Viewed),
        Case(averaged=True),
        Case("t.tag = t.world_rank", ranks=(0, 1, 2)),
        pytest.param(Case(register={"sharding": "full"}), marks=needs_full_sharding),
        Case(ADDS_NOISE, settings={"wrap_ddp": False}),
        Case(step=own_averages, settings={"wrap_ddp": False}),
        Case(step=adversarial),
        Case(wrap=DistributedDataParallel),
        Case(wrap=compiled),
        Case(FREEZES, ranks=(0, 1, 2)),
        Case(SETS_RATE, ranks=(0, 1, 2)),
        # a worker that joins gets the sparse buffers
        Case("t.tag = t.world_rank", "in a join", (0, 1, 2), model=Sparse, register=UNSYNCED),
    ],
    ids=str,
)
def test_legitimate_operators_train_without_an_error(workers, case):
    for result in workers(replace(case, guard=Guard(every=1))):
        assert result["problem"] == ""


def test_no_worker_raises_before_all_know_the_difference(workers):
    """Otherwise, a worker that is interrupted could give the damaged state to the others."""
    for result in workers(Case(ADDS_NOISE, "with a late report")):
        assert f"worker {ODD} and the majority differ" in result["problem"]


def test_without_a_majority_no_worker_is_named(workers):
    for result in workers(Case(ADDS_NOISE, "in a step", (0, 1, 2))):
        assert "the workers differ in" in result["problem"]
        assert result["ranks"] == ()


def test_without_a_guard_a_difference_is_silent(workers):
    _, odd, other = workers(Case(ADDS_NOISE, guard=None))
    assert odd["problem"] == ""
    assert not torch.equal(odd["weight"], other["weight"])


class Watched(Trains):
    """Compares replicas before each step. Waiting for the GPU in steps 10 to 15 is an error."""

    def train_batch(self, batch, batch_info):
        if self.global_step == 2:  # the first comparison initializes NCCL
            guard_of(self._train_state)._is_active = True
        elif self.global_step == 9:
            set_sync_mode("error")
        elif self.global_step == 15:
            set_sync_mode("default")
        return super().train_batch(self.to_device(batch), batch_info)


class Watching(Case):
    operator_cls = Watched


@on_gpu
def test_steps_do_not_wait_for_a_gpu_that_is_compared_and_measured(monkeypatch):
    monkeypatch.setattr(step_timing, "_EVERY_S", 0.0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    case = Watching(settings={"use_gpu": True}, num_workers=1)
    runner = case.make_runner(scheduler_step_freq="batch", guard=Guard(every=1))
    try:
        runner.setup(WorkerContext(world_rank=0, world_size=1, has_process_group=True))
        runner.handle(TrainRequest(call_number=0, until_step=16, until_epoch=99))
        state = runner.operator._train_state
        guard = guard_of(state)
        assert guard._equal_step >= 14
        assert state.step_timing.totals.phase_s[FORWARD] > 0
        before, _ = guard._digests(True, False, 1)
        runner.operator.model.head.weight.data.view(torch.int32)[0, 0] ^= 1
        after, _ = guard._digests(True, False, 1)
        assert (before != after).tolist() == [False, False, True, False]
    finally:
        set_sync_mode("default")
        runner.teardown()
        dist.destroy_process_group()
