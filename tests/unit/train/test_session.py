"""What a training function calls, with a handover that needs no driver."""

import multiprocessing
import os
import pickle

import numpy as np
import pytest
import ray.train
import torch

from raysgd import train
from raysgd.errors import CheckpointError
from raysgd.train import constants, session
from raysgd.train.checkpoint import Checkpoint


def own(state):
    """Return what was saved, without the time that is added."""
    assert state["_timestamp"] > 1e9
    return {name: value for name, value in state.items() if name != "_timestamp"}


def test_only_worker_0_sends_what_it_saves_and_every_one_waits_until_it_is_safe(run):
    for rank in (0, 1):
        taken = run(rank=rank)
        train.save_checkpoint(epoch=rank, model={"w": [1, 2]})
        (turn,) = taken.safe
        assert turn.has_checkpoint
        assert (turn.checkpoint is not None) == (rank == 0)
        assert turn.numbers["epoch"] == rank
        assert own(train.load_checkpoint()) == {"epoch": rank, "model": {"w": [1, 2]}}


def test_a_checkpoint_is_as_it_was_when_it_was_saved(run):
    taken = run()
    weights = [1.0]
    train.save_checkpoint(weights=weights)
    weights[0] = 2.0
    assert own(pickle.loads(taken.turns[0].checkpoint)) == {"weights": [1.0]}
    assert own(train.load_checkpoint()) == {"weights": [1.0]}


@pytest.mark.parametrize("size", [1, 100_000])
def test_a_report_has_the_values_at_the_time_of_the_call(run, size):
    taken = run()
    running, losses = torch.zeros(size), [0.5]
    train.report(running=running, losses=losses)
    running += 1
    losses.append(0.25)
    found = taken.turns[0].metrics
    assert found["running"].sum() == 0
    assert found["losses"] == [0.5]


def test_a_checkpoint_that_is_uploaded_later_is_scored_by_the_values_of_its_report(run, folder):
    def upload(checkpoint, name):
        return checkpoint

    taken, loss = run(), np.array([0.5])
    made, mode = Checkpoint.from_directory(folder), train.CheckpointUploadMode.ASYNC
    options = {"checkpoint_upload_fn": upload, "checkpoint_upload_mode": mode}
    train.report({"loss": loss}, checkpoint=made, **options)
    loss[0] = 0.25
    train.report({})
    assert taken.turns[0].numbers["loss"] == 0.5


def test_what_cannot_be_pickled_is_an_error_in_the_function(run):
    run()
    with pytest.raises(TypeError, match=r"the metric 'lock' cannot be pickled: .* plain values"):
        train.report(loss=0.5, lock=__import__("threading").Lock())
    with pytest.raises(TypeError, match="must be picklable"):
        train.save_checkpoint(lock=__import__("threading").Lock())


def test_a_forked_process_cannot_report_or_save(run):
    """It used to wait forever, since the driver never took its second report."""
    taken = run()
    context = multiprocessing.get_context("fork")
    raised = context.SimpleQueue()

    def child():
        for call in (train.report, train.save_checkpoint):
            try:
                call(a=1)
            except RuntimeError as error:
                raised.put(str(error))

    process = context.Process(target=child)
    process.start()
    process.join()
    for _ in range(2):
        assert "report there" in raised.get()
    train.report(a=1)
    assert len(taken.turns) == 1


def test_a_run_goes_on_from_a_checkpoint(run):
    run(checkpoint=pickle.dumps({"epoch": 4}), iteration=5)
    assert train.load_checkpoint() == {"epoch": 4}
    assert train.get_checkpoint().to_dict() == {"epoch": 4}


def test_iterations_are_counted_on(run):
    taken = run(iteration=5)
    train.report(a=1)
    assert taken.turns[0].metrics["_training_iteration"] == 6


def test_a_report_with_a_checkpoint_is_held_until_it_is_safe(run):
    taken = run(rank=1)
    train.report({"loss": 0.5}, checkpoint=Checkpoint.from_dict({"w": 1}))
    (turn,) = taken.safe
    assert turn.kind == "report"
    assert turn.numbers["loss"] == 0.5
    assert pickle.loads(session.current().sent) == {"w": 1}


def test_what_a_backend_encodes_is_sent_and_what_was_saved_is_loaded(run):
    taken = run(encode=pickle.dumps)
    train.save_checkpoint(epoch=1)
    train.report(epoch=1)
    assert own(pickle.loads(pickle.loads(taken.turns[0].checkpoint))) == {"epoch": 1}
    assert own(train.load_checkpoint()) == {"epoch": 1}
    reported = pickle.loads(taken.turns[1].metrics)
    assert reported.keys() == {"epoch", *constants.BASIC_AUTOFILLED_KEYS}


def test_where_a_report_comes_from_is_said_if_the_drivers_environment_asks_for_it(run, monkeypatch):
    monkeypatch.setenv("TRAIN_RESULT_ENABLE_DETAILED_AUTOFILLED_METRICS", "1")
    taken = run()
    monkeypatch.undo()  # as on a worker
    train.report(a=1)
    found = taken.turns[0].metrics
    names = constants.BASIC_AUTOFILLED_KEYS | constants.DETAILED_AUTOFILLED_KEYS
    assert found.keys() == {"a", *names}
    assert (found["_pid"], found["_hostname"]) == (os.getpid(), os.uname().nodename)


# ---- how a checkpoint is kept, in the words of today's Ray Train


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "made"
    made.mkdir()
    (made / "model.txt").write_text("weights")
    return made


def kept(taken):
    return Checkpoint(blob=taken.turns[-1].checkpoint).to_dict()


FILES = {"_files": {"model.txt": b"weights"}}


@pytest.mark.parametrize("modes", [train.CheckpointUploadMode, ray.train.CheckpointUploadMode])
def test_a_checkpoint_is_kept_before_the_report_returns_or_beside_the_function(run, folder, modes):
    taken, made = run(), Checkpoint.from_directory(folder)
    train.report({}, checkpoint=made, checkpoint_upload_mode=modes.SYNC)
    assert taken.safe == taken.turns
    assert folder.exists()
    train.report({}, checkpoint=made, checkpoint_upload_mode=modes.ASYNC)
    assert len(taken.turns) == 2
    assert len(taken.safe) == 1
    assert taken.waited == [taken.turns[0]]  # whose checkpoint may still have been asked for
    assert kept(taken) == FILES
    assert not folder.exists()


def test_a_checkpoint_may_stay_where_it_is(run, folder):
    taken = run(metadata={"by": "me"})
    mode = train.CheckpointUploadMode.NO_UPLOAD
    train.report({}, checkpoint=Checkpoint.from_directory(folder), checkpoint_upload_mode=mode)
    assert b"weights" not in taken.turns[0].checkpoint
    assert kept(taken) == train.load_checkpoint() == FILES
    assert train.get_checkpoint().get_metadata() == {"by": "me"}
    (folder / "model.txt").unlink()
    folder.rmdir()
    with pytest.raises(CheckpointError):
        train.load_checkpoint()
    with pytest.raises(ValueError, match="a folder that this node can read"):
        train.report({}, checkpoint=Checkpoint.from_dict({}), checkpoint_upload_mode=mode)


@pytest.mark.parametrize("mode", ["SYNC", "ASYNC"])
def test_a_function_of_ones_own_puts_a_checkpoint_where_it_shall_be(run, folder, tmp_path, mode):
    def upload(checkpoint, name):
        with checkpoint.as_directory() as made:
            os.rename(made, tmp_path / name)
        return Checkpoint.from_directory(tmp_path / name)

    taken = run()
    made = Checkpoint.from_directory(folder)
    options = {"checkpoint_upload_fn": upload, "checkpoint_upload_mode": mode}
    train.report(metrics={"a": 1}, checkpoint=made, checkpoint_dir_name="first", **options)
    train.report({"a": 2})
    assert [turn.metrics["a"] for turn in taken.turns] == [1, 2]
    assert [turn.iteration for turn in taken.turns] == [1, 2]
    assert Checkpoint(blob=taken.turns[0].checkpoint).to_dict() == FILES
    assert (tmp_path / "first").is_dir()


def test_names_of_options_are_metrics_where_these_are_given_by_name(run):
    taken = run()
    train.report(validation=0.5, checkpoint_dir_name=3)
    assert taken.turns[0].metrics["validation"] == 0.5
    assert taken.turns[0].metrics["checkpoint_dir_name"] == 3


def test_options_that_cannot_be_meant_are_refused(run, folder):
    taken, made = run(experiment={"dir": str(folder / "run")}), Checkpoint.from_directory(folder)
    for options, said in (
        ({"checkpoint_upload_mode": "LATER"}, "one of CheckpointUploadMode: ASYNC, SYNC, NO_UPL"),
        ({"delete_local_checkpoint_after_upload": True}, "has the folder of the run in it"),
        ({"validation": True}, "validation_config=ValidationConfig"),
        ({"validation": True, "checkpoint": None}, "pass checkpoint="),
    ):
        with pytest.raises(ValueError, match=said):
            train.report({"a": 1}, **{"checkpoint": made, **options})
    with pytest.raises(TypeError, match="True, False or a ValidationTaskConfig"):
        train.report({"a": 1}, checkpoint=made, validation=0.5)
    assert taken.turns == []
