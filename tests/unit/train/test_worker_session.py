"""Reports and checkpoints of a training function, with a fake queue to the driver."""

import math
import multiprocessing
import pickle
import threading

import numpy as np
import pytest
import torch

from raysgd import train
from raysgd.train import Checkpoint, constants


def own(state):
    """Return a saved state without the time that raysgd adds."""
    assert state["_timestamp"] > 1e9
    return {name: value for name, value in state.items() if name != "_timestamp"}


@pytest.mark.parametrize("rank", [0, 1])
def test_worker_0_sends_its_checkpoint(run, rank):
    queue, weights = run(rank=rank), [1, 2]
    train.save_checkpoint(epoch=rank, model={"w": weights})
    (turn,) = queue.turns
    assert turn.has_checkpoint
    assert (turn.checkpoint is not None) == (rank == 0)
    assert turn.numbers["epoch"] == rank
    weights[0] = 5  # the checkpoint keeps the saved value
    assert own(train.load_checkpoint()) == {"epoch": rank, "model": {"w": [1, 2]}}


@pytest.mark.parametrize("size", [1, 100_000])
def test_a_report_has_the_values_at_the_time_of_the_call(run, size):
    queue = run()
    running, losses = torch.zeros(size), [0.5]
    train.report(running=running, losses=losses)
    running += 1
    losses.append(0.25)
    found = queue.turns[0].metrics
    assert found["running"].sum() == 0
    assert found["losses"] == [0.5]


def test_numbers_in_a_checkpoint_rate_it_before_those_of_its_report(run):
    queue = run()
    saved = {"loss": torch.tensor(4.0), "model": {"b": torch.ones(1)}, "accuracy": torch.ones(3)}
    train.report({"loss": 2, "accuracy": 0.5}, checkpoint=Checkpoint.from_dict(saved))
    train.report({}, checkpoint=Checkpoint.from_dict({"loss": 1}))
    train.save_checkpoint(loss=3)
    first, *others = [dict(turn.numbers) for turn in queue.turns]
    assert {name: value for name, value in first.items() if name != "_timestamp"} == {
        "loss": 4,
        "accuracy": 0.5,
    }
    assert [numbers["loss"] for numbers in others] == [1, 3]
    assert queue.turns[0].metrics["loss"] == 2


def test_a_checkpoint_that_is_not_finite_replaces_no_finite_one(run):
    queue, mask = run(), torch.tensor([0.0, -math.inf])
    for epoch, weight in enumerate((1.0, math.nan, 2.0)):
        history = np.array([0.5] + epoch * [math.nan])  # may grow by NaN
        model = {"mask": mask, "weight": torch.tensor([weight]), "history": history}
        model |= {"lazy": torch.nn.UninitializedParameter(), "parents": [model]}
        train.report({"loss": weight}, checkpoint=Checkpoint.from_dict({"model": model}))
    assert [turn.nonfinite_array for turn in queue.turns] == ["", "model.weight", ""]
    assert [turn.checkpoint is None for turn in queue.turns] == [False, True, False]
    run(checkpoint=pickle.dumps({"model": {"weight": np.ones(2)}}))
    train.save_checkpoint(model={"weight": np.ones(2), "mask": mask.numpy()})
    with pytest.raises(TypeError, match="checkpoint cannot be pickled"):
        train.save_checkpoint(model={"weight": np.ones(3)}, lock=threading.Lock())
    train.save_checkpoint(model={"weight": np.array([1, math.nan])})
    assert train.load_checkpoint()["model"]["weight"].tolist() == [1, 1]


def test_metrics_that_cannot_be_pickled_are_refused_in_the_function(run):
    queue = run()
    with pytest.raises(TypeError, match=r"the metric 'lock' cannot be pickled: .* plain values"):
        train.report(loss=0.5, lock=threading.Lock())
    train.report(loss=0.5)
    assert queue.turns[0].metrics["_training_iteration"] == 1


@pytest.mark.parametrize("call", [train.report, train.save_checkpoint])
def test_a_forked_process_cannot_report_or_save(run, call):
    run()
    context = multiprocessing.get_context("fork")
    raised = context.SimpleQueue()

    def child():
        try:
            call(a=1)
        except RuntimeError as error:
            raised.put(str(error))

    process = context.Process(target=child)
    process.start()
    process.join()
    assert "report there" in raised.get()


def test_a_run_continues_from_a_checkpoint(run):
    queue = run(checkpoint=pickle.dumps({"epoch": 4}), iteration=5)
    assert train.load_checkpoint() == train.get_checkpoint().to_dict() == {"epoch": 4}
    train.report(a=1)
    assert queue.turns[0].metrics["_training_iteration"] == 6


def test_a_backend_encodes_what_is_sent_but_not_what_is_loaded(run):
    queue = run(encode=pickle.dumps)
    train.save_checkpoint(epoch=1)
    train.report(epoch=1)
    assert own(pickle.loads(pickle.loads(queue.turns[0].checkpoint))) == {"epoch": 1}
    assert own(train.load_checkpoint()) == {"epoch": 1}
    reported = pickle.loads(queue.turns[1].metrics)
    assert reported.keys() == {"epoch", *constants.BASIC_AUTOFILLED_KEYS}
