"""The archive of `torch.save`: what may be in it."""

import collections
import datetime
import io
import re

import pytest
import torch

from raysgd.checkpoint import read_file, tensors, write_file
from raysgd.checkpoint.location import locate
from raysgd.errors import CheckpointError
from tests.unit.checkpoint.states import STATE, Code

HERE = locate("/folder/state.pt")


def written(state):
    buffer = io.BytesIO()
    tensors.write(state, buffer)
    buffer.seek(0)
    return buffer


def test_a_tensor_of_another_layout_comes_back(tmp_path):
    state = {
        **STATE,
        "models": [{"a": torch.ones(2), "s": torch.eye(3).to_sparse(), "z": torch.ones(5)}],
    }
    path = write_file(state, tmp_path / "state.pt")
    assert torch.equal(read_file(path)["models"][0]["s"].to_dense(), torch.eye(3))


def test_a_state_comes_back_on_cpu():
    found = tensors.read(HERE, written(collections.OrderedDict(a=torch.ones(2), b=[1, None])))
    assert found["a"].device.type == "cpu"
    assert found["a"].tolist() == [1, 1]
    assert found["b"] == [1, None]


def test_what_would_run_code_is_refused_with_the_way_to_allow_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"/folder/state\.pt: it holds .*not allowed") as told:
        tensors.read(HERE, written({"a": Code()}))
    assert "add_safe_globals" in str(told.value)
    # what stands in such a pickle is the function that it would call
    assert re.search(r"\nIt is \S+\.$", str(told.value))
    assert "\x1b" not in str(told.value)
    assert not (tmp_path / "ran").exists()


def test_advice_to_load_without_protection_is_not_passed_on():
    for content in (b"", b"I5\n.", b"some words", written(STATE).read()[:-30]):
        with pytest.raises(CheckpointError, match=r"damaged or is not a checkpoint") as told:
            tensors.read(HERE, io.BytesIO(content))
        assert "weights_only" not in str(told.value)


def test_state_that_would_not_load_again_is_told_with_whose_it_is():
    tensors.check_loadable("operator", None, HERE)
    tensors.check_loadable("operator", {"best": torch.ones(1)}, HERE)
    for owner, whose in (("operator", "the operator's state_dict"), ("callbacks", "callbacks' st")):
        with pytest.raises(CheckpointError, match=whose) as told:
            tensors.check_loadable(owner, {"day": datetime.date(2020, 1, 1)}, HERE)
        assert str(told.value).startswith("Cannot save to /folder/state.pt: ")
        assert "numbers, strings, lists, dicts or torch tensors" in str(told.value)
