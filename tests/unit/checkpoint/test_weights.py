"""Files with only the weights, which other libraries can read."""

import os
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model

from raysgd.checkpoint import save_model
from raysgd.errors import CheckpointError


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.second = torch.nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("steps", torch.tensor(3))


def same(left, right):
    left, right = left.state_dict(), right.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_a_tensor_of_two_names_is_written_once(tmp_path):
    torch.manual_seed(0)
    model, other = Tied(), Tied()
    path = save_model(model, tmp_path / "tied.safetensors")
    assert set(load_file(path)) == {"first.weight", "first.bias", "second.bias", "steps"}
    with safe_open(path, "pt") as file:
        assert file.metadata()["second.weight"] == "first.weight"
    load_model(other, path)
    assert same(model, other)
    assert other.first.weight is other.second.weight


def test_views_of_the_same_memory_are_written_apart(tmp_path):
    model = torch.nn.Module()
    memory = torch.arange(12.0).reshape(3, 4)
    views = {"rows": memory[:2], "columns": memory.T, "all": memory, "odd": memory[:, ::2]}
    wave = torch.tensor([1 + 2j])
    views |= {"wave": wave, "conjugate": wave.conj(), "negative": wave.conj().imag}
    for name, view in (views | {"flat": memory.view(-1)}).items():
        model.register_buffer(name, view)
    tensors = load_file(save_model(model, tmp_path / "views.safetensors"))
    assert tensors.keys() == model.state_dict().keys()
    assert all(torch.equal(tensors[name], view) for name, view in model.named_buffers())


def test_a_tensor_that_the_format_does_not_know_is_an_error(tmp_path):
    odd = {r"Cannot save to .*model\.safetensors": torch.eye(3).to_sparse()}
    odd["write odd of the model: .* no torch.complex128"] = torch.ones(1, dtype=torch.complex128)
    for said, value in odd.items():
        model = torch.nn.Module()
        model.register_buffer("odd", value)
        with pytest.raises(CheckpointError, match=said):
            save_model(model, tmp_path / "model.safetensors")
    assert os.listdir(tmp_path) == []


def test_without_the_package_its_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r'pip install "raysgd\[torch\]"'):
        save_model(torch.nn.Linear(1, 1), tmp_path / "model.safetensors")
