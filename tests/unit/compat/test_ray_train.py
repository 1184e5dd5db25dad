"""Names of Ray Train 1.13 and 2 on the classes of `raysgd.train`."""

import pickle
from dataclasses import dataclass
from pathlib import Path

import pytest

from raysgd import train
from raysgd.train import Checkpoint, DataParallelTrainer, Result, RunConfig, Trainer
from tests.unit.train.conftest import run

__all__ = ["run"]


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
    found = [Checkpoint(blob=turn.checkpoint).get_metadata() for turn in queue.turns]
    assert found == [{"size": 5, "kind": "own"}, {"size": 5, "kind": "small"}]
    assert train.load_checkpoint()["epoch"] == 2


def test_the_context_of_a_trial_is_that_of_the_run(run):
    assert train.get_context().get_trial_name() == ""
    run(name="mine", folder="/results/mine")
    context = train.get_context()
    found = (context.get_trial_name(), context.get_trial_id(), context.get_trial_dir())
    assert found == ("mine", "one", "/results/mine")


def test_a_result_has_its_folder():
    assert Result({}, None, path="/results/mine").log_dir == Path("/results/mine")


def test_a_trainer_has_the_path_of_the_newest_checkpoint(tmp_path):
    trainer = Trainer("torch", logdir=tmp_path)
    assert trainer.latest_checkpoint_path is trainer.get_latest_checkpoint() is None


def test_restore_takes_the_function_and_its_config_by_position(tmp_path):
    def first(config):
        pass

    def second(config):
        pass

    config = RunConfig(name="mine", storage_path=tmp_path)
    made = DataParallelTrainer(first, train_loop_config={"a": 1}, run_config=config)
    made._new_folder()
    changed = DataParallelTrainer.restore(tmp_path / "mine", second, {"a": 2})
    assert changed.train_loop_per_worker is second
    assert changed.train_loop_config == {"a": 2}
    kept = DataParallelTrainer.restore(tmp_path / "mine", train_loop_config={"a": 3})
    assert kept.train_loop_per_worker.__name__ == "first"
    assert kept.train_loop_config == {"a": 3}
    with pytest.raises(ValueError, match="longer"):
        DataParallelTrainer.restore(tmp_path / "mine", second, {}, 3)


@dataclass
class OldConfig:
    """The ``DatasetConfig`` of Ray 2.0."""

    split: bool | None = None


@pytest.mark.parametrize(
    ("defaults", "given", "expected"),
    [
        ({}, None, {"train": True, "val": False}),
        ({"val": True}, None, {"train": True, "val": True}),
        ({"train": OldConfig(), "*": OldConfig(True)}, None, {"train": True, "val": True}),
        ({"*": OldConfig(False)}, {"val": True}, {"train": False, "val": True}),
    ],
)
def test_a_subclass_may_have_defaults_for_the_data_sets_to_split(defaults, given, expected):
    class Mine(DataParallelTrainer):
        _dataset_config = defaults

    trainer = Mine(print_nothing, dataset_config=given)
    assert {name: trainer._is_split(name) for name in ("train", "val")} == expected


def print_nothing():
    pass


def test_callbacks_of_ray_are_refused_with_the_way():
    with pytest.raises(TypeError, match=r"TuneReportCallback, write a TrainingCallback"):
        DataParallelTrainer(print_nothing, run_config=RunConfig(callbacks=[object()]))
