"""The archive of `torch.save`: what may be in it, and what its records hold."""

import collections
import datetime
import io
import re
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raysgd.checkpoint import read_file, read_manifest, tensors, write_file
from raysgd.checkpoint.location import locate
from raysgd.errors import CheckpointError
from tests.unit.checkpoint.states import STATE, Code

HERE = locate("/folder/state.pt")
TREES = st.recursive(
    st.one_of(st.integers(0, 3), st.text(max_size=2)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3),
    ),
    max_leaves=8,
)


def written(state):
    buffer = io.BytesIO()
    tensors.write(state, buffer)
    buffer.seek(0)
    return buffer


def with_tensors(tree, held):
    """The tree with a tensor of a value of its own for each number; `held` has all by place."""

    def filled(tree, path):
        if isinstance(tree, dict):
            return {key: filled(value, f"{path}/{key}") for key, value in tree.items()}
        if isinstance(tree, list | tuple):
            return type(tree)(filled(value, f"{path}/{n}") for n, value in enumerate(tree))
        if isinstance(tree, str):
            return tree
        held[path] = torch.full((tree + 1,), float(len(held)))
        return held[path]

    return filled(tree, "top")


@given(TREES)
def test_each_record_holds_the_tensor_that_it_is_named_after(tree):
    held = {}
    state = {"top": with_tensors(tree, held)}
    buffer = written(state)
    found = {}
    with zipfile.ZipFile(buffer) as archive:
        for record, name in tensors.record_names(state).items():
            if record != "data.pkl":
                content = archive.read(f"archive/{record}")
                found[name] = np.frombuffer(content, np.float32).tolist()
    assert found == {path: tensor.tolist() for path, tensor in held.items()}


def test_the_names_of_parts_follow_the_numbers_that_torch_gives(tmp_path):
    """Tensors that share memory are one record; so are those that come twice."""
    shared = torch.zeros(10)
    module = torch.nn.BatchNorm1d(3).state_dict()
    state = {
        **STATE,
        "models": [{"a": shared[:5], "b": shared[5:]}, module],
        "optimizers": [{"again": shared, "own": torch.ones(7)}],
    }
    manifest = read_manifest(write_file(state, tmp_path / "state.pt"))
    sizes = {part.name: part.size for part in manifest.parts if part.record.count("/data/")}
    assert sizes == {
        "models/0/a": 40,
        **{f"models/1/{name}": t.numel() * t.element_size() for name, t in module.items()},
        "optimizers/0/own": 28,
    }


def test_a_tensor_of_another_layout_comes_back(tmp_path):
    state = {
        **STATE,
        "models": [{"a": torch.ones(2), "s": torch.eye(3).to_sparse(), "z": torch.ones(5)}],
    }
    path = write_file(state, tmp_path / "state.pt")
    assert torch.equal(read_file(path)["models"][0]["s"].to_dense(), torch.eye(3))
    names = [part.name for part in read_manifest(path).parts]
    assert "models/0/a" in names
    assert "data/1" in names  # and not z, which is none of the next two records


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


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", r"\(it is empty\)"),
        (b"epoch: 3\nhello\n", r"\(torch\.save has not written it\)"),
        (bytes(range(255)), r"\(torch\.save has not written it\)"),
        (written(STATE).read()[:-30], r"\(RuntimeError: \S+"),
    ],
)
def test_a_file_of_something_else_is_told_without_what_torch_stumbled_over(content, said):
    with pytest.raises(CheckpointError, match=said):
        tensors.read(HERE, io.BytesIO(content))


def test_state_that_would_not_load_again_is_told_with_whose_it_is():
    tensors.check_loadable("operator", None, HERE)
    tensors.check_loadable("operator", {"best": torch.ones(1)}, HERE)
    for owner, whose in (("operator", "the operator's state_dict"), ("callbacks", "callbacks' st")):
        with pytest.raises(CheckpointError, match=whose) as told:
            tensors.check_loadable(owner, {"day": datetime.date(2020, 1, 1)}, HERE)
        assert str(told.value).startswith("Cannot save to /folder/state.pt: ")
        assert "numbers, strings, lists, dicts or torch tensors" in str(told.value)
