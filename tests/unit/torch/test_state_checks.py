"""Whether a state fits the objects that load it."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raysgd.errors import CheckpointError
from raysgd.loop.state import check_parts
from raysgd.torch.state import state_problem

Optim, Lr = torch.optim, torch.optim.lr_scheduler


def check_fits(name, held, saved):
    check_parts(name, held, saved, state_problem)


def linear(inputs=2, outputs=2, **arguments):
    return torch.nn.Linear(inputs, outputs, **arguments)


def problem(name, held, saved):
    """The error for a state that does not fit."""
    with pytest.raises(CheckpointError) as caught:
        check_fits(name, held, saved)
    return str(caught.value)


SIZES = st.lists(st.integers(1, 4), min_size=2, max_size=4)


def network(sizes):
    return torch.nn.Sequential(*map(linear, sizes, sizes[1:]))


@given(SIZES, SIZES)
def test_state_fits_if_the_model_can_load_it(mine, others):
    model, state = network(mine), network(others).state_dict()
    try:
        copy.deepcopy(model).load_state_dict(state)
    except RuntimeError:
        said = problem("models", [model], [state])
        assert "models[0] does not fit the registered Sequential: " in said
    else:
        check_fits("models", [model], [state])


def test_number_of_states_must_match():
    assert problem("models", [linear()], []) == (
        "The state has 0 models, but the operator registered 1."
    )
    for saved in (None, 3, "text", [1], {"a": 1}):
        assert problem("models", [linear()], saved) == (
            "The state's 'models' must be a list of state dicts."
        )


def test_error_names_some_parameters_of_another_model():
    large = torch.nn.Sequential(*(linear() for _ in range(4)))
    said = problem("models", [linear()], [large.state_dict()])
    assert said.endswith(
        "Linear: it lacks bias, weight, and has unknown 0.bias, 0.weight, 1.bias and 5 more."
    )


def test_error_compares_shapes():
    state = linear(3).state_dict()
    said = problem("models", [linear(), linear(2)], [linear().state_dict(), state])
    assert "models[1]" in said
    assert said.endswith("its weight has shape (2, 3), and not (2, 2).")


def test_groups_of_an_optimizer_must_match():
    def adam(*groups):
        return Optim.Adam([{"params": list(linear().parameters())[:n]} for n in groups])

    check_fits("optimizers", [adam(1, 2)], [adam(1, 2).state_dict()])
    for others in ([2], [2, 1]):
        said = problem("optimizers", [adam(1, 2)], [adam(*others).state_dict()])
        assert said.endswith(f"Adam: its groups have {others} parameters, and not [1, 2].")


@pytest.mark.parametrize(
    ("held", "saved", "said"),
    [
        (Optim.Adam, Optim.SGD, "lacks betas, eps, and has unknown dampening, momentum, nesterov"),
        (Optim.SGD, Optim.Adam, "lacks dampening, momentum, and has unknown amsgrad, betas, "),
        (Optim.Rprop, Optim.AdamW, "lacks etas, step_sizes, and has unknown "),
    ],
)
def test_state_of_another_kind_of_optimizer_does_not_fit(held, saved, said):
    """PyTorch loads most of them, and the first step fails with a KeyError."""
    optimizer, other = (kind(linear().parameters(), lr=0.1) for kind in (held, saved))
    found = problem("optimizers", [optimizer], [other.state_dict()])
    assert f"optimizers[0] does not fit the registered {held.__name__}: a group {said}" in found


def test_options_that_a_scheduler_or_the_user_adds_to_a_group_do_not_matter():
    held, saved = (Optim.Adam(linear().parameters(), lr=0.1) for _ in range(2))
    Optim.lr_scheduler.OneCycleLR(saved, max_lr=1.0, total_steps=5)
    saved.param_groups[0]["name"] = "head"
    check_fits("optimizers", [held], [saved.state_dict()])
    check_fits("optimizers", [saved], [held.state_dict()])


@pytest.mark.parametrize("state", [{}, {"param_groups": [3], "state": {}}])
def test_malformed_state_of_an_optimizer_does_not_fit(state):
    optimizer = Optim.SGD(linear().parameters(), lr=0.1)
    said = problem("optimizers", [optimizer], [state])
    assert said.endswith("SGD: it is not the state of an optimizer.")


def adam():
    return Optim.Adam(linear().parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("name", "value"), [("lr", "0.1"), ("lr", None), ("betas", 0.9), ("betas", [0.9, "x"])]
)
def test_optimizer_rejects_options_that_are_no_numbers(name, value):
    state = copy.deepcopy(adam().state_dict())
    state["param_groups"][0][name] = value
    assert f"in a group, its {name!r} is {value!r}" in problem("optimizers", [adam()], [state])


def test_optimizer_rejects_a_state_without_learning_rate():
    state = copy.deepcopy(adam().state_dict())
    del state["param_groups"][0]["lr"]
    assert problem("optimizers", [adam()], [state]).endswith("Adam: a group lacks lr.")


def sequential():
    optimizer = adam()
    inner = [Lr.ConstantLR(optimizer), Lr.MultiStepLR(optimizer, [2, 4])]
    return Lr.SequentialLR(optimizer, inner, [2])


@pytest.mark.parametrize(
    ("name", "value"),
    [("last_epoch", "now"), ("base_lrs", []), ("milestones", None), ("milestones", {"a": 1})],
)
def test_scheduler_rejects_fields_that_are_no_numbers(name, value):
    held, state = sequential(), sequential().state_dict()
    check_fits("schedulers", [held], [state])
    state["_schedulers"][1][name] = value
    assert f"its {name!r} is {value!r}, and that of" in problem("schedulers", [held], [state])


@pytest.mark.parametrize("inner", [None, [{}]])
def test_scheduler_rejects_another_number_of_inner_schedulers(inner):
    state = {**sequential().state_dict(), "_schedulers": inner}
    said = problem("schedulers", [sequential()], [state])
    assert said.endswith("it does not have 2 inner schedulers.")


def test_scheduler_of_user_code_can_load_any_state():
    class Own(Lr.LambdaLR):
        pass

    check_fits("schedulers", [Own(adam(), lambda epoch: 1), object()], [{"last_epoch": "x"}] * 2)
