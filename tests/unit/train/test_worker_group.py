"""Worker groups: resources, functions, and hosted classes, with workers in this process."""

from types import SimpleNamespace

import cloudpickle
import pytest
import ray

from raysgd.cluster import actor_group as core
from raysgd.cluster.group_options import GroupOptions
from raysgd.cluster.worker import WorkerInfo
from raysgd.cluster.worker_handle import InlineHandle
from raysgd.train import worker_group
from raysgd.train.worker_group import TrainWorkerGroup, WorkerGroup, group_options


class Actor:
    """A fake of the Ray handle that runs functions immediately."""

    @property
    def execute(self):
        return self

    def remote(self, function, *args, **kwargs):
        return function(*args, **kwargs)


class Done:
    """A reference to a finished result."""

    def __init__(self, value):
        self.value = value


class Near(InlineHandle):
    """A worker that runs functions immediately."""

    def __init__(self, pid):
        super().__init__()
        self.actor = Actor()
        self.info = WorkerInfo(node_id=f"node{pid}", node_ip="10.0.0.7", pid=pid, gpu_ids=("0",))

    def execute(self, function, /, *args, **kwargs):
        return Done(self.actor.remote(function, *args, **kwargs))


class Group(core.ActorGroup):
    def discard(self, member):
        self.members.remove(member)


@pytest.fixture
def workers(monkeypatch):
    """Return a group of three workers with pids 10, 11, and 12."""
    monkeypatch.setattr(ray, "get", lambda done: getattr(done, "value", done))
    monkeypatch.setattr(
        ray,
        "wait",
        lambda refs, num_returns=1, timeout=None: (refs[:num_returns], refs[num_returns:]),
    )
    group = Group(GroupOptions(num_workers=3))
    group.members = [Near(10 + rank) for rank in range(3)]
    return WorkerGroup.over(group)


# ---- what a group reserves


@pytest.mark.parametrize(
    ("amounts", "bundle"),
    [
        ((1, 0, None), {"CPU": 1}),
        ((0.5, 2, {"a": 1.5, "b": 0}), {"CPU": 0.5, "GPU": 2, "a": 1.5}),
        ((0, 0, {"a": 1}), {"a": 1}),
    ],
)
def test_a_worker_reserves_its_amounts(amounts, bundle):
    assert group_options(1, *amounts).bundle == bundle


@pytest.mark.parametrize(
    ("amounts", "match"),
    [
        ((-1, 0, None), r"CPU=-1\): must be at least 0"),
        ((1, float("nan"), None), r"GPU=nan\): must be at least 0"),
        ((1, 0, {"license": "1"}), r"license='1'\): must be a number"),
        ((1, 0, {"license": True}), r"license=True\): must be a number"),
        ((0, 0, {"a": 0}), "must reserve a CPU"),
    ],
)
def test_wrong_amounts_are_refused(amounts, match):
    with pytest.raises((TypeError, ValueError), match=match):
        group_options(1, *amounts)


def test_workers_are_packed_unless_arguments_or_the_environment_say_otherwise(monkeypatch):
    monkeypatch.delenv("TRAIN_ENABLE_WORKER_SPREAD", raising=False)
    monkeypatch.setenv("TRAIN_PLACEMENT_GROUP_TIMEOUT_S", "7")
    options = group_options(2)
    assert (options.strategy, options.start_timeout_s) == ("PACK", 7)
    assert group_options(2, strategy="STRICT_PACK").strategy == "STRICT_PACK"
    monkeypatch.setenv("TRAIN_ENABLE_WORKER_SPREAD", "1")
    assert group_options(2, strategy="PACK").strategy == "SPREAD"


# ---- functions


@pytest.mark.parametrize("index", [-1, 3])
def test_a_wrong_index_of_a_worker_is_refused(workers, index):
    for call in (
        lambda: workers.execute_single(index, print),
        lambda: workers.execute_single_async(index, print),
        lambda: workers.remove_workers([0, index]),
    ):
        with pytest.raises(ValueError, match=rf"worker_index={index}: .*0 and 2"):
            call()
    assert len(workers) == 3


def test_a_group_is_started_once_and_before_it_runs_functions(workers):
    with pytest.raises(RuntimeError, match="already started"):
        workers.start()
    workers.remove_workers(range(3))
    for call in (workers.execute, workers.execute_async):
        with pytest.raises(RuntimeError, match=r"Call start\(\) first"):
            call(print)


# ---- a class of the user on every worker


class Counter:
    def __init__(self, start, by=1):
        self.value, self.by = start, by

    def add(self, times=1):
        self.value += times * self.by
        return self.value

    def _value(self):
        return self.value


@pytest.fixture
def hosted(workers, monkeypatch):
    monkeypatch.setattr(worker_group, "_HOSTED", {})
    return TrainWorkerGroup(SimpleNamespace(worker_group=workers), Counter, (5,), {"by": 2})


def test_methods_of_a_hosted_class_may_be_private(hosted):
    for worker in (hosted[0], cloudpickle.loads(cloudpickle.dumps(hosted[0]))):  # as in a task
        assert worker._value.remote() == 5


def test_a_second_class_on_the_workers_leaves_the_first_as_it_is(hosted):
    second = TrainWorkerGroup(hosted._executor, Counter, (100,), {})
    assert second[0].add.remote() == 101
    assert hosted[0].add.remote() == 7


def test_an_object_that_was_lost_with_its_worker_is_an_error(hosted):
    worker_group._HOSTED.clear()
    with pytest.raises(RuntimeError, match=r"add\(\): .* Call to_worker_group\(\) again"):
        hosted[1].add.remote()
