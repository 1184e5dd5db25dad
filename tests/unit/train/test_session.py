"""The functions of `raysgd.train`, inside and outside of a run."""

import pytest

from raysgd import train
from raysgd._internal.runner import WorkerContext
from raysgd.train import session
from raysgd.train.checkpoint import Checkpoint
from raysgd.train.session import TrainContext


def test_ranks_inside_and_outside_of_a_run(run):
    assert (train.world_rank(), train.local_rank(), train.world_size()) == (0, 0, 1)
    run(rank=1)
    assert (train.world_rank(), train.local_rank(), train.world_size()) == (1, 1, 2)
    context = train.get_context()
    assert (context.get_world_rank(), context.get_world_size()) == (1, 2)


@pytest.mark.parametrize("name", ["report", "save_checkpoint", "load_checkpoint"])
def test_outside_of_a_run_a_call_warns_once_and_does_nothing(name, monkeypatch):
    monkeypatch.setattr(session, "_WARNED", set())
    with pytest.warns(UserWarning, match=rf"train\.{name}\(\) does nothing outside") as warned:
        assert getattr(train, name)() is None
    assert warned[0].filename == __file__
    assert getattr(train, name)() is None


def test_all_forms_of_report_are_the_same(run):
    queue = run()
    train.report(loss=1.0, epoch=2)
    train.report({"loss": 1.0, "epoch": 2})
    train.report(metrics={"loss": 1.0, "epoch": 2}, checkpoint=Checkpoint.from_dict({}))
    for n, turn in enumerate(queue.turns):
        own = {k: v for k, v in turn.metrics.items() if not k.startswith("_")}
        assert own == {"loss": 1.0, "epoch": 2}
        assert turn.metrics["_training_iteration"] == n + 1
        assert turn.metrics["_time_this_iter_s"] >= 0


def test_a_function_may_report_its_own_time_but_no_timestamp(run):
    queue = run()
    train.report(_time_this_iter_s=7.5, _timestamp=3)
    train.save_checkpoint(epoch=1, _timestamp=3)  # a loaded checkpoint has this key
    assert queue.turns[0].metrics["_time_this_iter_s"] == 7.5
    for stamp in (queue.turns[0].metrics["_timestamp"], train.load_checkpoint()["_timestamp"]):
        assert type(stamp) is int
        assert stamp > 1e9


@pytest.mark.parametrize(
    ("arguments", "named", "reported"),
    [
        ([], {"metrics": 3}, {"metrics": 3}),
        ([], {"metrics": {"a": 1}, "loss": 2}, {"metrics": {"a": 1}, "loss": 2}),
        ([{"metrics": {"a": 1}}], {}, {"metrics": {"a": 1}}),
        ([], {"checkpoint_dir_name": 3}, {"checkpoint_dir_name": 3}),
    ],
)
def test_metrics_may_have_the_names_of_arguments(run, arguments, named, reported):
    queue = run()
    train.report(*arguments, **named)
    assert queue.turns[0].metrics.items() >= reported.items()


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: train.report(5), "must be a dict"),
        (lambda: train.report({}, validation=True), "no argument 'validation'"),
        (lambda: train.report({}, checkpoint=3), "checkpoint=3: must be a dict, a Checkpoint, or"),
    ],
)
def test_a_wrong_report_is_refused(run, call, match):
    queue = run()
    with pytest.raises(TypeError, match=match):
        call()
    assert queue.turns == []


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
    with pytest.warns(UserWarning, match="has no data set"):
        assert train.get_dataset_shard("train") is None


def test_a_context_has_the_name_and_the_metadata_of_the_run(run):
    assert train.get_context().get_trial_name() == ""
    run(metadata={"by": "me"}, name="mine", folder="/results/mine")
    context = train.get_context()
    context.get_metadata().clear()
    assert context.get_metadata() == {"by": "me"}
    assert context.get_experiment_name() == context.get_trial_name() == "mine"
    assert (context.get_trial_id(), context.get_trial_dir()) == ("one", "/results/mine")


def test_a_context_has_the_place_on_the_node():
    own = WorkerContext(world_rank=3, world_size=4, local_rank=1, local_world_size=2, node_rank=1)
    context = TrainContext(own)
    assert (context.get_local_rank(), context.get_local_world_size()) == (1, 2)
    assert (context.get_node_rank(), context.get_share()) == (1, 0.25)
    unequal = WorkerContext(world_rank=1, world_size=2, shares=(0.75, 0.5))
    assert TrainContext(unequal).get_share() == 0.4
