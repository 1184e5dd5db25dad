"""Checkpoints as objects, and which of them stay."""

import os
import pickle
from pathlib import Path

import cloudpickle
import pytest

from raysgd.errors import CheckpointError
from raysgd.train import Checkpoint, CheckpointConfig, CheckpointStrategy


@pytest.mark.parametrize("keep", [-1, 1.5, True])
def test_a_wrong_number_to_keep_is_an_error(keep):
    for kind in (CheckpointStrategy, CheckpointConfig):
        with pytest.raises((TypeError, ValueError), match="num_to_keep"):
            kind(num_to_keep=keep)


def test_an_unknown_order_is_an_error():
    with pytest.raises(ValueError, match="one of 'max', 'min'"):
        CheckpointStrategy(checkpoint_score_order="largest")


def test_a_dict_survives_a_folder_and_a_folder_survives_a_dict(tmp_path):
    made = Checkpoint.from_dict({"epoch": 1})
    folder = made.to_directory(tmp_path / "a")
    assert Checkpoint.from_directory(folder).to_dict() == {"epoch": 1}

    (tmp_path / "b" / "sub").mkdir(parents=True)
    (tmp_path / "b" / "sub" / "w.bin").write_bytes(b"123")
    packed = Checkpoint.from_directory(tmp_path / "b").to_dict()
    again = Checkpoint.from_dict(packed)
    with again.as_directory() as folder:
        assert (Path(folder) / "sub" / "w.bin").read_bytes() == b"123"
    assert not os.path.exists(folder)


def test_no_file_is_written_outside_of_the_folder(tmp_path):
    target = tmp_path / "deep" / "in"
    target.mkdir(parents=True)
    (target / "link").symlink_to(tmp_path)
    for name in ("../../x", "a/../../x", str(tmp_path / "x"), "link/x"):
        for data in ({"_files": {"a": b"", name: b"1"}}, {"_files": {}, "_executable": [name]}):
            with pytest.raises(CheckpointError, match="would lie outside"):
                Checkpoint.from_dict(data).to_directory(target)
    assert [path.name for path in tmp_path.rglob("*")] == ["deep", "in", "link"]


def test_a_folder_comes_back_as_it_was(tmp_path):
    folder, again = tmp_path / "folder", tmp_path / "again"
    (folder / "sub" / "empty").mkdir(parents=True)
    for name, mode in (("run.sh", 0o755), ("data", 0o644)):
        (folder / name).write_bytes(b"1")
        (folder / name).chmod(mode)
    (folder / "linked").symlink_to("data")
    packed = pickle.loads(cloudpickle.dumps(Checkpoint.from_directory(folder)))
    packed.to_directory(again)
    assert sorted(path.relative_to(again).as_posix() for path in again.rglob("*")) == [
        "data", "linked", "run.sh", "sub", "sub/empty",
    ]  # fmt: skip
    assert [os.access(again / name, os.X_OK) for name in ("run.sh", "data")] == [True, False]


@pytest.mark.parametrize("to", [".", "nowhere"])
def test_a_link_that_a_checkpoint_cannot_hold_is_an_error(tmp_path, to):
    (tmp_path / "link").symlink_to(to)
    with pytest.raises(ValueError, match=r"link is neither: a link to a folder, a link to nothing"):
        Checkpoint.from_directory(tmp_path)


def test_a_folder_of_the_users_is_left_alone(tmp_path):
    with Checkpoint.from_directory(tmp_path).as_directory() as folder:
        assert folder == str(tmp_path)
    assert tmp_path.is_dir()


def test_metadata_goes_with_a_checkpoint():
    made = Checkpoint.from_dict({"a": 1})
    made.set_metadata({"by": "me"})
    again = pickle.loads(cloudpickle.dumps(made))
    assert again.to_dict() == {"a": 1}
    assert again.get_metadata() == {"by": "me"}


def test_what_is_said_about_a_stored_checkpoint_is_added_to_or_replaced(tmp_path):
    made = Checkpoint.from_dict({"a": 1})
    made.set_metadata({"by": "me"})
    stored = cloudpickle.dumps(made.packed())
    for change, said in (
        (lambda c: c.update_metadata({"at": 3}), {"by": "me", "at": 3}),
        (lambda c: c.update_metadata({"by": "you"}), {"by": "you"}),
        (lambda c: c.set_metadata({"at": 3}), {"at": 3}),
        (lambda c: c.set_metadata({}), {}),
    ):
        again = Checkpoint(blob=stored)
        change(again)
        assert again.get_metadata() == said
        assert pickle.loads(cloudpickle.dumps(again)).get_metadata() == said
        assert again.to_dict() == {"a": 1}


def test_a_folder_may_be_named_from_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert Checkpoint.from_dict({"a": 1}).to_directory("~/a") == str(tmp_path / "a")
    assert Checkpoint.from_directory("~/a").to_dict() == {"a": 1}
    assert os.listdir(tmp_path) == ["a"]


def test_values_beside_files_are_not_lost_in_a_folder(tmp_path):
    data = {"_files": {"a": b"1"}, "epoch": 1}
    folder = Checkpoint.from_dict(data).to_directory(tmp_path)
    assert Checkpoint.from_directory(folder).to_dict() == data


def test_a_name_that_is_taken_is_an_error():
    with pytest.raises(ValueError, match=r"'_metadata' is taken.*set_metadata"):
        Checkpoint.from_dict({"_metadata": {}, "a": 1})
