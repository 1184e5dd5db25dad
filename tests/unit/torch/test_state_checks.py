"""Whether a state fits what it is loaded into."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raysgd._internal.nested import loading
from raysgd.errors import CheckpointError
from raysgd.loop.state import check_parts
from raysgd.torch.state import state_problem


def check_fits(name, held, saved):
    check_parts(name, held, saved, state_problem)


def linear(inputs=2, outputs=2, **arguments):
    return torch.nn.Linear(inputs, outputs, **arguments)


def problem(name, held, saved):
    """What is said about a state that does not fit."""
    with pytest.raises(CheckpointError) as caught:
        check_fits(name, held, saved)
    return str(caught.value)


SIZES = st.lists(st.integers(1, 4), min_size=2, max_size=4)


def network(sizes):
    return torch.nn.Sequential(*map(linear, sizes, sizes[1:]))


@given(SIZES, SIZES)
def test_a_state_fits_if_the_model_can_load_it(mine, others):
    model, state = network(mine), network(others).state_dict()
    try:
        copy.deepcopy(model).load_state_dict(state)
    except RuntimeError:
        said = problem("models", [model], [state])
        assert "of another trainer: its models[0] does not fit the registered Sequential: " in said
    else:
        check_fits("models", [model], [state])


def test_there_must_be_as_many_states_as_parts():
    assert problem("models", [linear()], []) == (
        "The state has 0 models, and the operator registered 1."
    )
    for saved in (None, 3, "text", [1], {"a": 1}):
        assert problem("models", [linear()], saved) == (
            "The state's 'models' must be a list of state dicts."
        )


def test_parameters_of_another_model_are_named_but_not_all_of_a_large_one():
    large = torch.nn.Sequential(*(linear() for _ in range(4)))
    said = problem("models", [linear()], [large.state_dict()])
    assert said.endswith("Linear: without bias, weight, with 0.bias, 0.weight, 1.bias and 5 more.")
    without_bias = linear(bias=False).state_dict()
    assert problem("models", [linear()], [without_bias]).endswith("Linear: without bias.")
    assert "with 7." in problem("models", [linear()], [{**linear().state_dict(), 7: 1}])


def test_shapes_are_compared():
    state = linear(3).state_dict()
    said = problem("models", [linear(), linear(2)], [linear().state_dict(), state])
    assert "models[1]" in said
    assert said.endswith("weight is of shape (2, 3), not of shape (2, 2).")


@pytest.mark.parametrize("thing", [None, [[1.0]], torch.ones(2, 2).numpy()], ids=type)
def test_what_is_no_tensor_is_said_to_be_none(thing):
    said = problem("models", [linear()], [{**linear().state_dict(), "weight": thing}])
    assert said.endswith("weight is no tensor, not of shape (2, 2).")


def test_groups_of_an_optimizer_are_compared():
    def adam(*groups):
        return torch.optim.Adam([{"params": list(linear().parameters())[:n]} for n in groups])

    check_fits("optimizers", [adam(1, 2)], [adam(1, 2).state_dict()])
    for others in ([2], [2, 1]):
        said = problem("optimizers", [adam(1, 2)], [adam(*others).state_dict()])
        assert said.endswith(f"Adam: groups of {others} parameters, not of [1, 2].")


Optim = torch.optim


def trained(optimizer_cls):
    """A model and its optimizer, which has stepped once."""
    model = linear()
    optimizer = optimizer_cls(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("held", "saved", "said"),
    [
        (Optim.Adam, Optim.SGD, "without betas, eps, with dampening, momentum, nesterov"),
        (Optim.SGD, Optim.Adam, "without dampening, momentum, with amsgrad, betas, "),
        (Optim.SGD, Optim.RMSprop, "without dampening, with alpha, "),
        (Optim.NAdam, Optim.Adam, "without momentum_decay, with amsgrad"),
        (Optim.Rprop, Optim.AdamW, "without etas, step_sizes, with "),
        (Optim.Adafactor, Optim.Adam, "without beta2_decay, d, with "),
    ],
)
def test_a_state_of_another_kind_of_optimizer_names_what_it_lacks(held, saved, said):
    """torch loads most of them, and the first step fails with a KeyError."""
    found = problem("optimizers", [trained(held)[1]], [trained(saved)[1].state_dict()])
    assert f"optimizers[0] does not fit the registered {held.__name__}: groups {said}" in found


def test_a_second_group_of_another_kind_is_found():
    state = copy.deepcopy(Optim.Adam([{"params": [p]} for p in linear().parameters()]).state_dict())
    held = Optim.Adam([{"params": [p]} for p in linear().parameters()])
    state["param_groups"][1]["momentum"] = state["param_groups"][1].pop("betas")
    assert "groups without betas, with momentum." in problem("optimizers", [held], [state])


KINDS = [Optim.SGD, Optim.Adam, Optim.AdamW, Optim.RMSprop, Optim.Adagrad, Optim.Adadelta]
KINDS += [Optim.NAdam, Optim.ASGD, Optim.Rprop, Optim.Adafactor]


@pytest.mark.parametrize("saved", KINDS)
@pytest.mark.parametrize("held", KINDS)
def test_what_fits_an_optimizer_can_be_trained_with(held, saved):
    model, optimizer = trained(held)
    state = copy.deepcopy(trained(saved)[1].state_dict())
    try:
        check_fits("optimizers", [optimizer], [state])
    except CheckpointError:
        assert held is not saved
        assert {held, saved} != {Optim.Adam, Optim.AdamW}
    else:
        optimizer.load_state_dict(state)
        step(model, optimizer)


def test_an_option_newer_than_the_file_is_left_to_the_optimizer_to_fill_in():
    held, older = trained(Optim.RMSprop)[1], copy.deepcopy(trained(Optim.RMSprop)[1].state_dict())
    for name in ("momentum", "capturable", "maximize"):
        older["param_groups"][0].pop(name, None)
    check_fits("optimizers", [held], [older])
    held.load_state_dict(older)
    assert held.param_groups[0]["momentum"] == 0


def first_moment(state):
    return state["state"][0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s["param_groups"][0].update(lr="0.1"), "a step with it raises TypeError"),
        (lambda s: s["param_groups"][0].update(lr=float("nan")), "a learning rate of nan"),
        (lambda s: s["param_groups"][0].update(betas=0.9), "a step with it raises TypeError"),
        (lambda s: s["param_groups"][0]["params"].reverse(), "a step with it raises RuntimeError"),
        (lambda s: s["param_groups"][0].update(params=[7, 8]), "a state of parameter 0, which is"),
        (lambda s: first_moment(s).update(exp_avg=torch.ones(3, 2)), "raises RuntimeError"),
        (lambda s: first_moment(s).update(exp_avg="text"), "a step with it raises"),
        (lambda s: first_moment(s).pop("exp_avg"), "a step with it raises KeyError('exp_avg')"),
    ],
)
@pytest.mark.parametrize("has_stepped", [True, False])
def test_a_state_that_an_optimizer_could_not_step_with_is_told(change, said, has_stepped):
    """torch takes it, and the next step fails."""
    held = trained(Optim.Adam)[1] if has_stepped else Optim.Adam(linear().parameters())
    state = copy.deepcopy(trained(Optim.Adam)[1].state_dict())
    check_fits("optimizers", [held], [state])
    change(state)
    assert said in problem("optimizers", [held], [state])


@pytest.mark.parametrize("kernel", ["foreach", "fused", "capturable"])
@pytest.mark.parametrize("kind", [Optim.SGD, Optim.Adam])
def test_with_which_kernel_a_state_was_made_does_not_matter(kind, kernel):
    state = copy.deepcopy(trained(kind)[1].state_dict())
    state["param_groups"][0][kernel] = True
    check_fits("optimizers", [trained(kind)[1]], [state])


def test_a_trial_changes_nothing():
    (_, held), state = trained(Optim.Adam), trained(Optim.Adam)[1].state_dict()
    before = copy.deepcopy((held.state_dict(), state))
    check_fits("optimizers", [held], [state])
    assert str((held.state_dict(), state)) == str(before)


class Lookahead(Optim.Optimizer):
    """A wrapper like those in use: it shares the groups, and adds options of its own to them."""

    def __init__(self, optimizer, *, with_defaults=True):
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        if with_defaults:
            self.defaults = {**optimizer.defaults, "alpha": 0.5}
        for group in self.param_groups:
            group["alpha"] = 0.5


@pytest.mark.parametrize("with_defaults", [True, False])
def test_a_wrapper_takes_the_state_of_what_it_wraps(with_defaults):
    held = Lookahead(trained(Optim.SGD)[1], with_defaults=with_defaults)
    check_fits("optimizers", [held], [trained(Optim.SGD)[1].state_dict()])
    if with_defaults:
        adam = trained(Optim.Adam)[1].state_dict()
        assert "Lookahead: groups without alpha, dampening, momentum, with " in problem(
            "optimizers", [held], [adam]
        )


def test_options_that_a_scheduler_or_the_user_adds_to_a_group_do_not_matter():
    held, saved = trained(Optim.Adam)[1], trained(Optim.Adam)[1]
    torch.optim.lr_scheduler.OneCycleLR(saved, max_lr=1.0, total_steps=5)
    saved.param_groups[0]["name"] = "head"
    check_fits("optimizers", [held], [saved.state_dict()])
    check_fits("optimizers", [saved], [held.state_dict()])


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({}, "no 'param_groups' and 'state'"),
        ({"param_groups": []}, "no 'param_groups' and 'state'"),
        ({"param_groups": [3], "state": {}}, "no lists of 'params'"),
        ({"param_groups": [{}], "state": {}}, "no lists of 'params'"),
        ({"param_groups": [{"params": 2}], "state": {}}, "no lists of 'params'"),
    ],
)
def test_what_is_no_state_of_an_optimizer_is_told_before_anything_is_changed(state, said):
    optimizer = torch.optim.SGD(linear().parameters(), lr=0.1)
    assert said in problem("optimizers", [optimizer], [state])


def test_a_scheduler_takes_any_dict():
    """What is in it is its own affair."""
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(linear().parameters(), lr=0.1), 1)
    check_fits("schedulers", [scheduler], [{"anything": 1}])


Lr = torch.optim.lr_scheduler
SCHEDULERS = {
    "step": lambda optimizer: Lr.StepLR(optimizer, 1),
    "plateau": Lr.ReduceLROnPlateau,
    "lambda": lambda optimizer: Lr.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "multiplicative": lambda optimizer: Lr.MultiplicativeLR(optimizer, lambda epoch: 0.9),
    "cyclic": lambda optimizer: Lr.CyclicLR(optimizer, 0.1, 0.2, cycle_momentum=False),
    "sequential": lambda optimizer: Lr.SequentialLR(
        optimizer, [Lr.ConstantLR(optimizer), Lr.LambdaLR(optimizer, lambda epoch: 1)], [2]
    ),
    "chained": lambda optimizer: Lr.ChainedScheduler(
        [Lr.ConstantLR(optimizer), Lr.StepLR(optimizer, 1), Lr.StepLR(optimizer, 2)]
    ),
}


def scheduled(name):
    optimizer = torch.optim.SGD(linear().parameters(), lr=0.1)
    optimizer.step()
    return SCHEDULERS[name](optimizer)


@pytest.mark.parametrize("saved", SCHEDULERS)
@pytest.mark.parametrize("held", sorted(SCHEDULERS.keys() - {"plateau"}))
def test_what_fits_a_scheduler_can_be_loaded_or_changes_nothing(held, saved):
    scheduler, state = scheduled(held), copy.deepcopy(scheduled(saved).state_dict())
    before = str(scheduler.state_dict())
    try:
        check_fits("schedulers", [scheduler], [state])
        with loading(scheduler, scheduler.state_dict(), state, "schedulers[0]"):
            pass
    except CheckpointError:
        assert held != saved
        assert str(scheduler.state_dict()) == before


def test_as_many_schedulers_are_in_one_as_in_its_state():
    """torch takes fewer."""
    said = problem("schedulers", [scheduled("chained")], [scheduled("sequential").state_dict()])
    assert said.endswith("ChainedScheduler: it has 2 schedulers in it, not 3.")


def test_schedulers_in_a_scheduler_are_looked_at_too():
    held, state = scheduled("sequential"), scheduled("sequential").state_dict()
    state["_schedulers"][1]["last_epoch"] = "now"
    assert problem("schedulers", [held], [state]).endswith(
        "in the LambdaLR _schedulers[1], its 'last_epoch' is 'now', and must be a number."
    )
    for inner, said in ((None, "no schedulers in it, not 2."), ([{}, 3], "it is no dict.")):
        state["_schedulers"] = inner
        assert problem("schedulers", [held], [state]).endswith(said)


def test_a_scheduler_that_loads_in_a_way_of_its_own_is_let():
    class Own(Lr.LambdaLR):
        def load_state_dict(self, state_dict):
            self.last_epoch = state_dict["last_epoch"]

    scheduler = Own(torch.optim.SGD(linear().parameters(), lr=0.1), lambda epoch: 1)
    check_fits("schedulers", [scheduler], [{"last_epoch": 3}])
    check_fits("schedulers", [object()], [{"last_epoch": 3}])


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("milestones", None, "a dict of numbers"),
        ("milestones", {"a": 1}, "a dict of numbers"),
        ("base_lrs", [], "a list of 1 numbers"),
    ],
)
def test_fields_of_a_scheduler_must_keep_their_form(name, value, said):
    held = Lr.MultiStepLR(torch.optim.SGD(linear().parameters(), lr=0.1), [2, 4])
    state = {**held.state_dict(), name: value}
    assert f"its {name!r} is {value!r}, and must be {said}" in problem(
        "schedulers", [held], [state]
    )
