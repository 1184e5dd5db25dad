"""Changes by a discarded step are restored, or make the state partial."""

import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from raysgd import BadSteps, TrainingOperator
from raysgd.data.partition import MicroBatchPlan
from raysgd.loop.update import Update
from raysgd.torch.features.buffer_backup import BufferBackup
from raysgd.torch.features.rollback import Rollback
from raysgd.torch.options import TorchOptions, TorchSettings
from raysgd.torch.tensors import TensorVersions
from raysgd.torch.train_state import TorchTrainState
from tests.operators import local


def test_versions_find_changed_replaced_and_moved_gradients_and_keep_none_alive():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    gradient = weakref.ref(parameter.grad)
    versions = TensorVersions(lambda: [parameter, parameter.grad])
    assert versions.find_changed_ids() == set()
    parameter.grad.mul_(2)
    assert versions.find_changed_ids() == {id(parameter.grad)}
    versions = TensorVersions(lambda: [parameter, parameter.grad])
    parameter.grad = parameter.grad.clone()
    assert id(parameter.grad) in versions.find_changed_ids()
    assert gradient() is None
    gradients = [torch.ones(2), torch.ones(2)]
    versions = TensorVersions(lambda: gradients)
    gradients.reverse()
    assert versions.find_changed_ids() == set(map(id, gradients))


def stepped(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def rollback_of(optimizers, models=(), **options):
    state = TorchTrainState(TorchSettings(options=TorchOptions(**options)))
    state.optimizers[:], state.models = optimizers, [*models]
    return Rollback(state)


class Steps:
    """Steps with two updates each, for which `Rollback` keeps copies."""

    def __init__(self, *optimizers, models=()):
        self.step, self.optimizers = Update(), optimizers
        self.rollback = rollback_of(optimizers, models)
        self.step.optimizer_steps.max_counts.update(dict.fromkeys(map(id, optimizers), 2))

    def begin(self):
        self.step.begin_micro_batch(MicroBatchPlan())
        self.rollback.begin_update(self.step)

    def commit(self):
        self.step.commit()
        self.rollback.commit(self.step)
        self.step.close()

    def discard(self):
        self.rollback.roll_back(self.step)
        self.step.close()


def test_parameters_frozen_as_the_step_begins_are_restored():
    parameter = torch.nn.Parameter(torch.ones(2))
    steps = Steps(torch.optim.SGD([parameter], lr=0.5, momentum=0.9))
    stepped(steps.optimizers[0])
    before = parameter.tolist()
    parameter.requires_grad_(False)
    steps.begin()
    parameter.requires_grad_(True)
    stepped(steps.optimizers[0])
    steps.discard()
    assert parameter.tolist() == before
    assert not steps.rollback._train_state.is_damaged


def test_copies_for_a_first_bad_step_are_released():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer, step = torch.optim.SGD([parameter], lr=0.5), Update()
    step.optimizer_steps.expect([optimizer])
    rollback = rollback_of([optimizer], bad_steps=BadSteps())
    rollback.begin_update(step)
    copies = rollback._backups[0].copies
    rollback.begin_update(step)
    assert rollback._backups[0].copies[0] is copies[0]  # the next update uses their memory
    rollback.before_optimizer_step(step, optimizer)
    rollback.begin_update(step)
    assert not rollback._backups[0].copies


class Odd(torch.optim.SGD):
    """An optimizer whose state has new tensors, nested ones, and a key that is not a parameter."""

    @torch.no_grad()
    def step(self):
        super().step()
        (parameter,) = self.param_groups[0]["params"]
        held = self.state[parameter]
        held["mean"] = held.get("mean", torch.zeros(2)) + parameter
        held.setdefault("nested", {"history": [torch.zeros(2)]})["history"][0].add_(parameter)
        held["nested"]["history"].append(parameter.clone())
        self.state["count"] = self.state.get("count", 0) + 1


class Learning(torch.optim.SGD):
    """An optimizer that keeps its estimate of the step size in the parameter group."""

    @torch.no_grad()
    def step(self):
        super().step()
        (group,) = self.param_groups
        group["k"] = group.get("k", 0) + 1
        group["d"] = group.get("d", torch.ones(1)).mul_(2)
        group["lr"] *= 0.5


@pytest.mark.parametrize("kind", [Odd, Learning])
@pytest.mark.parametrize("num_steps", [0, 2])
def test_optimizer_state_of_any_form_is_restored(num_steps, kind):
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    odd, twin = (kind([p], lr=0.5) for p in (parameter, torch.nn.Parameter(parameter.clone())))
    steps = Steps(odd)
    for _ in range(num_steps):
        stepped(odd)
        stepped(twin)
    steps.begin()
    stepped(odd)
    stepped(odd)
    steps.discard()
    assert str(odd.state_dict()) == str(twin.state_dict())
    stepped(odd)
    stepped(twin)
    assert str([odd.state_dict(), odd.param_groups]) == str([twin.state_dict(), twin.param_groups])


# ---- without copies


@pytest.mark.parametrize("changes", [True, False])
def test_changed_parameter_makes_the_state_partial(changes):
    model = torch.nn.Embedding(2, 2, max_norm=0.1)  # each forward pass normalizes it
    frozen = torch.nn.Linear(2, 1).requires_grad_(False)
    steps = Steps(torch.optim.SGD(model.parameters(), lr=0.1), models=[model, frozen])
    steps.step.optimizer_steps.max_counts.clear()
    steps.begin()
    frozen(model(torch.tensor([0, 1]))).sum().backward()
    if changes:
        frozen.weight.add_(1)
    steps.discard()
    assert steps.rollback._train_state.is_damaged == changes


def test_parameters_that_steps_move_before_the_update_are_restored():
    parameter = torch.nn.Parameter(torch.ones(2))
    steps = Steps(torch.optim.SGD([parameter], lr=0.5))
    steps.step.optimizer_steps.max_counts.clear()

    def move():
        steps.begin()
        with torch.no_grad():
            parameter.add_(1)

    move()
    steps.rollback.before_optimizer_step(steps.step, steps.optimizers[0])
    with torch.no_grad():
        parameter.sub_(1)
    steps.commit()
    move()
    steps.discard()
    assert parameter.tolist() == [1, 1]
    assert not steps.rollback._train_state.is_damaged


def test_parameter_of_two_optimizers_is_restored():
    shared = torch.nn.Parameter(torch.ones(2))
    steps = Steps(*(torch.optim.SGD([shared], lr=0.1) for _ in range(2)))
    steps.begin()
    for optimizer in steps.optimizers * 2:
        stepped(optimizer)
    steps.discard()
    assert shared.tolist() == [1, 1]
    assert not steps.rollback._train_state.is_damaged


# ---- options and schedulers that train_batch changes before a failure


class Deciding(TrainingOperator):
    """Changes options of all forms, and steps its scheduler. Then a step can fail once."""

    def setup(self, config):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5))
        optimizer.param_groups[0]["own"] = [1.0]
        schedulers = [torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, n) for n in (1, 3)]
        self.model, self.optimizer, self.scheduler = self.register(
            models=model,
            optimizers=optimizer,
            schedulers=torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers, [2]),
        )
        self.rate = optimizer.param_groups[0]["lr"]  # PyTorch 2.9 has replaced it
        self.scheduler.history = []
        self.register_data(train_loader=[(torch.ones(4, 2),)] * 4)

    def train_batch(self, batch, batch_info):
        (group,) = self.optimizer.param_groups
        group["own"][0] *= 0.5
        group["betas"] = group["betas"][0] * 0.5, 0.9
        group[f"step {batch_info['global_step']}"] = True
        self.scheduler.step()
        self.scheduler.history.append(batch_info["global_step"])
        self.rate.mul_(0.75)
        if batch_info["global_step"] == self.config.get("fails_at"):
            raise ValueError(f"bad batch {self.config.pop('fails_at')}")
        self.backward(self.model(*batch).mean())
        self.optimizer_step(self.optimizer)
        return {}


@pytest.mark.filterwarnings("ignore:Detected call of")  # before the first step
@pytest.mark.parametrize("fails_at", [0, 2])
def test_failed_step_restores_options_and_schedulers(fails_at):
    states = []
    for config in ({}, {"fails_at": fails_at}):
        with local(Deciding, config, scheduler_step_freq="manual") as trainer:
            if config:
                with pytest.raises(ValueError, match=f"bad batch {fails_at}"):
                    trainer.train()
            trainer.train()
            operator, state = trainer.get_local_operator(), trainer.state_dict()
            assert operator.optimizer.param_groups[0]["lr"] is operator.rate
            states.append(str([state[name] for name in ("models", "optimizers", "schedulers")]))
    assert states[0] == states[1]


# ---- buffers, which a forward pass changes even if its step fails


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(2)
        self.register_buffer("table", torch.arange(6.0))
        self.register_buffer("average", torch.zeros(2))
        self.register_buffer("cache", torch.zeros(2))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("late", None)
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("wide", torch.zeros(1).expand(5))
        self.register_buffer("part", self.table[:2])
        self.register_buffer("graph", torch.eye(3))


def batch_norm(model):
    model.norm(torch.randn(4, 2))


def in_place(model):
    model.count += 1


def replaced(model):
    model.cache = torch.zeros(2) if model.cache is None else model.cache + 1


def grown(model):
    model.cache = torch.ones(1 if model.cache is None else len(model.cache) + 1)


def of_other_forms(model):
    model.table += 1  # also changes its view, `part`
    model.sparse = model.sparse * 2


def of_another_layout(model):
    dense = model.graph.to_dense() + 1
    model.graph = dense.triu().to_sparse_csr() if model.graph.layout is torch.strided else dense


CHANGES = [of_other_forms, batch_norm, in_place, replaced, grown, of_another_layout]
CHANGES += [
    lambda model: setattr(model, "late", torch.ones(3)),
    lambda model: setattr(model, "cache", None),
    lambda model: setattr(model, "graph", (model.graph.to_dense() + 1).to_sparse_csr()),
    lambda model: model.average.data.add_(1),
    lambda model: setattr(model, "average", model.average.to(torch.float16)),
]


def values(model):
    return {name: None if b is None else b.clone() for name, b in model._buffers.items()} | {
        f"norm.{name}": buffer.clone() for name, buffer in model.norm.named_buffers()
    }


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@given(
    steps=st.lists(st.lists(st.sampled_from(CHANGES), max_size=3), max_size=5),
    failing=st.lists(st.sampled_from(CHANGES), max_size=3),
    again=st.booleans(),
)
def test_restore_undoes_every_change_of_a_failed_step(steps, failing, again):
    model = Model()
    copies = BufferBackup([model], None)
    for changes in steps:
        for change in changes:
            change(model)
        copies.take()
    for _ in range(1 + again):
        expected = values(model)
        for change in failing:
            change(model)
        copies.roll_back(Update())
        torch.testing.assert_close(values(model), expected, rtol=0, atol=0)


class Changed(TrainingOperator):
    """Changes buffers after `register`. Its first step fails."""

    def setup(self, config):
        model = torch.nn.Linear(2, 1)
        for name in ("filled", "folded"):
            model.register_buffer(name, torch.zeros(2))
        model.register_buffer("sparse", torch.eye(2).to_sparse())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.model, self.optimizer = self.register(models=model, optimizers=optimizer)
        model.filled.fill_(1)
        del model.folded
        model.folded = torch.ones(2)
        self.register_data(train_loader=[(torch.ones(1, 2),)])

    def train_batch(self, batch, batch_info):
        self.failed = not getattr(self, "failed", False)
        if self.failed:
            raise ValueError("fails once")
        self.backward(self.model(*batch).mean())
        self.optimizer_step(self.optimizer)
        return {}


def test_failed_step_keeps_what_setup_changed_after_register():
    with local(Changed) as trainer:
        with pytest.raises(ValueError, match="fails once"):
            trainer.train()
        trainer.train()
        model = trainer.get_model()
    assert (model.filled.tolist(), model.folded.tolist()) == ([1, 1], [1, 1])
    assert model.sparse.to_dense().tolist() == [[1, 0], [0, 1]]


class Copied(TorchDispatchMode):
    """Records the types of the tensors that each operation copies."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "copy" in str(function):
            self.dtypes.append({tensor.dtype for tensor in args[0]})
        return function(*args, **kwargs or {})


def test_one_operation_copies_all_buffers_of_a_type():
    """On a GPU, an operation on several types launches one kernel per tensor."""
    norms = torch.nn.Sequential(*(torch.nn.BatchNorm1d(2) for _ in range(3)))
    copies = BufferBackup([norms], None)
    with Copied() as copied:
        copies.commit(Update())
    assert copied.dtypes == [{torch.float32}, {torch.int64}]
