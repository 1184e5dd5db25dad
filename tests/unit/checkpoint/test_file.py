"""States in files: they load without running code from the file."""

import collections
import datetime
import json
import os
import pathlib
import pickle
import platform

import numpy as np
import pytest
import torch

from raysgd.checkpoint import Manifest, read_file, read_manifest, write_file
from raysgd.checkpoint import file as checkpoint_file
from raysgd.checkpoint.file import read_checkpoint
from raysgd.checkpoint.manifest import FORMAT
from raysgd.errors import CheckpointError
from raysgd.metrics import AverageMeterCollection
from tests.conftest import assert_names
from tests.unit.checkpoint.states import STATE, Code


def with_user_state(user_state):
    return {**STATE, "operator": user_state}


# ---- writing and reading


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (np.ones(3), "numpy.ndarray"),
        (pathlib.PurePosixPath("a"), "pathlib.PurePosixPath"),
        (datetime.date(2026, 1, 2), "datetime.date"),
        (np.random.default_rng(1), "numpy.random._generator.Generator"),
        (Code(), "tests.unit.checkpoint.states.Code"),
        (lambda: None, "builtins.function"),
        (object(), "builtins.object"),
    ],
)
def test_a_value_that_cannot_be_loaded_is_named_with_its_key(tmp_path, value, name):
    path = write_file(STATE, tmp_path / "state.pt")
    user_state = collections.OrderedDict(good=1, mine=[{"bad": value}])
    with pytest.raises(CheckpointError) as caught:
        write_file(with_user_state(user_state), path)
    assert read_file(path)["operator"] == STATE["operator"]
    assert os.listdir(tmp_path) == ["state.pt"]
    key = f"state_dict()['mine'][0]['bad'] has the type {name}."
    assert_names(caught.value, [key, "of the operator", "array.tolist()", "torch tensors"])


@pytest.mark.parametrize("make", [dict, collections.OrderedDict])
def test_numbers_of_numpy_and_of_results_come_back_as_numbers(tmp_path, make):
    meters = AverageMeterCollection()
    meters.update({"loss": 0.5}, n=2)
    best = make(loss=meters.summary()["loss"], score=np.float64(0.25))
    user_state = make(best=best, steps=(np.int64(3), [np.bool_(True), np.str_("x")]))
    state = read_file(write_file(with_user_state(user_state), tmp_path / "state.pt"))
    assert state["operator"] == {"best": {"loss": 0.5, "score": 0.25}, "steps": (3, [True, "x"])}
    assert {type(value) for value in state["operator"]["best"].values()} == {float}


def test_a_module_keeps_the_versions_of_its_state(tmp_path):
    model = torch.nn.BatchNorm1d(2)
    path = write_file({**STATE, "models": [model.state_dict()]}, tmp_path / "state.pt")
    assert read_file(path)["models"][0]._metadata == model.state_dict()._metadata


@pytest.mark.parametrize("key", ["callbacks", "models", "optimizers", "schedulers"])
def test_a_state_that_cannot_be_loaded_is_refused(tmp_path, key):
    with pytest.raises(CheckpointError, match=rf"state_dict\(\) of the {key} could not be"):
        write_file({**STATE, key: {"Own": [collections.defaultdict(list)]}}, tmp_path / "state.pt")
    assert os.listdir(tmp_path) == []


def test_types_that_the_user_allows_are_saved_and_loaded(tmp_path):
    state = with_user_state({"day": datetime.date(2020, 1, 1)})
    with torch.serialization.safe_globals([datetime.date]):
        path = write_file(state, tmp_path / "state.pt")
        assert read_file(path)["operator"] == state["operator"]


# ---- files that are no checkpoints


@pytest.mark.parametrize("kind", ["torch", "legacy", "sealed", "pickle"])
@pytest.mark.parametrize("key", ["operator", "models", "data"])
def test_code_in_a_file_is_refused_and_not_run(tmp_path, monkeypatch, kind, key):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "state.pt"
    state = {**STATE, key: Code()}
    if kind == "sealed":
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_file, "_load", lambda file: None)
            write_file(state, path)
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(state))
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "torch")
    with pytest.raises(CheckpointError, match=r"not allowed|not a checkpoint"):
        read_file(path)
    assert os.listdir(tmp_path) == ["state.pt"]


# ---- the manifest


def test_torch_opens_the_file_by_itself(tmp_path):
    path = write_file(STATE, tmp_path / "state.pt")
    for mmap in (False, True):
        state = torch.load(path, weights_only=True, mmap=mmap)
        assert torch.equal(state["models"][0]["weight"], torch.arange(4.0))
        assert state["operator"] == STATE["operator"]


def test_the_manifest_says_what_wrote_the_file_and_what_is_in_it(tmp_path):
    state = {**STATE, "global_step": 12, "optimizers": [{"state": {0: {"m": torch.ones(3)}}}]}
    path = write_file(
        state,
        tmp_path / "state.pt",
        Manifest(
            world_size=3,
            operator_name="Digits",
            experiment="first",
            metrics={"val_loss": 0.5, "odd": float("nan")},
        ),
    )
    manifest = read_manifest(path)
    assert (manifest.format, manifest.epoch, manifest.global_step) == (FORMAT, 2, 12)
    assert (manifest.experiment, manifest.operator_name) == ("first", "Digits")
    assert manifest.world_size == 3
    assert manifest.metrics["val_loss"] == 0.5
    assert manifest.metrics["odd"] != manifest.metrics["odd"]
    assert set(manifest.versions) - {"keras"} == {"raysgd", "torch", "python", "ray"}
    assert manifest.versions["python"] == platform.python_version()


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_of_an_older_library_loads_and_has_no_manifest(tmp_path, zipped):
    path = tmp_path / "state.pt"
    torch.save(STATE, path, _use_new_zipfile_serialization=zipped)
    state, manifest = read_checkpoint(path)
    assert torch.equal(state["models"][0]["weight"], torch.arange(4.0))
    assert manifest is None
    assert read_manifest(path) is None


def test_what_is_read_is_what_was_checked(tmp_path, monkeypatch):
    """Another file replaces the checkpoint between the check and the load."""
    path = tmp_path / "state.pt"
    write_file(STATE, path)
    check = checkpoint_file.verify

    def check_and_replace(*arguments, **keywords):
        manifest = check(*arguments, **keywords)
        path.unlink()
        path.write_bytes(b"nonsense")
        return manifest

    monkeypatch.setattr(checkpoint_file, "verify", check_and_replace)
    assert read_file(path)["epoch"] == 2


def test_a_newer_format_is_an_error_whatever_else_the_manifest_holds():
    with pytest.raises(CheckpointError, match=rf"raysgd 7 .* format {FORMAT + 1}, .* Update"):
        Manifest.from_json(json.dumps({"format": FORMAT + 1, "versions": {"raysgd": "7"}}).encode())


def test_additions_within_a_format_are_ignored():
    content = {**json.loads(Manifest(epoch=3).to_json()), "new": 1}
    assert Manifest.from_json(json.dumps(content).encode()).epoch == 3
