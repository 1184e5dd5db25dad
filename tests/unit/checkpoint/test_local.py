"""Checkpoints on a local disk: complete or absent, even if system calls fail."""

import os
import stat
import tempfile
from pathlib import Path

import pytest
import torch

from raysgd.checkpoint import read_file, write_file
from raysgd.checkpoint.location import Location, UnreachableError
from raysgd.errors import CheckpointError
from tests.unit.checkpoint.processes import in_child
from tests.unit.checkpoint.states import STATE

# ---- writing


BIG = {**STATE, "epoch": 9, "models": [{"w": torch.zeros(400_000)}]}


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_the_file_mode_follows_the_umask(tmp_path, mask):
    held = os.umask(mask)
    try:
        path = write_file(STATE, tmp_path / "state.pt")
        assert os.umask(mask) == mask  # unchanged
    finally:
        os.umask(held)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o666 & ~mask


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_the_old_state_survives_whatever_step_fails(tmp_path, monkeypatch, step):
    path = write_file(STATE, tmp_path / "state.pt")

    def fail(*arguments):
        raise OSError("broken disk")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(CheckpointError, match="broken disk"):
        write_file({**STATE, "epoch": 9}, path)
    assert read_file(path)["epoch"] == 2
    assert os.listdir(tmp_path) == ["state.pt"]


def test_the_file_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append("fsync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("replace"), replace(*paths)))
    write_file(STATE, tmp_path / "state.pt")
    assert done == ["fsync", "replace", "fsync"]  # the last fsync is for the folder


# ---- paths, and failed writes


@pytest.mark.parametrize("name", ["x" * 300 + ".pt", "ring", "zero\0byte"])
def test_a_name_that_the_system_refuses_is_an_error_of_the_checkpoint(tmp_path, name):
    (tmp_path / "ring").symlink_to(tmp_path / "ring")
    with pytest.raises(CheckpointError):
        write_file(STATE, tmp_path / name)
    with pytest.raises(CheckpointError):
        read_file(tmp_path / name)


def test_a_link_stays_one_and_its_target_is_replaced(tmp_path):
    (tmp_path / "far").mkdir()
    link = tmp_path / "state.pt"
    link.symlink_to(tmp_path / "far" / "state.pt")
    assert write_file(STATE, link) == str(tmp_path / "far" / "state.pt")
    assert link.is_symlink()
    assert read_file(link)["epoch"] == 2
    assert os.listdir(tmp_path / "far") == ["state.pt"]


def test_missing_permission_is_named():
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    # other users cannot enter the folders of pytest
    with tempfile.TemporaryDirectory() as folder:
        path = write_file(STATE, f"{folder}/state.pt")
        os.chmod(folder, 0o755)
        os.chmod(path, 0o600)

        def as_nobody():
            os.chdir("/")
            os.setuid(65534)
            with pytest.raises(CheckpointError, match=f"save to {path}: Permission denied"):
                write_file(BIG, path)
            with pytest.raises(UnreachableError, match="Permission denied"):
                read_file(path)
            with pytest.raises(CheckpointError, match=f"make the folder {folder}: .*Permission"):
                Location(folder).make_folder()

        in_child(as_nobody)
        assert read_file(path)["epoch"] == 2
        assert os.listdir(folder) == ["state.pt"]


def test_a_path_is_local_and_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    for path in ("a/b.pt", Path("a/b.pt"), tmp_path / "a/b.pt", f"file://{tmp_path}/a/b.pt"):
        location = Location(path)
        assert location.is_local
        assert location.path == str(tmp_path / "a" / "b.pt")
    assert Location("~/x.pt").path == "/home/somebody/x.pt"


@pytest.mark.parametrize(
    ("error", "reason"), [(OSError(28, "disk full"), "disk full"), (ValueError("odd"), "odd")]
)
def test_a_failed_write_names_its_cause(tmp_path, error, reason):
    def fill(file):
        try:
            raise error
        finally:
            file.close()

    path = tmp_path / "state"
    with pytest.raises(CheckpointError, match=f"Cannot save to {path}: {reason}"):
        Location(path).write(fill)
    assert not any(tmp_path.iterdir())
