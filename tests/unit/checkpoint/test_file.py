"""One state in one file: whole or not at all, and read without running code from it."""

import collections
import datetime
import os
import pickle
import stat

import numpy as np
import pytest
import torch

from raysgd.checkpoint import check_writable, read_file, write_file
from raysgd.checkpoint import file as checkpoint_file
from raysgd.errors import CheckpointError

STATE = {
    "epoch": 2,
    "models": [{"weight": torch.arange(4.0)}],
    "optimizers": [{"state": {}, "param_groups": [{"lr": 0.1}]}],
    "operator": {"best": 0.5, "names": ["a", ("b", None)]},
}


class Code:
    """What runs code when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def with_user_state(user_state):
    return {**STATE, "operator": user_state}


# ---- writing and reading


def test_a_state_comes_back(tmp_path):
    path = write_file(STATE, tmp_path / "state.pt")
    state = read_file(path)
    assert torch.equal(state["models"][0]["weight"], torch.arange(4.0))
    assert state["operator"] == STATE["operator"]
    assert state["epoch"] == 2


def test_the_path_comes_back_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert write_file(STATE, "state.pt") == tmp_path / "state.pt"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert write_file(STATE, "~/home.pt") == tmp_path / "home.pt"
    assert read_file("~/home.pt")["epoch"] == 2


def test_a_file_there_is_replaced_and_nothing_else_is_left(tmp_path):
    for epoch in (1, 2):
        write_file({**STATE, "epoch": epoch}, tmp_path / "state.pt")
    assert read_file(tmp_path / "state.pt")["epoch"] == 2
    assert os.listdir(tmp_path) == ["state.pt"]


def test_a_name_may_have_blanks_dots_and_other_letters(tmp_path):
    path = tmp_path / ".my state.v1 größte.pt"
    assert read_file(write_file(STATE, path))["epoch"] == 2


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_the_file_has_the_mode_of_a_file_that_the_user_makes(tmp_path, mask):
    held = os.umask(mask)
    try:
        path = write_file(STATE, tmp_path / "state.pt")
        assert os.umask(mask) == mask  # and the mask is still there
    finally:
        os.umask(held)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


@pytest.mark.parametrize("make", [dict, collections.OrderedDict])
def test_numpy_numbers_come_back_as_numbers(tmp_path, make):
    user_state = make(best=np.float64(0.5), steps=(np.int64(3), [np.bool_(True), np.str_("x")]))
    state = read_file(write_file(with_user_state(user_state), tmp_path / "state.pt"))
    assert dict(state["operator"]) == {"best": 0.5, "steps": (3, [True, "x"])}
    assert type(state["operator"]["best"]) is float


def test_a_module_keeps_the_versions_of_its_state(tmp_path):
    model = torch.nn.BatchNorm1d(2)
    path = write_file({**STATE, "models": [model.state_dict()]}, tmp_path / "state.pt")
    assert read_file(path)["models"][0]._metadata == model.state_dict()._metadata


# ---- a failing write


@pytest.mark.parametrize("error", [OSError(28, "No space left"), RuntimeError("write failed")])
def test_the_old_state_survives_a_failing_write(tmp_path, monkeypatch, error):
    path = write_file(STATE, tmp_path / "state.pt")

    def fail(state, file):
        file.write(b"half of it")
        raise error

    monkeypatch.setattr(checkpoint_file, "_check_loadable", lambda *arguments: None)
    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(CheckpointError, match="Cannot save to") as caught:
        write_file({**STATE, "epoch": 9}, path)
    assert caught.value.__cause__ is error
    assert read_file(path)["epoch"] == 2
    assert os.listdir(tmp_path) == ["state.pt"]


@pytest.mark.parametrize("step", ["fsync", "chmod", "replace"])
def test_the_old_state_survives_whatever_step_fails(tmp_path, monkeypatch, step):
    path = write_file(STATE, tmp_path / "state.pt")

    def fail(*arguments):
        raise OSError("broken disk")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(CheckpointError, match="broken disk"):
        write_file({**STATE, "epoch": 9}, path)
    assert read_file(path)["epoch"] == 2
    assert os.listdir(tmp_path) == ["state.pt"]


def test_an_interrupted_write_leaves_no_half_file(tmp_path, monkeypatch):
    def interrupt(state, file):
        file.write(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_file, "_check_loadable", lambda *arguments: None)
    monkeypatch.setattr(torch, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_file(STATE, tmp_path / "state.pt")
    assert os.listdir(tmp_path) == []


def test_the_file_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append("fsync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("replace"), replace(*paths)))
    write_file(STATE, tmp_path / "state.pt")
    assert done[:2] == ["fsync", "replace"]


def test_what_cannot_be_pickled_is_an_error_of_the_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="Cannot save to"):
        write_file({**STATE, "models": [{"hook": lambda: None}]}, tmp_path / "state.pt")
    assert os.listdir(tmp_path) == []


# ---- user state that could not be loaded


@pytest.mark.parametrize(
    "value",
    [datetime.date(2020, 1, 1), np.zeros(2), Code(), lambda: None, object()],
    ids=["date", "array", "code", "lambda", "object"],
)
def test_user_state_that_would_not_load_is_refused_when_it_is_saved(tmp_path, value):
    path = write_file(STATE, tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match=r"state_dict\(\).*could not be\s+loaded"):
        write_file(with_user_state({"value": value}), path)
    assert read_file(path)["operator"] == STATE["operator"]
    assert os.listdir(tmp_path) == ["state.pt"]


@pytest.mark.parametrize(
    "value",
    [torch.ones(3), [1], "text", 7, None, {}],
    ids=["tensor", "list", "str", "int", "none", "dict"],
)
def test_user_state_need_not_be_a_dict(tmp_path, value):
    state = read_file(write_file(with_user_state(value), tmp_path / "state.pt"))
    assert str(state["operator"]) == str(value)


def test_types_that_the_user_allows_are_saved_and_loaded(tmp_path):
    state = with_user_state({"day": datetime.date(2020, 1, 1)})
    with torch.serialization.safe_globals([datetime.date]):
        path = write_file(state, tmp_path / "state.pt")
        assert read_file(path)["operator"] == state["operator"]


# ---- where nothing can be written


def test_a_missing_folder_is_named(tmp_path):
    for function in (check_writable, lambda path: write_file(STATE, path)):
        with pytest.raises(CheckpointError, match=r"folder .*missing does not exist; create it"):
            function(tmp_path / "missing" / "state.pt")


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(CheckpointError, match="it is a folder; give the name of a file"):
        write_file(STATE, tmp_path)
    with pytest.raises(CheckpointError, match="it is a folder"):
        read_file(tmp_path)


def test_a_folder_without_permission_is_named(tmp_path, monkeypatch):
    """What the system would say to another user than root."""
    monkeypatch.setattr(checkpoint_file.os, "access", lambda path, mode: False)
    with pytest.raises(CheckpointError, match="no permission to write into"):
        check_writable(tmp_path / "state.pt")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="no permission"):
        write_file(STATE, tmp_path / "state.pt")


def test_checking_a_path_makes_nothing(tmp_path):
    assert check_writable(tmp_path / "state.pt") == tmp_path / "state.pt"
    assert os.listdir(tmp_path) == []


# ---- files that are no checkpoints


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"state\.pt: there is no such file"):
        read_file(tmp_path / "state.pt")


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_an_error_and_not_a_crash(tmp_path, part):
    path = write_file({**STATE, "models": [{"w": torch.randn(5000)}]}, tmp_path / "state.pt")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * part)])
    with pytest.raises(CheckpointError, match="damaged or is not a checkpoint"):
        read_file(path)


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04nonsense", bytes(1000)])
def test_a_file_of_something_else_is_an_error(tmp_path, content):
    path = tmp_path / "state.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged or is not a checkpoint"):
        read_file(path)


def test_a_damaged_tensor_is_an_error(tmp_path):
    path = write_file({**STATE, "models": [{"w": torch.ones(5000)}]}, tmp_path / "state.pt")
    content = bytearray(path.read_bytes())
    place = content.find(torch.ones(64).numpy().tobytes())
    assert place > 0
    content[place + 100] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(CheckpointError):
        read_file(path)


@pytest.mark.parametrize("kind", ["torch", "pickle"])
def test_code_in_a_file_is_refused_and_not_run(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "state.pt"
    state = {**STATE, "operator": Code()}
    if kind == "torch":
        torch.save(state, path)
    else:
        path.write_bytes(pickle.dumps(state))
    with pytest.raises(CheckpointError, match=r"not allowed|not a checkpoint"):
        read_file(path)
    assert os.listdir(tmp_path) == ["state.pt"]


def test_an_object_of_another_type_is_refused_with_the_way_to_allow_it(tmp_path):
    torch.save({**STATE, "operator": datetime.date(2020, 1, 1)}, tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match="add_safe_globals"):
        read_file(tmp_path / "state.pt")


@pytest.mark.parametrize(
    ("state", "missing"),
    [
        ({"models": [], "epoch": 1}, "optimizers"),
        ({"weight": torch.ones(1)}, "models, optimizers, epoch"),
        ([1, 2], "models, optimizers, epoch"),
        (torch.ones(1), "models, optimizers, epoch"),
    ],
)
def test_a_file_that_is_no_state_of_a_trainer_says_what_is_missing(tmp_path, state, missing):
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match=f"no state of a trainer, {missing} missing"):
        read_file(tmp_path / "state.pt")


def test_a_file_without_permission_is_an_error_of_the_checkpoint(tmp_path, monkeypatch):
    path = write_file(STATE, tmp_path / "state.pt")

    def refuse(*arguments, **keywords):
        raise PermissionError("not yours")

    monkeypatch.setattr(torch, "load", refuse)
    with pytest.raises(CheckpointError, match="not yours"):
        read_file(path)
