"""What a training function calls, with a handover that needs no driver."""

import pickle

import pytest

from raysgd import train
from raysgd.context import WorkerContext
from raysgd.train import session
from raysgd.train.checkpoint import Checkpoint
from raysgd.train.session import Session


class Taken:
    """Stands in for the handover: takes everything at once."""

    def __init__(self):
        self.turns = []
        self.safe = []

    def put(self, turn):
        self.turns.append(turn)

    def put_safely(self, turn):
        self.turns.append(turn)
        self.safe.append(turn)


@pytest.fixture
def run():
    """Enter a session; it is left when the test ends."""
    entered = []

    def enter(rank=0, size=2, **arguments):
        context = WorkerContext(world_rank=rank, world_size=size, local_rank=rank)
        taken = Taken()
        running = Session(context, taken, **arguments)
        session.enter(running)
        entered.append(running)
        return taken

    yield enter
    for running in entered:
        session.leave(running)


def test_ranks_inside_and_outside_of_a_run(run):
    assert (train.world_rank(), train.local_rank(), train.world_size()) == (0, 0, 1)
    run(rank=1)
    assert (train.world_rank(), train.local_rank(), train.world_size()) == (1, 1, 2)
    context = train.get_context()
    assert (context.get_world_rank(), context.get_world_size()) == (1, 2)


@pytest.mark.parametrize("name", ["report", "save_checkpoint", "load_checkpoint"])
def test_outside_of_a_run_a_call_warns_once_and_does_nothing(name, caplog, monkeypatch):
    monkeypatch.setattr(session, "_WARNED", set())
    for _ in range(3):
        assert getattr(train, name)() is None
    assert [record for record in caplog.records if name in record.message] == caplog.records
    assert len(caplog.records) == 1


def test_both_forms_of_report_are_the_same(run):
    taken = run()
    train.report(loss=1.0, epoch=2)
    train.report({"loss": 1.0, "epoch": 2})
    train.report(metrics={"loss": 1.0, "epoch": 2})
    for n, turn in enumerate(taken.turns):
        own = {k: v for k, v in turn.metrics.items() if not k.startswith("_")}
        assert own == {"loss": 1.0, "epoch": 2}
        assert turn.metrics["_training_iteration"] == n + 1
        assert turn.metrics["_time_this_iter_s"] >= 0
        assert turn.metrics["_timestamp"] > 1e9


def test_a_metric_may_be_called_checkpoint(run):
    taken = run()
    train.report(checkpoint=3)
    assert taken.turns[0].metrics["checkpoint"] == 3


@pytest.mark.parametrize(
    "call", [lambda: train.report(5), lambda: train.report({}, checkpoint={"a": 1})]
)
def test_a_wrong_report_says_what_is_allowed(run, call):
    run()
    with pytest.raises(TypeError, match=r"report\("):
        call()


def test_only_worker_0_sends_what_it_saves_and_every_one_waits_until_it_is_safe(run):
    for rank in (0, 1):
        taken = run(rank=rank)
        train.save_checkpoint(epoch=rank, model={"w": [1, 2]})
        (turn,) = taken.safe
        assert turn.has_checkpoint
        assert (turn.checkpoint is not None) == (rank == 0)
        assert turn.numbers["epoch"] == rank
        assert train.load_checkpoint() == {"epoch": rank, "model": {"w": [1, 2]}}


def test_a_checkpoint_is_as_it_was_when_it_was_saved(run):
    taken = run()
    weights = [1.0]
    train.save_checkpoint(weights=weights)
    weights[0] = 2.0
    assert pickle.loads(taken.turns[0].checkpoint) == {"weights": [1.0]}
    assert train.load_checkpoint() == {"weights": [1.0]}


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
    assert pickle.loads(session.current().sent()) == {"w": 1}


def test_what_a_backend_encodes_is_sent_and_what_was_saved_is_loaded(run):
    taken = run(encode=lambda data: {key: str(value) for key, value in data.items()})
    train.save_checkpoint(epoch=1)
    train.report(epoch=1)
    assert pickle.loads(taken.turns[0].checkpoint) == {"epoch": "1"}
    assert train.load_checkpoint() == {"epoch": 1}
    assert taken.turns[1].metrics["epoch"] == "1"


def test_data_set_shards(run):
    run(shards="all of it")
    assert train.get_dataset_shard() == "all of it"
    run(shards={"train": "a", "val": "b"})
    assert train.get_dataset_shard("val") == "b"
    assert train.get_dataset_shard("other") is None
    with pytest.raises(RuntimeError, match="'train', 'val'"):
        train.get_dataset_shard()
