"""Checkpoints as objects, and which of them stay."""

import os
import pickle
from pathlib import Path

import cloudpickle
import pytest

from raysgd.train import Checkpoint, CheckpointConfig, CheckpointStrategy


@pytest.mark.parametrize("keep", [-1, 1.5, True])
def test_a_wrong_number_to_keep_is_an_error(keep):
    for kind in (CheckpointStrategy, CheckpointConfig):
        with pytest.raises(ValueError, match="num_to_keep"):
            kind(num_to_keep=keep)


def test_an_unknown_order_is_an_error():
    with pytest.raises(ValueError, match='"max" or "min"'):
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
