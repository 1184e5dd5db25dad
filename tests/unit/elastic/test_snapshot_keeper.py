"""Snapshots on the driver: which one it keeps, and failures while it fetches one."""

import tempfile
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from raysgd._internal.worker_status import (
    ReportedPosition,
    SnapshotStatus,
    StateStatus,
    WorkerStatus,
)
from raysgd.cluster.clock import Clock
from raysgd.cluster.serialization import pack
from raysgd.cluster.worker import Worker, WorkerLocation
from raysgd.comm.connection import Address
from raysgd.elastic.group_rpc import GroupRpc
from raysgd.elastic.snapshot_keeper import SnapshotKeeper
from raysgd.loop.requests import ApplyOperatorRequest, TrainRequest
from tests.conftest import wait_until
from tests.unit.recorder import runner_with_snapshots


class FakeMember:
    """A worker that sends its snapshot when the test says so."""

    location = WorkerLocation(node_id="", node_ip="127.0.0.1")

    def __init__(self, is_remote=True):
        self.is_remote = is_remote
        self.asked = []

    def submit_control(self, method, step, num_invalidations, inbox):
        assert method is Worker.send_snapshot
        self.asked.append(Future())
        return self.asked[-1]

    def send(self, state):
        self.asked[-1].set_result(pack(state))


def at(step):
    return WorkerStatus(ReportedPosition(global_step=100), snapshot=SnapshotStatus(step))


def make_keeper(num_members):
    group = SimpleNamespace(members=[None] * num_members)
    return SnapshotKeeper(group)


@pytest.fixture
def keeper():
    return make_keeper(1)


def test_a_newer_snapshot_of_the_same_step_is_fetched(keeper):
    """For example, a scheduler has received a metric in between."""
    member = FakeMember()
    for step, state in ((5, "before"), (None, ""), (5, "after")):
        keeper.request_newer({member: at(step)})
        if step is not None:
            member.send(state)
    assert keeper.load() == "after"
    keeper.request_newer({member: at(5)._replace(snapshot=SnapshotStatus(5, 1))})
    member.send("after that")
    assert keeper.load() == "after that"


def divided(step):
    return at(step)._replace(state_status=StateStatus(is_complete=False))


def test_shards_of_one_step_are_fetched_together():
    keeper = make_keeper(2)
    one, other = FakeMember(), FakeMember()
    keeper.request_newer({one: divided(4)})  # the other has not answered
    keeper.request_newer({one: divided(4), other: divided(3)})
    assert one.asked == other.asked == []
    keeper.request_newer({one: divided(4), other: divided(4)})
    one.send({"step": 4, "shards": "a"})
    assert keeper.load() is None
    other.send({"step": 4, "shards": "b"})
    assert keeper.load() == {"step": 4, "shards": ["a", "b"]}
    keeper.request_newer({one: divided(5), other: divided(5)})
    one.send({"step": 5, "shards": "a"})
    other.asked[-1].set_result(None)  # its snapshot is of a later step
    assert keeper.load()["step"] == 4


def test_a_snapshot_is_fetched_once_and_one_at_a_time(keeper):
    member = FakeMember()
    keeper.request_newer({member: at(0)})
    keeper.request_newer({member: at(0)})
    keeper.request_newer({member: at(5)})
    assert len(member.asked) == 1
    member.send({"step": 0})
    keeper.request_newer({member: at(0)})
    assert len(member.asked) == 1
    keeper.request_newer({member: at(5)})
    assert len(member.asked) == 2


def test_a_worker_may_die_while_it_sends_a_snapshot(keeper):
    first, second = FakeMember(), FakeMember()
    keeper.request_newer({first: at(0)})
    first.send({"step": 0})
    keeper.request_newer({first: at(5)})
    first.asked[-1].set_exception(RuntimeError("the actor died"))
    assert keeper.load() == {"step": 0}
    keeper.request_newer({second: at(5)})
    second.send({"step": 5})
    assert keeper.load() == {"step": 5}


def test_a_loaded_state_replaces_snapshots_even_those_being_fetched(keeper):
    member = FakeMember()
    keeper.request_newer({member: at(5)})
    member.send({"step": 5})
    keeper.request_newer({member: at(10)})
    keeper.store({"step": 3})
    assert keeper.load() == {"step": 3}
    member.send({"step": 10})
    assert keeper.load() == {"step": 3}


class LargeMember(FakeMember):
    """A real worker, whose runner has one large snapshot."""

    def __init__(self, state):
        super().__init__()
        self.worker, self.sent = Worker(), []
        self.worker.runner = SimpleNamespace(
            acquire_snapshot=lambda num_invalidations=None: state,
            release_snapshot=lambda state, seconds: self.sent.append(seconds),
        )
        self.thread = ThreadPoolExecutor(1)

    def submit_control(self, method, *arguments):
        self.asked.append(self.thread.submit(method, self.worker, *arguments))
        return self.asked[-1]

    submit_work = submit_control


def fetch_all(keeper, member, step):
    keeper.request_newer({member: at(step)})
    wait_until(lambda: (keeper.store_arrived(), keeper._incoming)[1] is None)


def test_the_driver_stores_large_states_in_a_file_without_a_name(keeper, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    torch.manual_seed(0)
    state = {
        "halves": torch.randn(3_000_001).to(torch.bfloat16),
        "floats": [torch.randn(5_000, 1_001), torch.arange(3)],
        "array": np.arange(1e5).reshape(10, -1).T,
    }
    member = LargeMember(state)
    fetch_all(keeper, member, 5)
    assert len(member.sent) == 1  # so it is released
    stored = keeper.load()
    torch.testing.assert_close(stored["halves"], state["halves"], rtol=0, atol=0)
    torch.testing.assert_close(stored["floats"], state["floats"], rtol=0, atol=0)
    np.testing.assert_array_equal(stored["array"], state["array"])
    stored["halves"].zero_()  # changes no file
    assert keeper.load()["halves"].abs().sum() > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [5_000, 5_000_000])
def test_a_loaded_state_leaves_the_memory_of_the_driver(keeper, size):
    state = {"a": torch.arange(float(size)), "step": 3}
    keeper.store(state)
    loaded = weakref.ref(state["a"])
    state.pop("a").zero_()
    assert loaded() is None
    assert torch.equal(keeper.load()["a"], torch.arange(float(size)))


def test_a_full_disk_costs_the_new_snapshot_but_not_the_previous_one(keeper, monkeypatch, caplog):
    member = FakeMember()
    keeper.request_newer({member: at(0)})
    member.send({"step": 0})
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(tempfile, "TemporaryFile", lambda **named: full)
        for step in (5, 10):
            large = LargeMember({"a": torch.zeros(5_000_000)})
            fetch_all(keeper, large, step)
            fetch_all(keeper, large, step)
            assert len(large.asked) == len(large.sent) == 1
    assert keeper.load() == {"step": 0}
    assert caplog.text.count("No space left on device") == 1
    assert "Set TMPDIR" in caplog.text


@pytest.mark.parametrize("is_full", [False, True])
def test_a_rescued_state_leaves_the_memory_of_the_driver_if_it_can(keeper, monkeypatch, is_full):
    state = {"a": torch.arange(5e6), "global_step": 100}
    member = LargeMember(state)
    member.worker.runner.handle = lambda request: state
    member.worker.runner.status = lambda acknowledged_step: at(None)
    group = SimpleNamespace(members=[member], clock=Clock())
    with open("/dev/full", "wb", buffering=0) as full:
        if is_full:
            monkeypatch.setattr(tempfile, "TemporaryFile", lambda **named: full)
        keeper.rescue(GroupRpc(SimpleNamespace(group=group), None, 0.0))
    assert torch.equal(keeper.load()["a"], state["a"])
    assert isinstance(member.asked[-1].result().payload, Address)


class Unreadable:
    def __reduce__(self):
        return (int, ("this is read only for a restart",))


def test_a_snapshot_is_not_read_to_know_that_it_exists(keeper):
    member = FakeMember()
    assert not keeper.store_arrived()
    keeper.request_newer({member: at(5)})
    member.send(Unreadable())
    assert keeper.store_arrived()
    with pytest.raises(ValueError, match="read only for a restart"):
        keeper.load()


def test_a_missed_answer_of_rank_0_does_not_repeat_a_snapshot():
    keeper = make_keeper(2)
    first, second = FakeMember(), FakeMember()
    for answers in (
        {first: at(5), second: at(None)},
        {second: at(None)},
        {first: at(5), second: at(None)},
    ):
        keeper.request_newer(answers)
        if not keeper.store_arrived():
            first.send({"step": 5})
    assert len(first.asked) == 1


class RunnerMember(FakeMember):
    """A worker whose snapshots are those of a real runner."""

    def __init__(self, runner):
        super().__init__()
        self.worker, self.late = Worker(), []
        self.worker.runner = runner

    def submit_control(self, method, *arguments):
        """Answer late requests first."""
        late, self.late = self.late, []
        for future, *given in [*late, (Future(), *arguments)]:
            future.set_result(self.worker.send_snapshot(*given))
        return future

    def answer_late(self, method, *arguments):
        self.late.append((Future(), *arguments))
        return self.late[-1][0]


def test_a_fetch_from_before_a_change_does_not_take_the_snapshot_of_the_change(keeper, monkeypatch):
    runner = runner_with_snapshots("epoch")
    member = RunnerMember(runner)
    runner.handle(TrainRequest(call_number=0, until_step=2))
    with monkeypatch.context() as patch:
        patch.setattr(member, "submit_control", member.answer_late)
        keeper.request_newer({member: runner.status()})
    change = ApplyOperatorRequest(function=lambda op: op.optimizer.param_groups[0].update(lr=0.125))
    runner.handle(change)
    keeper.request_newer({member: runner.status()})
    assert keeper.load()["optimizers"][0]["param_groups"][0]["lr"] == 0.125


@pytest.mark.parametrize("every", ["epoch", 2])
@pytest.mark.parametrize("train_after", [0, 1])
def test_a_snapshot_from_before_a_state_was_loaded_does_not_come_back(keeper, every, train_after):
    runner = runner_with_snapshots(every)
    member = RunnerMember(runner)
    loaded = runner.state_dict()
    runner.handle(TrainRequest(call_number=0, until_step=8))
    keeper.request_newer({member: runner.status()})
    assert keeper.load()["global_step"] > 1
    runner.load_state_dict(loaded)
    keeper.replace_with(lambda: loaded)
    if train_after:
        runner.handle(TrainRequest(call_number=1, until_step=train_after))
    for _ in range(2):
        keeper.request_newer({member: runner.status()})
    assert keeper.load()["global_step"] <= train_after


def test_a_worker_in_the_drivers_process_sends_no_snapshots():
    member = FakeMember(is_remote=False)
    make_keeper(1).request_newer({member: at(5)})
    assert member.asked == []
