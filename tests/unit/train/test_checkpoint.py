"""Checkpoints as objects, and the strategies that select them."""

import os
import pickle
from pathlib import Path

import cloudpickle
import pytest

from raysgd import train
from raysgd.train import Checkpoint, CheckpointStrategy


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_to_keep", -1), ("num_to_keep", 1.5), ("checkpoint_score_order", "largest")],
)
def test_wrong_values_of_a_strategy_are_refused(name, value):
    with pytest.raises((TypeError, ValueError), match=name):
        CheckpointStrategy(**{name: value})


def test_values_survive_a_folder(tmp_path):
    for data in ({"epoch": 1}, {"_files": {"a": b"1"}, "epoch": 1}):
        folder = Checkpoint.from_dict(data).to_directory(tmp_path)
        assert Checkpoint.from_directory(folder).to_dict() == data


def test_files_and_the_files_that_links_point_to_survive_packing(tmp_path):
    folder, linked = tmp_path / "folder", tmp_path / "linked"
    (folder / "sub").mkdir(parents=True)
    linked.mkdir()
    (linked / "inside").write_bytes(b"3")
    (folder / "sub" / "w.bin").write_bytes(b"123")
    (folder / "link").symlink_to("sub/w.bin")
    (folder / "folder_link").symlink_to(linked)
    packed = pickle.loads(cloudpickle.dumps(Checkpoint.from_directory(folder)))
    with packed.as_directory() as again:
        found = {p.relative_to(again).as_posix(): p for p in Path(again).rglob("*") if p.is_file()}
        assert {name: path.read_bytes() for name, path in found.items()} == {
            "sub/w.bin": b"123",
            "link": b"123",
            "folder_link/inside": b"3",
        }
    assert not os.path.exists(again)


def test_a_path_may_start_at_home_and_the_users_folder_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Checkpoint.from_dict({"a": 1}).to_directory("~/a") == str(tmp_path / "a")
    with Checkpoint.from_directory("~/a").as_directory() as folder:
        assert folder == str(tmp_path / "a")
    assert Checkpoint.from_directory("~/a").to_dict() == {"a": 1}


@pytest.fixture(params=["dict", "folder", "file"])
def checkpoint(request, tmp_path):
    if request.param == "folder":
        (tmp_path / "weights").write_text("1")
        return Checkpoint.from_directory(tmp_path)
    if request.param == "file":
        (tmp_path / "checkpoint").write_bytes(pickle.dumps({"epoch": 1}))
        return Checkpoint(path=tmp_path / "checkpoint")
    return Checkpoint.from_dict({"epoch": 1})


def test_metadata_stay_with_a_checkpoint(run, checkpoint):
    queue = run()
    assert checkpoint.get_metadata() == {}
    checkpoint.set_metadata({"a": 1, "b": {"c": [2]}})
    checkpoint.update_metadata({"a": 3})
    expected = {"a": 3, "b": {"c": [2]}}
    assert checkpoint.get_metadata() == expected
    train.report({}, checkpoint=checkpoint)
    kept = Checkpoint(blob=queue.turns[0].checkpoint)
    assert kept.get_metadata() == train.get_checkpoint().get_metadata() == expected
    with kept.as_directory() as folder:
        assert Checkpoint.from_directory(folder).get_metadata() == expected
    checkpoint.set_metadata({})
    assert checkpoint.get_metadata() == {}


def test_checkpoints_have_the_metadata_of_the_trainer(run):
    queue = run(metadata={"size": 5, "kind": "small"})
    made = Checkpoint.from_dict({"epoch": 1})
    made.set_metadata({"kind": "own"})
    train.report({}, checkpoint=made)
    train.save_checkpoint(epoch=2)
    kept = [Checkpoint(blob=turn.checkpoint).get_metadata() for turn in queue.turns]
    assert kept == [{"size": 5, "kind": "own"}, {"size": 5, "kind": "small"}]
    assert train.load_checkpoint()["epoch"] == 2
