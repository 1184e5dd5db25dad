"""Snapshots on the driver: which one it keeps, and failures while it fetches one."""

import pickle
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from raysgd._internal.context import Progress, WorkerContext
from raysgd.elastic.config import ElasticConfig
from raysgd.elastic.snapshots import SnapshotKeeper
from raysgd.loop.requests import TrainRequest
from raysgd.torch.options import TorchOptions
from raysgd.torch.runner import TorchRunner
from tests.unit.recorder import Recorder


class FakeMember:
    """A worker that sends its snapshot when the test says so."""

    def __init__(self, remote=True):
        self.remote = remote
        self.asked = []

    def control(self, method, step=None):
        assert method == "snapshot"
        self.asked.append(Future())
        return self.asked[-1]

    def send(self, state):
        self.asked[-1].set_result(pickle.dumps(state))


def at(step):
    return Progress(global_step=100, snapshot=step)


def make_keeper(num_members):
    return SnapshotKeeper(SimpleNamespace(members=[None] * num_members))


@pytest.fixture
def keeper():
    return make_keeper(1)


def test_a_newer_snapshot_of_the_same_step_is_fetched(keeper):
    """For example, a scheduler has received a metric in between."""
    member = FakeMember()
    for step, state in ((5, "before"), (None, ""), (5, "after")):
        keeper.poll({member: at(step)})
        if step is not None:
            member.send(state)
    assert keeper.state() == "after"
    keeper.outdate()
    keeper.poll({member: at(5)})
    member.send("after that")
    assert keeper.state() == "after that"


def divided(step):
    return Progress(global_step=100, snapshot=step, divided=True)


def test_shards_of_one_step_are_fetched_together():
    keeper = make_keeper(2)
    one, other = FakeMember(), FakeMember()
    keeper.poll({one: divided(4)})  # the other has not answered
    keeper.poll({one: divided(4), other: divided(3)})
    assert one.asked == other.asked == []
    keeper.poll({one: divided(4), other: divided(4)})
    one.send({"step": 4, "shares": "a"})
    assert keeper.state() is None
    other.send({"step": 4, "shares": "b"})
    assert keeper.state() == {"step": 4, "shares": ["a", "b"]}
    keeper.poll({one: divided(5), other: divided(5)})
    one.send({"step": 5, "shares": "a"})
    other.asked[-1].set_result(None)  # its snapshot is of a later step
    assert keeper.state()["step"] == 4


def test_a_snapshot_is_fetched_once_and_one_at_a_time(keeper):
    member = FakeMember()
    keeper.poll({member: at(0)})
    keeper.poll({member: at(0)})
    keeper.poll({member: at(5)})
    assert len(member.asked) == 1
    member.send({"step": 0})
    keeper.poll({member: at(0)})
    assert len(member.asked) == 1
    keeper.poll({member: at(5)})
    assert len(member.asked) == 2


def test_a_worker_may_die_while_it_sends_a_snapshot(keeper):
    first, second = FakeMember(), FakeMember()
    keeper.poll({first: at(0)})
    first.send({"step": 0})
    keeper.poll({first: at(5)})
    first.asked[-1].set_exception(RuntimeError("the actor died"))
    assert keeper.state() == {"step": 0}
    keeper.poll({second: at(5)})
    second.send({"step": 5})
    assert keeper.state() == {"step": 5}


def test_a_loaded_state_replaces_snapshots_even_those_being_fetched(keeper):
    member = FakeMember()
    keeper.poll({member: at(5)})
    member.send({"step": 5})
    keeper.poll({member: at(10)})
    keeper.set({"step": 3})
    assert keeper.state() == {"step": 3}
    member.send({"step": 10})
    assert keeper.state() == {"step": 3}


class RunnerMember(FakeMember):
    """A worker whose snapshots are those of a real runner."""

    def __init__(self, runner):
        super().__init__()
        self.runner = runner

    def control(self, method, step=None):
        future = Future()
        state = self.runner.snapshot()
        future.set_result(None if state is None else pickle.dumps(state))
        return future


@pytest.mark.parametrize("every", ["epoch", 2])
@pytest.mark.parametrize("train_after", [0, 1])
def test_a_snapshot_from_before_a_state_was_loaded_does_not_come_back(keeper, every, train_after):
    options = TorchOptions(
        training_operator_cls=Recorder,
        config={"num_samples": 40, "batch_size": 8},
        elastic=ElasticConfig(snapshot_every=every),
    )
    runner = TorchRunner(options)
    runner.prepare(WorkerContext(in_driver=True))
    runner.setup(WorkerContext(in_driver=True))
    member = RunnerMember(runner)
    loaded = runner.state_dict()
    runner.handle(TrainRequest(call=0, until_step=8))
    keeper.poll({member: runner.progress()})
    assert keeper.state()["global_step"] > 1
    runner.load_state_dict(loaded)
    keeper.set(loaded)
    if train_after:
        runner.handle(TrainRequest(call=1, until_step=train_after))
    for _ in range(2):
        keeper.poll({member: runner.progress()})
    assert keeper.state()["global_step"] <= train_after


def test_a_worker_in_the_drivers_process_sends_no_snapshots():
    member = FakeMember(remote=False)
    make_keeper(1).poll({member: at(5)})
    assert member.asked == []
