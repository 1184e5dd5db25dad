"""What a training function calls, inside and outside of a run."""

import pickle

import pytest

from raysgd import train
from raysgd._internal.context import WorkerContext
from raysgd.train import api as inside
from raysgd.train.api import TrainContext
from raysgd.train.checkpoint import Checkpoint


def test_ranks_inside_and_outside_of_a_run(run):
    assert (train.world_rank(), train.local_rank(), train.world_size()) == (0, 0, 1)
    run(rank=1)
    assert (train.world_rank(), train.local_rank(), train.world_size()) == (1, 1, 2)
    context = train.get_context()
    assert (context.get_world_rank(), context.get_world_size()) == (1, 2)


@pytest.mark.parametrize("name", ["report", "save_checkpoint", "load_checkpoint"])
def test_outside_of_a_run_a_call_warns_once_and_does_nothing(name, monkeypatch):
    monkeypatch.setattr(inside, "_WARNED", set())
    with pytest.warns(UserWarning, match=rf"train\.{name}\(\) does nothing here") as warned:
        assert getattr(train, name)() is None
    assert warned[0].filename == __file__
    for _ in range(2):
        assert getattr(train, name)() is None


def test_both_forms_of_report_are_the_same(run):
    taken = run()
    train.report(loss=1.0, epoch=2)
    train.report({"loss": 1.0, "epoch": 2})
    train.report(metrics={"loss": 1.0, "epoch": 2}, checkpoint=Checkpoint.from_dict({}))
    for n, turn in enumerate(taken.turns):
        own = {k: v for k, v in turn.metrics.items() if not k.startswith("_")}
        assert own == {"loss": 1.0, "epoch": 2}
        assert turn.metrics["_training_iteration"] == n + 1
        assert turn.metrics["_time_this_iter_s"] >= 0
        assert turn.metrics["_timestamp"] > 1e9


def test_metrics_as_a_keyword_alone_warn_once_that_they_are_spread(run, monkeypatch):
    monkeypatch.setattr(inside, "_WARNED", set())
    run()
    with pytest.warns(UserWarning, match=r"write report\(\{'metrics': \{\.\.\.\}\}\)") as warned:
        train.report(metrics={"loss": 1.0})
    assert warned[0].filename == __file__
    train.report(metrics={"loss": 1.0})


def test_a_time_that_the_function_reports_is_kept_and_the_timestamp_is_whole(run):
    taken = run()
    train.report(_time_this_iter_s=7.5, _timestamp=3)
    train.save_checkpoint(epoch=1, _timestamp=3)  # as one that was loaded has it
    assert taken.turns[1].numbers["_timestamp"] > 1e9
    assert taken.turns[0].metrics["_time_this_iter_s"] == 7.5
    for stamp in (taken.turns[0].metrics["_timestamp"], train.load_checkpoint()["_timestamp"]):
        assert type(stamp) is int
        assert stamp > 1e9


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


def test_data_set_shards(run):
    run(shards="all of it")
    assert train.get_dataset_shard() == "all of it"
    run(shards={"train": "a", "val": "b"})
    assert train.get_dataset_shard("val") == "b"
    with pytest.raises(KeyError, match=r"'other'.*'train', 'val'"):
        train.get_dataset_shard("other")
    with pytest.raises(RuntimeError, match="'train', 'val'"):
        train.get_dataset_shard()
    run()
    with pytest.warns(UserWarning, match="was given no data set"):
        assert train.get_dataset_shard("train") is None


def test_the_checkpoint_comes_as_an_object_too(run):
    run()
    assert train.get_checkpoint() is None
    run(checkpoint=pickle.dumps({"epoch": 4}))
    found = train.get_checkpoint()
    assert isinstance(found, Checkpoint)
    assert found.to_dict() == {"epoch": 4}


def test_a_reported_checkpoint_carries_the_metadata_of_the_trainer(run):
    taken = run(metadata={"by": "me", "in": "Paris"})
    made = Checkpoint.from_dict({"epoch": 4})
    made.set_metadata({"by": "you"})
    train.report({"loss": 1.0}, checkpoint=made)
    kept = Checkpoint(blob=taken.turns[0].checkpoint)
    assert kept.get_metadata() == {"by": "you", "in": "Paris"}
    assert kept.to_dict() == train.load_checkpoint() == {"epoch": 4}
    assert train.get_checkpoint().get_metadata() == {"by": "you", "in": "Paris"}
    assert made.get_metadata() == {"by": "you"}


def test_a_wrong_checkpoint_of_a_report_names_the_call_that_saves_values(run):
    taken = run()
    with pytest.raises(TypeError, match=r"Checkpoint\.from_dict.*save_checkpoint\(name=value\)"):
        train.report({"loss": 1.0}, checkpoint={"w": 1})
    assert taken.turns == []


def test_metrics_may_have_the_names_of_arguments(run):
    taken = run()
    train.report(metrics=3, loss=1.0)
    train.report({"metrics": {"a": 1}})
    train.report(metrics={"a": 1}, loss=1.0)
    assert [turn.metrics["metrics"] for turn in taken.turns] == [3, {"a": 1}, {"a": 1}]


def test_a_context_outside_of_a_run_is_that_of_a_single_worker():
    context = train.get_context()
    assert context == TrainContext()
    assert (context.get_world_rank(), context.get_world_size()) == (0, 1)
    assert (context.get_local_rank(), context.get_local_world_size()) == (0, 1)
    assert (context.get_experiment_name(), context.get_trial_dir()) == ("", "")


def test_a_context_knows_the_run_and_its_trial(run):
    run(metadata={"by": "me"}, experiment={"name": "mine", "dir": "/runs/mine"})
    context = train.get_context()
    assert context.get_metadata() == {"by": "me"}
    assert context.get_experiment_name() == "mine"
    assert (context.get_trial_name(), context.get_trial_id()) == ("mine", "mine")
    assert context.get_trial_dir() == context.get_storage() == "/runs/mine"
    names = {"name": "mine", "trial_name": "lr=1", "trial_id": "a1"}
    context = TrainContext(experiment=names)
    assert (context.get_trial_name(), context.get_trial_id()) == ("lr=1", "a1")


def test_metadata_is_a_copy(run):
    run(metadata={"by": "me"})
    train.get_context().get_metadata().clear()
    assert train.get_context().get_metadata() == {"by": "me"}


def test_a_context_knows_its_node():
    worker = WorkerContext(world_rank=3, world_size=4, local_rank=1, node_rank=1)
    context = TrainContext(worker, local_world_size=2)
    assert (context.get_node_rank(), context.get_local_rank()) == (1, 1)
    assert context.get_local_world_size() == 2
