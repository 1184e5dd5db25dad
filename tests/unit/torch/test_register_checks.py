"""What may be registered, and in which shape it comes back."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raysgd import TrainingOperator
from raysgd.loop.train_state import shaped_like
from raysgd.testing import run_operator
from raysgd.torch.register_checks import check_step_freq, checked

MEMBERS = st.lists(st.integers(), min_size=1, max_size=4)


@given(st.one_of(MEMBERS, MEMBERS.map(tuple), st.integers()))
def test_registered_objects_keep_their_shape(given):
    members = checked("models", given, int)
    assert members == (list(given) if isinstance(given, list | tuple) else [given])
    assert members is not given
    back = shaped_like(given, members)
    assert (back, type(back)) == (given, type(given))


def test_object_with_step_is_a_scheduler():
    class Mine:
        def step(self):
            """Not called."""

    mine = Mine()
    assert checked("schedulers", mine, None) == [mine]


def test_reduce_lr_on_plateau_needs_a_metric():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer)
    check_step_freq([constant, plateau], "manual")
    check_step_freq([constant], "epoch")
    check_step_freq([constant, plateau], "epoch", "val_loss")
    with pytest.raises(ValueError, match=r"scheduler_step_freq='epoch'.*update_scheduler\(metric"):
        check_step_freq([constant, plateau], "epoch")


# ---- what setup leaves out of register()


def set_up(add, caplog):
    """Let an operator's `setup` add attributes; return the warnings about unregistered ones."""

    class Custom(TrainingOperator):
        def setup(self, config):
            model = torch.nn.Sequential(torch.nn.Linear(2, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            self.model, self.optimizer, self.criterion = self.register(
                models=model, optimizers=optimizer, criterion=torch.nn.Linear(2, 1)
            )
            add(self)

    run_operator(Custom, {"network": torch.nn.Linear(1, 1)})
    return [record.message for record in caplog.records if "did not register" in record.message]


def adam(module):
    return torch.optim.Adam(module.parameters())


@pytest.mark.parametrize(
    ("name", "make", "expected"),
    [
        ("head", lambda _: torch.nn.Linear(2, 1), "self.head (Linear)"),
        ("scale", lambda _: torch.nn.Parameter(torch.ones(1)), "self.scale (Parameter)"),
        ("parts", lambda _: {"a": torch.nn.Linear(2, 1)}, "self.parts['a'] (Linear)"),
        ("second", lambda op: adam(op.model), "self.second (Adam)"),
        ("optimizers", lambda op: [op.optimizer, adam(op.model)], "self.optimizers[1] (Adam)"),
        (
            "both",
            lambda op: torch.nn.Sequential(op.model, torch.nn.Linear(2, 1)),
            "self.both (Sequential)",
        ),
    ],
)
def test_warning_names_unregistered_objects(name, make, expected, caplog):
    (message,) = set_up(lambda operator: setattr(operator, name, make(operator)), caplog)
    assert f"Custom.setup did not register {expected}." in message


class WithBase(torch.optim.SGD):
    def __init__(self, parameters):
        parameters = [*parameters]
        super().__init__(parameters, lr=0.1)
        self.base = torch.optim.SGD(parameters, lr=0.1)


def test_registered_or_frozen_objects_cause_no_warning(caplog):
    torchmetrics = pytest.importorskip("torchmetrics")

    class Similarity(torchmetrics.Metric):
        def __init__(self):
            super().__init__()
            self.network = torch.nn.Linear(2, 1)

        def update(self):
            """Not called."""

        def compute(self):
            """Not called."""

    def add(operator):
        operator.network = operator.config["network"]
        operator.module = operator.unwrapped(operator.model)
        operator.layer, operator.models = operator.model[0], [operator.model]
        operator.weights = list(operator.model.parameters())
        operator.loss = torch.nn.CrossEntropyLoss()
        operator.teacher = copy.deepcopy(operator.model).requires_grad_(False)
        operator.average = torch.optim.swa_utils.AveragedModel(operator.model)
        operator.metrics = {"similarity": Similarity()}

    assert not set_up(add, caplog)


def test_inner_optimizer_causes_no_warning(caplog):
    class Custom(TrainingOperator):
        def setup(self, config):
            model = torch.nn.Linear(2, 2)
            self.model, self.optimizer = self.register(
                models=model, optimizers=WithBase(model.parameters())
            )
            self.base = self.optimizer.base

    run_operator(Custom)
    assert "did not register" not in caplog.text
