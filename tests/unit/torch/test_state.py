"""Copies of states, and whether a state fits the objects that load it."""

import copy
import io
import random
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raysgd.errors import CheckpointError
from raysgd.loop.state import check_parts
from raysgd.torch.options import TorchOptions
from raysgd.torch.runner import TorchRunner
from raysgd.torch.state import copy_to_cpu, state_problem, to_cpu

RUNNER = TorchRunner(TorchOptions())


def draws():
    return torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.rand(3).tolist()


def test_random_states_are_restored():
    draws()
    state = RUNNER.generators.state()
    expected = draws()
    draws()
    RUNNER.generators.set(state)
    assert draws() == expected


def test_random_states_load_without_code():
    state = RUNNER.generators.state()
    expected = draws()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    RUNNER.generators.set(torch.load(buffer, weights_only=True))
    assert draws() == expected


@pytest.mark.parametrize("place", [-1, 625, 10**6, "1"])
def test_invalid_random_state_is_an_error(place):
    state = RUNNER.generators.state()
    kind, keys, _, *rest = state["numpy"]
    with pytest.raises((TypeError, ValueError)):
        RUNNER.generators.set({**state, "numpy": (kind, keys, place, *rest)})


def test_copy_does_not_change():
    tensor = torch.ones(2)
    tree = {"a": [tensor, (tensor, "text")], "n": 1}
    copied = to_cpu(tree)
    tensor.zero_()
    assert copied["a"][0].tolist() == copied["a"][1][0].tolist() == [1, 1]
    assert isinstance(copied["a"][1], tuple)
    assert (copied["a"][1][1], copied["n"]) == ("text", 1)


def test_other_objects_are_copied():
    tree = {"set": {1}, "lock": threading.Lock()}
    copied = to_cpu(tree)
    tree["set"].add(2)
    assert copied["set"] == {1}
    assert copied["lock"] is tree["lock"]  # there is no copying it, nor saving it


def test_a_copy_has_no_graph():
    assert not to_cpu(torch.ones(2, requires_grad=True)).requires_grad


def test_a_copy_keeps_the_versions_of_modules():
    """torch keeps them beside the dict; without them a module takes its state for an old one."""
    state = torch.nn.BatchNorm1d(2).state_dict()
    assert to_cpu(state)._metadata == state._metadata


def test_copied_model_is_independent():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model[0].bias.requires_grad_(False)
    model(torch.ones(3, 2)).sum().backward()
    model.eval()
    twin = copy_to_cpu(model)
    assert not twin.training
    assert [p.requires_grad for p in twin.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]
    for (name, mine), its in zip(
        model.state_dict().items(), twin.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, its), name
        assert mine.data_ptr() != its.data_ptr()
    assert torch.equal(twin(torch.ones(1, 2)), model(torch.ones(1, 2)))
    with torch.no_grad():
        twin[0].weight.zero_()
    assert model[0].weight.abs().sum() > 0


def test_shared_parameters_stay_shared_in_the_copy():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    twin = copy_to_cpu(model)
    assert twin[1].weight is twin[0].weight
    assert twin[0].weight is not model[0].weight


class Remembering(torch.nn.Module):
    """Keeps what its forward pass made, as models do whose attention is looked at."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.seen = {"all": []}
        self.seen["itself"] = self.seen

    def forward(self, x):
        self.hidden = self.layer(x)
        self.seen["all"].append(self.hidden * 2)
        return self.hidden.sum()


def test_copied_model_has_attributes_without_graph():
    model = Remembering()
    model(torch.ones(3, 2)).backward()
    twin = copy_to_cpu(model)
    assert torch.equal(twin.hidden, model.hidden)
    assert not twin.hidden.requires_grad
    assert torch.equal(twin.seen["all"][0], model.seen["all"][0])
    assert twin.seen["itself"] is twin.seen
    assert twin.hidden.data_ptr() != model.hidden.data_ptr()


# ---- whether a state fits


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
