"""Optimizer options of a state that is loaded under another config."""

import copy
import json

import pytest
import torch

from raysgd import TrainingOperator
from raysgd.loop.operator_base import has_validation_loader
from raysgd.testing import run_operator
from raysgd.torch.state_access import TorchStateAccess
from tests.operators import Classifier

Lr = torch.optim.lr_scheduler
EPS = 3 / 7
"""Division and multiplication by the default eps would change this value by rounding."""


class Tuned(TrainingOperator):
    """An operator with two parameter groups, and no loaders."""

    def setup(self, config):
        weight, bias = torch.nn.Linear(2, 2).parameters()
        model = torch.nn.ParameterList([weight, bias])
        lr = config["lr"]
        optimizer = torch.optim.Adam(
            [{"params": [weight]}, {"params": [bias], "lr": lr / 2}],
            lr=lr,
            betas=(config.get("beta", 0.9), 0.99),
            weight_decay=config.get("decay", 0.0),
        )
        self.model, self.optimizer = self.register(models=model, optimizers=optimizer)


def tuned(**config):
    return run_operator(Tuned, config)


def groups_moved_to(donor, heir):
    """Load the donor's state, adapted to the heir's config. Return the heir's groups."""
    first = tuned(**donor.config)
    then, now = (each._train_state.initial_hyperparameters() for each in (first, heir))
    heir.optimizer.load_state_dict(copy.deepcopy(donor.optimizer.state_dict()))
    heir._train_state.rescale_hyperparameters(then, now)
    return heir.optimizer.param_groups


def test_only_options_that_the_configs_set_differently_change():
    donor = tuned(lr=0.1, decay=0.5)
    donor.optimizer.param_groups[0]["eps"] = EPS  # changed by user code during training
    groups = groups_moved_to(donor, tuned(lr=0.3, beta=0.8, decay=0.5))
    assert [group["lr"] for group in groups] == [0.3, 0.15]
    assert [group["betas"] for group in groups] == [(0.8, 0.99)] * 2
    assert [group["weight_decay"] for group in groups] == [0.5] * 2
    assert groups[0]["eps"] == EPS


def test_flags_and_zero_options_take_the_new_value():
    donor, heir = tuned(lr=0.1, decay=0.0), tuned(lr=0.1, decay=0.2)
    donor.optimizer.param_groups[0]["weight_decay"] = 0.7
    assert groups_moved_to(donor, heir)[0]["weight_decay"] == 0.2
    for old, new in ((False, True), (True, False)):
        heir.optimizer.param_groups[0]["amsgrad"] = False
        heir._train_state.rescale_hyperparameters(
            [[{"amsgrad": old}, {}]], [[{"amsgrad": new}, {}]]
        )
        assert heir.optimizer.param_groups[0]["amsgrad"] is new


def test_only_a_registered_validation_loader_counts():
    assert has_validation_loader(run_operator(Classifier)) is True
    assert has_validation_loader(tuned(lr=0.1)) is False
    own = tuned(lr=0.1)
    own.validation_loader = [1, 2]  # validate() ignores this attribute
    assert has_validation_loader(own) is False


class Wrapper:
    """Wraps a scheduler, as Accelerate does."""

    def __init__(self, optimizer):
        self.optimizers = [optimizer]
        self.scheduler = Lr.SequentialLR(
            optimizer,
            [Lr.LinearLR(optimizer, 0.1, total_iters=3), Lr.LambdaLR(optimizer, lambda n: 0.9**n)],
            milestones=[2],
        )
        for name in ("step", "state_dict", "load_state_dict", "get_last_lr"):
            setattr(self, name, getattr(self.scheduler, name))


def cyclic(optimizer):
    rate = optimizer.param_groups[0]["lr"]
    return Lr.CyclicLR(optimizer, rate / 10, rate, step_size_up=4, cycle_momentum=False)


SCHEDULERS = {
    "cyclic": cyclic,
    "wrapped": Wrapper,
    "step": lambda optimizer: Lr.StepLR(optimizer, 2, gamma=0.1),
    "cosine": lambda optimizer: Lr.CosineAnnealingLR(optimizer, T_max=20),
    "lambda": lambda optimizer: Lr.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "sequential": lambda optimizer: Lr.SequentialLR(
        optimizer,
        [Lr.ConstantLR(optimizer, 0.5, 2), Lr.LambdaLR(optimizer, lambda epoch: 0.9**epoch)],
        milestones=[2],
    ),
    "chained": lambda optimizer: Lr.ChainedScheduler(
        [Lr.ConstantLR(optimizer, 0.5, 2), Lr.ExponentialLR(optimizer, 0.9)]
    ),
    "plateau": Lr.ReduceLROnPlateau,
}


class Rivals(TrainingOperator):
    """Two optimizers, each with a scheduler. ``config["order"]`` is the order of the schedulers."""

    def setup(self, config):
        models = [torch.nn.Linear(2, 2) for _ in range(2)]
        self.rivals = [
            torch.optim.Adam(model.parameters(), lr=config.get("kind", float)(lr))
            for model, lr in zip(models, config["rates"], strict=True)
        ]
        steps = config.get("schedulers", SCHEDULERS["lambda"])
        schedulers = [steps(self.rivals[index]) for index in config.get("order", (0, 1))]
        self.register(models=models, optimizers=self.rivals, schedulers=schedulers)

    def advance(self):
        for rival in self.rivals:
            rival.step()
        for scheduler in self._train_state.schedulers:
            of_plateau = isinstance(scheduler, Lr.ReduceLROnPlateau)
            scheduler.step(1.0) if of_plateau else scheduler.step()

    def rates(self):
        return [rival.param_groups[0]["lr"] for rival in self.rivals]


def numbers(rates):
    return pytest.approx([float(rate) for rate in rates])


def rivals(*rates, **config):
    return run_operator(Rivals, {"rates": rates, **config}, scheduler_step_freq="manual")


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1,)], ids=str)
@pytest.mark.parametrize("kind", [float, torch.tensor])
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:.*epoch parameter in:UserWarning")
def test_scheduler_follows_its_own_optimizer(name, order, kind):
    if name in ("sequential", "wrapped"):  # PyTorch 2.9 computes their rates in tensors wrongly
        kind = float
    changed = (0.2, 0.4)
    config = {"schedulers": SCHEDULERS[name], "order": order, "kind": kind}
    donor, heir = rivals(0.2, 0.2, **config), rivals(*changed, **config)
    always = rivals(*changed, **config)
    options = [each._train_state.initial_hyperparameters() for each in (donor, heir)]
    then, now = json.loads(json.dumps(options))
    for _ in range(3):
        donor.advance()
        always.advance()
    saved = TorchStateAccess(donor._train_state).read()
    TorchStateAccess(heir._train_state).load(copy.deepcopy(saved))
    heir._train_state.rescale_hyperparameters(then, now)
    for _ in range(3):
        assert all(type(rate) is type(kind(0.0)) for rate in heir.rates())
        assert [*map(float, heir.rates())] == numbers(always.rates())
        pair = heir._train_state, always._train_state
        for mine, other in zip(*(each.schedulers for each in pair), strict=True):
            assert [*map(float, mine.get_last_lr())] == numbers(other.get_last_lr())
        heir.advance()
        always.advance()
