"""When a step counts, and what is restored if it is discarded."""

import copy
import signal

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TrainingOperator
from raysgd._internal.nested import map_leaves
from raysgd.loop.state_placement import StatePlacement
from raysgd.torch.feature_list import OperatorFeatures
from raysgd.torch.options import TorchSettings
from raysgd.torch.registration import register
from raysgd.torch.state_access import TorchStateAccess
from raysgd.torch.train_state import TorchTrainState
from tests.operators import local

NUM_STEPS = 6


class WithMaster(torch.optim.Optimizer):
    """An optimizer that keeps float32 weights in nested state."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["nested"] = {"history": [parameter.float() / 3]}
            state["nested"]["history"][0] += 1e-4
            parameter.copy_(state["nested"]["history"][0])


POINTS = ("forward", "backward", "in the update", "after update 0", "commit", "validation")
KINDS = ("ctrl-c", "ctrl-c twice", "error")


class Slow(torch.optim.Optimizer):
    """Plain gradient descent that calls a hook between two parameters."""

    def __init__(self, params, hook):
        super().__init__(params, {"lr": 1.0})
        self.hook = hook

    @torch.no_grad()
    def step(self):
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            if number:
                self.hook("in the update")
            parameter.sub_(parameter.grad)


class Scheduler(torch.optim.lr_scheduler.LambdaLR):
    def step(self, *args):
        super().step(*args)
        getattr(self.optimizer, "hook", lambda where: None)("commit")


class Data(TensorDataset):
    read = staticmethod(lambda index: None)

    def __getitem__(self, index):
        self.read(index)
        return super().__getitem__(index)


class Digits(TrainingOperator):
    """Adds ``4**index`` for each sample to each parameter, so that the sum shows each update."""

    def setup(self, config):
        self.hook = lambda where: None
        models = [torch.nn.Linear(1, 1).double() for _ in range(config["num_models"])]
        for parameter in (each for model in models for each in model.parameters()):
            torch.nn.init.zeros_(parameter)
        optimizers = [Slow(model.parameters(), self.call_hook) for model in models]
        schedulers = [Scheduler(optimizer, lambda step: 1.0) for optimizer in optimizers]
        self.all_models, self.all_optimizers, self.schedulers = self.register(
            models=models, optimizers=optimizers, schedulers=schedulers
        )
        self.data = Data(4.0 ** torch.arange(NUM_STEPS).double()[:, None])
        loader = DataLoader(self.data)
        self.register_data(train_loader=loader, validation_loader=loader)

    def call_hook(self, where):
        self.hook(where)

    def train_batch(self, batch, batch_info):
        for number in range(self.config["updates"]):
            for model, optimizer in zip(self.all_models, self.all_optimizers, strict=True):
                output = model(torch.ones(1, 1).double())
                self.hook("forward")
                output.register_hook(lambda gradient: self.hook("backward"))
                self.backward(-(output * batch[0]).sum())
                self.optimizer_step(optimizer)
                self.hook(f"after update {number}")
        return {"num_samples": 1}

    def validate_batch(self, batch, batch_info):
        self.hook("validation")
        return {"val_loss": 0.0, "num_samples": 1}


def expected(num_steps, updates=1):
    """Return the value of each parameter after a number of steps."""
    epochs, rest = divmod(num_steps, NUM_STEPS)
    return updates * sum(4**i * (epochs + (i < rest)) for i in range(NUM_STEPS))


def digits(state):
    return {value.item() for model in state["models"] for value in model.values()}


@pytest.fixture
def start(make_trainer):
    """Return a function that starts a local trainer, which calls `do` at a point of a step."""

    def start(at=None, step=3, do=None, updates=1):
        config = {"num_models": 1, "updates": updates}
        trainer = make_trainer(Digits, config, scheduler_step_freq="batch")
        operator = trainer.get_local_operator()

        def hook(where):
            if where == at and operator.global_step == step:
                operator.hook = lambda where: None
                do(operator)

        operator.hook = hook
        return trainer

    return start


def fail(*_):
    raise ValueError("in a step")


def ctrl_c(*_):
    signal.raise_signal(signal.SIGINT)


# ---- steps that fail


def move(operator):
    with torch.no_grad():
        operator.all_models[0].weight.add_(1)
    fail()


@pytest.mark.parametrize("updates", [1, 2])
def test_parameters_that_train_batch_changed_are_restored_or_detected(start, updates):
    trainer = start("forward", do=move, updates=updates)
    state = trainer.state_dict()
    with pytest.raises(ValueError, match="in a step"):
        trainer.train()
    if updates == 1:
        for call in (trainer.train, trainer.state_dict, trainer.get_model):
            with pytest.raises(RuntimeError, match="train_batch changed them"):
                call()
        trainer.load_state_dict(state)
    trainer.train()
    assert digits(trainer.state_dict()) == {expected(NUM_STEPS, updates)}


@pytest.mark.parametrize(("hook", "last"), [("before_commit", 2), ("commit", 3)])
def test_an_update_that_fails_in_its_commit_counts_for_all_or_none(start, hook, last):
    trainer = start(updates=2)
    trainer.train(num_steps=2)  # shows that a step makes several updates
    operator, failures = trainer.get_local_operator(), [fail]
    operator._train_state.features_by_hook[hook].insert(0, operator)
    setattr(operator, hook, lambda update: failures and failures.pop()())
    with pytest.raises(ValueError, match="in a step"):
        trainer.train(num_steps=1)
    assert trainer.state_dict()["schedulers"][0]["last_epoch"] == last == trainer.global_step


def test_a_state_whose_shards_cannot_be_loaded_is_not_trained(start, monkeypatch):
    trainer = start()
    monkeypatch.setattr(StatePlacement, "load_shards", fail)
    with pytest.raises(ValueError, match="in a step"):
        trainer.load_state_dict(trainer.state_dict())
    with pytest.raises(RuntimeError, match="Load a checkpoint"):
        trainer.train()


# ---- failures anywhere


faults = st.tuples(
    st.sampled_from(POINTS), st.sampled_from(KINDS), st.integers(1, 5), st.integers(1, 8)
)


RESTART = [("in the update", "error", 1, 1), ("in the update", "error", 5, 8)]


@example(plan=RESTART, num_models=1, updates=1, averages=False)
@given(
    plan=st.lists(faults, min_size=1, max_size=4),
    num_models=st.integers(1, 2),
    updates=st.integers(1, 2),
    averages=st.booleans(),
)
def test_failure_anywhere_loses_and_repeats_no_step(plan, num_models, updates, averages):
    config = {"num_models": num_models, "updates": updates}
    with local(Digits, config, scheduler_step_freq="batch") as trainer:
        operator = trainer.get_local_operator()
        if averages:
            operator._update_features.averaging.start(0.5, 1)
        trainer.train(num_steps=1)  # shows how many updates a step makes
        for point, kind, visits, num_steps in plan:
            before = copy.deepcopy(trainer.state_dict())
            operator.hook = Fault(point, kind, visits)
            call = trainer.validate if point == "validation" else trainer.train
            try:
                call(num_steps=num_steps)
            except (KeyboardInterrupt, ValueError):
                assert operator.hook.visits <= 0
            else:
                assert trainer.global_step - before["global_step"] == (
                    0 if point == "validation" else num_steps
                )
            operator.hook = lambda where: None
            if operator._train_state.is_damaged:
                assert point == "in the update" or updates * num_models > 1
                restore(trainer, before)
            operator = trainer.get_local_operator()  # a restart replaces the operator
            state = trainer.state_dict()
            assert before["global_step"] <= state["global_step"] == trainer.global_step
            assert digits(state) == {expected(trainer.global_step, updates)}
        goal = trainer.global_step + NUM_STEPS
        trainer.train(num_steps=NUM_STEPS)
        assert trainer.global_step == goal
        assert digits(trainer.state_dict()) == {expected(goal, updates)}


def restore(trainer, state):
    """Continue after a partial update, from the snapshot if there is one, else from `state`."""
    goal = trainer.global_step + 1
    if trainer._controller.snapshots.load() is None:
        with pytest.raises(RuntimeError, match="Load a checkpoint"):
            trainer.train(num_steps=1)
        trainer.load_state_dict(state)
    else:
        trainer.train(num_steps=1)
        assert trainer.global_step == goal


class Fault:
    """Fails when steps reach a point for the nth time."""

    def __init__(self, point, kind, visits):
        self.point, self.kind, self.visits = point, kind, visits

    def __call__(self, where):
        if where != self.point:
            return
        self.visits -= 1
        if self.visits == 0:
            if self.kind == "error":
                fail()
            for _ in range(1 + (self.kind == "ctrl-c twice")):
                ctrl_c()


# ---- loading


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (torch.bfloat16, WithMaster),
        (torch.float64, torch.optim.NAdam),
        (torch.float64, torch.optim.ASGD),
    ],
)
def test_optimizer_state_keeps_its_dtypes_when_it_is_loaded(dtype, kind):
    made = [make_registration(kind, dtype) for _ in range(2)]
    for parameter in made[0].models[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    made[0].optimizers[0].step()
    own, other = map(TorchStateAccess, made)
    state = own.read()
    other.load(copy.deepcopy(state))
    assert flat(other.read()) == flat(state)


def make_registration(kind, dtype):
    train_state = TorchTrainState(TorchSettings())
    model = torch.nn.Linear(2, 1).to(dtype)
    register(train_state, OperatorFeatures(train_state), model, kind(model.parameters()))
    return train_state


def flat(tree):
    """Return text that shows each value with its dtype."""
    return str(map_leaves(tree, lambda x: (x.dtype, x.tolist()) if torch.is_tensor(x) else x))
