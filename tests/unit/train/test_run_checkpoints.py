"""The checkpoints of a run: which of them stay, and what a run may start from."""

import itertools
import os
import pickle

import cloudpickle
import pytest

from raysgd.checkpoint.file import write_pickle
from raysgd.checkpoint.manifest import Manifest
from raysgd.errors import CheckpointError
from raysgd.train import Checkpoint, CheckpointStrategy
from raysgd.train.report_queue import Turn
from raysgd.train.run_checkpoints import RunCheckpoints, packed_checkpoint
from tests.unit.checkpoint.states import flip


def turn(**numbers):
    return Turn("checkpoint", numbers={"_timestamp": 1.0, **numbers}, names=(*numbers, "text"))


def kept(checkpoints, **state):
    checkpoints.keep(turn(**state), cloudpickle.dumps(state), world_size=2)


def test_checkpoints_are_numbered_and_lie_where_the_run_is(tmp_path):
    checkpoints = RunCheckpoints(tmp_path / "checkpoints", number=100)
    kept(checkpoints, epoch=0)
    kept(checkpoints, epoch=1)
    assert checkpoints.number == 102
    assert checkpoints.latest == {"epoch": 1}
    assert checkpoints.latest_path == tmp_path / "checkpoints" / "checkpoint_000102"
    with checkpoints.latest_path.open("rb") as file:  # as old scripts read it
        assert cloudpickle.load(file) == {"epoch": 1}


def test_the_best_stay_and_the_newest_until_the_run_ends(tmp_path):
    strategy = CheckpointStrategy(2, "loss", "min")
    checkpoints = RunCheckpoints(tmp_path, strategy)
    for loss in (2.0, 4.0, 1.0, 3.0):
        kept(checkpoints, loss=loss)
    assert sorted(os.listdir(tmp_path)) == [f"checkpoint_00000{n}" for n in (1, 3, 4)]
    checkpoints.finish()
    assert sorted(os.listdir(tmp_path)) == [f"checkpoint_00000{n}" for n in (1, 3)]
    assert checkpoints.best_path.name == "checkpoint_000003"
    assert checkpoints.latest == {"loss": 3.0}


@pytest.mark.parametrize("order", ["max", "min"])
@pytest.mark.parametrize("losses", list(itertools.permutations([-5.0, float("nan"), -6.0])))
def test_not_a_number_is_worst(tmp_path, losses, order):
    checkpoints = RunCheckpoints(tmp_path, CheckpointStrategy(1, "loss", order))
    for loss in losses:
        kept(checkpoints, loss=loss)
    checkpoints.finish()
    best = losses.index(-5.0 if order == "max" else -6.0) + 1
    assert os.listdir(tmp_path) == [f"checkpoint_00000{best}"]


@pytest.mark.parametrize(
    ("name", "said"), [("accuracy", "of that name."), ("text", "another value.")]
)
def test_a_checkpoint_without_a_score_is_the_worst_and_warned_about_once(
    tmp_path, caplog, name, said
):
    checkpoints = RunCheckpoints(tmp_path, CheckpointStrategy(2, name))
    for epoch in range(4):
        kept(checkpoints, epoch=epoch, **({name: epoch} if epoch == 1 else {}))
    checkpoints.finish()
    assert checkpoints.best_path.name == "checkpoint_000002"
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "checkpoint_000002",
        "checkpoint_000004",
    ]
    (warning,) = caplog.messages
    assert said in warning
    assert warning.endswith("There is epoch, text.")


def test_none_are_written_where_none_are_to_be_kept(tmp_path):
    checkpoints = RunCheckpoints(tmp_path / "c", CheckpointStrategy(0, "missing"))
    kept(checkpoints, loss=1.0)
    assert checkpoints.latest == {"loss": 1.0}
    assert checkpoints.latest_path is None
    assert checkpoints.best_path is None
    assert not (tmp_path / "c").exists()


def test_a_checkpoint_that_cannot_be_written_is_an_error_and_no_number_is_used(tmp_path):
    (tmp_path / "file").write_text("")
    checkpoints = RunCheckpoints(tmp_path / "file" / "checkpoints")
    with pytest.raises(CheckpointError):
        kept(checkpoints, loss=1.0)
    assert checkpoints.number == 0


def test_what_was_encoded_is_decoded_before_it_is_kept(tmp_path):
    checkpoints = RunCheckpoints(tmp_path, decode=lambda data: {k: v + 1 for k, v in data.items()})
    kept(checkpoints, loss=1.0)
    assert checkpoints.latest == {"loss": 2.0}


def test_without_a_folder_the_newest_is_held_in_memory():
    checkpoints = RunCheckpoints(None, CheckpointStrategy(1, "missing"))
    assert checkpoints.latest is None
    kept(checkpoints, epoch=1)
    kept(checkpoints, epoch=2)
    assert (checkpoints.number, checkpoints.latest) == (2, {"epoch": 2})
    assert checkpoints.latest is checkpoints.latest, "it is unpickled once"
    assert checkpoints.latest_path is None


def test_what_a_run_may_start_from(tmp_path):
    write_pickle(cloudpickle.dumps({"a": 1}), tmp_path / "file", Manifest())
    made = Checkpoint.from_dict({"a": 1})
    folder = made.to_directory(tmp_path / "folder")
    for given in ({"a": 1}, made, tmp_path / "file", str(tmp_path / "file"), folder):
        assert pickle.loads(packed_checkpoint(given)) == {"a": 1}
    with pytest.raises(TypeError, match="must be a dict"):
        packed_checkpoint(3)
    with pytest.raises(CheckpointError, match="no such file"):
        packed_checkpoint(tmp_path / "nothing")


def test_a_run_may_start_from_nothing():
    assert packed_checkpoint(None) is None


def test_a_path_may_be_named_from_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_pickle(cloudpickle.dumps({"a": 1}), tmp_path / "file", Manifest())
    Checkpoint.from_dict({"a": 1}).to_directory(tmp_path / "folder")
    for given in ("~/file", "~/folder"):
        assert pickle.loads(packed_checkpoint(given)) == {"a": 1}


def test_a_strategy_of_another_kind_is_an_error():
    with pytest.raises(TypeError, match=r"checkpoint_strategy=\{.*must be a CheckpointStrategy"):
        RunCheckpoints(strategy={"num_to_keep": 2})


def test_what_an_earlier_process_left_is_found_again(tmp_path):
    checkpoints = RunCheckpoints(tmp_path)
    for epoch in range(3):
        kept(checkpoints, epoch=epoch)
    found = RunCheckpoints(tmp_path, CheckpointStrategy(checkpoint_score_attribute="epoch"))
    assert found.restore().metrics["epoch"] == 2
    assert (found.number, found.latest) == (3, {"epoch": 2})
    assert found.best_path.name == "checkpoint_000003"
    assert [entry.path.name[-1] for entry in found.reported()] == ["1", "2", "3"]
    assert RunCheckpoints(tmp_path / "none").restore() is None


def test_a_damaged_one_is_passed_over(tmp_path, caplog):
    for epoch in range(2):
        kept(RunCheckpoints(tmp_path, number=epoch), epoch=epoch)
    flip(tmp_path / "checkpoint_000002", 0)
    found = RunCheckpoints(tmp_path)
    found.restore()
    assert (found.number, found.latest) == (1, {"epoch": 0})
    assert "Skipped" in caplog.text
    assert "checkpoint_000002" in caplog.text


def test_the_newer_of_equals_stays(tmp_path):
    checkpoints = RunCheckpoints(tmp_path, CheckpointStrategy(2, "loss"))
    for _ in range(3):
        kept(checkpoints, loss=1.0)
    checkpoints.finish()
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_000002", "checkpoint_000003"]
