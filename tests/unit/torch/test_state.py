"""Copies of state: on CPU, apart from what goes on, and of types that load everywhere."""

import io
import random
import threading

import numpy as np
import pytest
import torch

from raysgd.torch.options import TorchOptions
from raysgd.torch.runner import TorchRunner
from raysgd.torch.state import copy_to_cpu, to_cpu

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
