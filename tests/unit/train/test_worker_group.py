"""Workers that run functions: arguments, ranks and hosted classes, with workers in this process."""

import gc

import cloudpickle
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from raysgd.cluster import worker_group as core
from raysgd.cluster.group_options import GroupOptions
from raysgd.cluster.worker_handle import InlineHandle
from raysgd.cluster.worker_info import WorkerInfo
from raysgd.train import worker_group
from raysgd.train.worker_group import TrainWorkerGroup, WorkerGroup, group_options


class Actor:
    """As much of Ray's handle as is needed; what is started is done at once."""

    @property
    def execute(self):
        return self

    def options(self, num_returns=1):
        self.num_returns = num_returns
        return self

    def remote(self, function, *args, **kwargs):
        return function(*args, **kwargs)


class Done:
    """A reference to what is there already; like Ray's, it is equal to nothing but itself."""

    def __init__(self, value):
        self.value = value


class Near(InlineHandle):
    """A member that runs functions at once."""

    def __init__(self, pid):
        super().__init__()
        self.actor = Actor()
        self.info = WorkerInfo(node_id=f"node{pid}", node_ip="10.0.0.7", pid=pid, gpu_ids=("0",))

    def execute(self, function, /, *args, **kwargs):
        return Done(self.actor.remote(function, *args, **kwargs))


class Group(core.WorkerGroup):
    def discard(self, member):
        self.members.remove(member)


@pytest.fixture
def workers(monkeypatch):
    """Three workers of pids 10, 11 and 12."""
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


@given(
    st.integers(-1, 3),
    st.floats(-1, 2),
    st.floats(-1, 2),
    st.dictionaries(st.sampled_from(["a", "b"]), st.floats(-1, 2)),
)
def test_amounts_are_at_least_0_and_a_worker_reserves_something(workers, cpus, gpus, others):
    amounts = [cpus, gpus, *others.values()]
    if workers < 1 or min(amounts) < 0 or not any(amounts):
        with pytest.raises(ValueError, match=r"must (be|reserve)"):
            group_options(workers, cpus, gpus, others)
    else:
        options = group_options(workers, cpus, gpus, others)
        everything = {"CPU": cpus, "GPU": gpus, **others}
        assert options.bundle == {name: n for name, n in everything.items() if n}


@pytest.mark.parametrize("amount", [float("nan"), -1, True, "1", None])
def test_what_is_no_amount_is_shown_with_its_name(amount):
    with pytest.raises(ValueError, match=rf"{amount!r} of license per worker: must be a number"):
        group_options(1, 1, 0, {"license": amount})
    with pytest.raises(ValueError, match=r"num_workers='2': must be an int of at least 1"):
        group_options("2")


def test_workers_are_packed_unless_the_environment_says_otherwise(monkeypatch):
    monkeypatch.delenv("TRAIN_ENABLE_WORKER_SPREAD", raising=False)
    monkeypatch.setenv("TRAIN_PLACEMENT_GROUP_TIMEOUT_S", "7")
    options = group_options(2)
    assert (options.strategy, options.start_timeout_s) == ("PACK", 7)
    monkeypatch.setenv("TRAIN_ENABLE_WORKER_SPREAD", "1")
    assert group_options(2, strategy="PACK").strategy == "SPREAD"


# ---- functions


def test_a_function_runs_on_all_or_on_one(workers):
    assert len(workers) == 3
    assert workers.execute(lambda a, b: a + b, 1, b=2) == [3, 3, 3]
    assert [done.value for done in workers.execute_async(lambda: "x")] == ["x"] * 3
    assert workers.execute_single(2, lambda a: a, "b") == "b"
    assert workers.execute_single_async(0, lambda: 5).value == 5


@pytest.mark.parametrize("index", [-1, 3])
def test_a_worker_that_is_not_there_is_an_error_that_says_how_many_there_are(workers, index):
    for call in (
        lambda: workers.execute_single(index, print),
        lambda: workers.execute_single_async(index, print),
        lambda: workers.remove_workers([0, index]),
    ):
        with pytest.raises(ValueError, match=rf"worker_index={index}: .*0 and 2, .*3 workers"):
            call()
    assert len(workers) == 3


def test_when_some_are_removed_the_others_move_up(workers):
    workers.remove_workers([0, 2, 0])
    assert [worker.metadata.pid for worker in workers.workers] == [11]
    (worker,) = workers.workers
    assert (worker.metadata.node_id, worker.metadata.gpu_ids) == ("node11", ("0",))


def test_a_group_says_what_its_workers_reserve(workers):
    """For a Backend of one's own."""
    assert (workers.num_workers, workers.num_cpus_per_worker) == (3, 1)
    assert workers.num_gpus_per_worker == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [({"actor_cls": object}, "to_worker_group"), ({"placement_group": 1}, "that it is made in")],
)
def test_actors_and_room_of_ones_own_are_refused_with_the_way(given, said):
    with pytest.raises(TypeError, match=said):
        WorkerGroup(1, **given)


def test_labels_of_nodes_are_asked_for_by_one_dict_or_one_for_each_worker():
    assert group_options(2).label_selectors == []
    one = {"region": "eu"}
    assert group_options((1, 2), label_selector=one).label_selectors == [one, one]
    assert group_options(2, label_selector=[one, {}]).label_selectors == [one, {}]
    for wrong, said in (
        ([one], "as many dicts as there are workers, 2"),
        ({"region": 1}, "must be of texts"),
        ("eu", "must be a dict"),
    ):
        with pytest.raises(ValueError, match=said):
            group_options(2, label_selector=wrong)


def test_a_group_that_is_shut_down_says_how_to_start_it(workers):
    with pytest.raises(RuntimeError, match="started already; shut them down first"):
        workers.start()
    workers.remove_workers(range(3))
    for call in (workers.execute, workers.execute_async):
        with pytest.raises(RuntimeError, match=r"shut down; call start\(\) first"):
            call(print)


# ---- a class of the user on every worker


class Counter:
    def __init__(self, start, by=1):
        self.value, self.by = start, by

    def add(self, times=1):
        self.value += times * self.by
        return self.value

    @ray.method(num_returns=2)
    def _both(self):
        return self.value, self.by


class Executor:
    def __init__(self, workers):
        self.worker_group, self.ended = workers, None

    def shutdown(self, graceful_termination, patience_s):
        self.ended = graceful_termination, patience_s


@pytest.fixture
def hosted(workers, monkeypatch):
    monkeypatch.setattr(worker_group, "_HOSTED", {})
    return TrainWorkerGroup(Executor(workers), Counter, (5,), {"by": 2})


def test_methods_of_a_hosted_class_are_called_like_those_of_an_actor(hosted):
    """All three are the same object here, where they share a process."""
    assert len(hosted) == len(list(hosted)) == 3
    assert hosted[0].add.remote() == 7
    assert [worker.add.remote(times=2) for worker in hosted] == [11, 15, 19]
    sent = cloudpickle.loads(cloudpickle.dumps(hosted[1]))  # to a task, or to another worker
    assert sent.add.remote() == 21
    with pytest.raises(AttributeError, match="missing"):
        hosted[0].missing.remote()


def test_methods_of_a_hosted_class_may_be_private_and_return_several_references(hosted):
    for worker in (hosted[0], cloudpickle.loads(cloudpickle.dumps(hosted[0]))):
        assert worker._both.remote() == (5, 2)
        assert worker.actor.num_returns == 2
    hosted[0]._both.options(num_returns=1).remote()
    assert hosted[0].actor.num_returns == 1


def test_a_second_class_on_the_workers_leaves_the_first_as_it_is(hosted):
    second = TrainWorkerGroup(hosted._executor, Counter, (100,), {})
    assert second[0].add.remote() == 101
    assert hosted[0].add.remote() == 7


@pytest.mark.parametrize(("patience_s", "graceful"), [(5, True), (0, False)])
def test_a_hosted_group_ends_its_workers(hosted, patience_s, graceful):
    executor = hosted._executor
    hosted.shutdown(patience_s)
    assert executor.ended == (graceful, patience_s)
    assert len(hosted) == 0


def test_workers_let_go_of_objects_that_nothing_refers_to(hosted):
    """With the next group: a cell of a notebook that is run again holds one more, not one each."""
    executor, held = hosted._executor, worker_group._HOSTED
    worker = TrainWorkerGroup(executor, Counter, (0,), {})[2]  # all that is left of its group
    for _ in range(3):
        TrainWorkerGroup(executor, Counter, (100,), {})
    gc.collect()
    TrainWorkerGroup(executor, Counter, (200,), {})
    assert len(held) == 3
    assert worker.add.remote() == 1
    assert hosted[0].add.remote() == 7
    add, worker = worker.add, None
    TrainWorkerGroup(executor, Counter, (300,), {})
    assert add.remote() == 2


def test_an_object_that_was_lost_with_its_worker_is_missed_by_name(hosted):
    worker_group._HOSTED.clear()
    with pytest.raises(RuntimeError, match=r"add\(\): .* Call to_worker_group\(\) again"):
        hosted[1].add.remote()
