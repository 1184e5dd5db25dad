"""Checkpoints as objects, which checkpoints of a run stay, and what a run may start from."""

import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import pytest

from raysgd import train
from raysgd._internal.values import flatten_scalars
from raysgd.checkpoint.file import write_pickle
from raysgd.checkpoint.manifest import Manifest
from raysgd.errors import CheckpointError
from raysgd.train import Checkpoint, CheckpointStrategy
from raysgd.train.backend import BackendConfig, BackendExecutor
from raysgd.train.checkpoint import RunCheckpoints
from raysgd.train.result_queue import TrainingResult


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


# ---- the checkpoints of a run


def keep(checkpoints, *states):
    for state in states:
        numbers, blob = {"_timestamp": 1.0, **flatten_scalars(state)}, cloudpickle.dumps(state)
        checkpoints.save([TrainingResult("checkpoint", None, blob, True, numbers=numbers)] * 2)


def numbers_in(folder):
    """Return the numbers of the checkpoints on disk."""
    return sorted(int(name.removeprefix("checkpoint_")) for name in os.listdir(folder))


def test_checkpoints_are_numbered_files_that_pickle_reads(tmp_path):
    checkpoints = RunCheckpoints(tmp_path / "checkpoints", number=100)
    keep(checkpoints, {"epoch": 0}, {"epoch": 1})
    assert (checkpoints.number, checkpoints.latest) == (102, {"epoch": 1})
    assert checkpoints.latest_path == tmp_path / "checkpoints" / "checkpoint_000102"
    with checkpoints.latest_path.open("rb") as file:  # as old scripts read it
        assert cloudpickle.load(file) == {"epoch": 1}


def test_the_best_stay_and_until_the_run_ends_also_the_newest(tmp_path):
    checkpoints = RunCheckpoints(tmp_path, CheckpointStrategy(2.0, "loss", "min"))
    keep(checkpoints, *({"loss": loss} for loss in (2.0, 4.0, 1.0, 3.0)))
    assert numbers_in(tmp_path) == [1, 3, 4]
    checkpoints.finish()
    assert numbers_in(tmp_path) == [1, 3]
    assert (checkpoints.best_path.name, checkpoints.latest) == ("checkpoint_000003", {"loss": 3.0})


@pytest.mark.parametrize("score", ["loss", "_timestamp", None])
def test_the_newer_of_equals_stays(tmp_path, caplog, score):
    checkpoints = RunCheckpoints(tmp_path, CheckpointStrategy(2, score))
    keep(checkpoints, *({"loss": 1.0, "_timestamp": clock} for clock in (3.0, 2.0, 1.0)))
    checkpoints.finish()
    assert numbers_in(tmp_path) == [2, 3]
    assert not caplog.messages


def test_a_checkpoint_without_a_score_is_an_error_and_is_stored(tmp_path):
    executor = BackendExecutor(BackendConfig())
    executor.checkpoints = RunCheckpoints(tmp_path, CheckpointStrategy(1, "accuracy"))
    keep(executor.checkpoints, {"epoch": 1, "accuracy": 1})
    with pytest.raises(ValueError, match=r"'accuracy': checkpoint_000002 has no .* epoch"):
        keep(executor.checkpoints, {"epoch": 2})
    assert executor.latest_checkpoint == {"epoch": 2}
    again = RunCheckpoints(tmp_path, CheckpointStrategy(1, "accuracy"))
    assert again.restore() is not None
    assert again.latest == {"epoch": 2}


@pytest.mark.parametrize("in_memory", [False, True])
def test_without_files_the_newest_is_held_in_memory_as_the_backend_decodes_it(tmp_path, in_memory):
    folder = tmp_path / "c"
    checkpoints = RunCheckpoints(
        None if in_memory else folder,
        CheckpointStrategy(1 if in_memory else 0, "missing"),
        decode=lambda data: {name: value + 1 for name, value in data.items()},
    )
    assert checkpoints.latest is None
    keep(checkpoints, {"epoch": 1}, {"epoch": 2})
    assert (checkpoints.number, checkpoints.latest) == (2, {"epoch": 3})
    assert checkpoints.latest_path is checkpoints.best_path is None
    assert not folder.exists()


def test_a_checkpoint_that_cannot_be_written_is_an_error_and_uses_no_number(tmp_path):
    (tmp_path / "file").write_text("")
    checkpoints = RunCheckpoints(tmp_path / "file" / "checkpoints")
    with pytest.raises(CheckpointError):
        keep(checkpoints, {"loss": 1.0})
    assert checkpoints.number == 0


def test_a_run_starts_from_a_dict_a_checkpoint_or_a_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_pickle(cloudpickle.dumps({"a": 1}), tmp_path / "file", Manifest())
    folder = (made := Checkpoint.from_dict({"a": 1})).to_directory(tmp_path / "folder")
    of_ray = SimpleNamespace(as_directory=made.as_directory)
    for given in ({"a": 1}, made, Checkpoint(folder), of_ray, tmp_path / "file", folder, "~/file"):
        assert Checkpoint.from_any(given).to_dict() == {"a": 1}
    write_pickle(cloudpickle.dumps([1]), tmp_path / "list", Manifest())
    for wrong in (3, tmp_path / "list", "s3://bucket/file"):
        with pytest.raises((TypeError, ValueError), match=r"must (be|have) a dict|not a URL"):
            Checkpoint.from_any(wrong).to_dict()
    with pytest.raises(CheckpointError, match="no such file"):
        Checkpoint.from_any(tmp_path / "nothing").to_dict()
    with pytest.raises(TypeError, match=r"checkpoint_strategy=\{.*must be a CheckpointStrategy"):
        RunCheckpoints(strategy={"num_to_keep": 2})


def test_a_new_process_continues_with_the_checkpoints_on_disk(tmp_path):
    keep(RunCheckpoints(tmp_path), {"epoch": 0}, {"epoch": 1}, {"epoch": 2})
    found = RunCheckpoints(tmp_path, CheckpointStrategy(checkpoint_score_attribute="epoch"))
    assert found.restore().metrics["epoch"] == 2
    assert (found.number, found.latest) == (3, {"epoch": 2})
    assert found.best_path.name == "checkpoint_000003"
    assert [numbers["epoch"] for _, numbers in found.best_checkpoints()] == [2, 1, 0]
    assert RunCheckpoints(tmp_path / "none").restore() is None
