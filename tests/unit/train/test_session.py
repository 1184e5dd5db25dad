"""What a training function calls, with a handover that needs no driver."""

import os
import pickle

import pytest

from raysgd import train
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


def test_what_cannot_be_pickled_is_an_error_in_the_function(run):
    run()
    with pytest.raises(TypeError, match="must be picklable"):
        train.save_checkpoint(lock=__import__("threading").Lock())


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
