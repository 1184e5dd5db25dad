"""Whether a state fits what it is loaded into."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raysgd.errors import CheckpointError
from raysgd.torch.fitting import check_fits


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
