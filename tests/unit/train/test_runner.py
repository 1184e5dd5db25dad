"""What hosts a training function in a worker: life, turns, stops, restarts. Threads, no sleeps."""

import threading

import cloudpickle
import pytest

from raysgd import train
from raysgd._internal.context import WorkerContext
from raysgd.train import session
from raysgd.train.runner import FunctionRunner
from raysgd.train.session import Plan


@pytest.fixture
def make():
    made = []

    def make(function, rank=0, checkpoint=None, run="one", **arguments):
        runner = FunctionRunner(False, **arguments)
        runner.setup(WorkerContext(world_rank=rank, world_size=2))
        made.append(runner)
        plan = Plan(run, cloudpickle.dumps(function), checkpoint)
        return runner, plan

    yield make
    for runner in made:
        runner.end_run()
        runner.teardown()
    session.receive_shards(None)


def test_turns_come_one_after_the_other_and_the_value_at_the_end(make):
    def function():
        train.report(a=1)
        train.save_checkpoint(b=2)
        return train.world_size()

    runner, plan = make(function)
    runner.begin(plan)
    turns = [runner.next() for _ in range(3)]
    assert [turn.kind for turn in turns] == ["report", "checkpoint", "end"]
    assert turns[2].value == 2
    assert runner.progress().blocked_on_driver
    assert runner.progress().global_step == 1


def test_a_function_may_return_what_cannot_be_pickled(make, caplog):
    runner, plan = make(threading.Lock)
    runner.begin(plan)
    turn = runner.next()
    assert (turn.kind, turn.value) == ("end", None)
    assert "returned a lock that cannot be pickled" in caplog.text


def test_a_function_begins_once_however_often_it_is_told_to(make):
    begun = threading.Semaphore(0)
    session.receive_shards(begun)

    def function():
        train.get_dataset_shard().release()

    runner, plan = make(function)
    runner.begin(plan)
    runner.begin(plan)
    assert runner.next().kind == "end"
    assert begun.acquire(blocking=False)
    assert not begun.acquire(blocking=False)


def test_after_a_restart_the_function_begins_from_the_checkpoint(make):
    runner, plan = make(train.load_checkpoint, checkpoint=cloudpickle.dumps({"step": 3}))
    runner.load_state_dict({"plan": plan})
    assert runner.next().value == {"step": 3}


def test_another_run_begins_another_function(make):
    runner, first = make(lambda: 1)
    _, second = make(lambda: 2, run="two")
    for plan, value in ((first, 1), (second, 2)):
        runner.begin(plan)
        assert runner.next().value == value


class Shared:
    """What two runs share, handed to them as their data set."""

    def __init__(self):
        self.begun = threading.Event()
        self.errors = []
        self.thread = None


def test_a_thread_that_a_run_left_behind_does_not_report_into_the_next(make):
    shared = Shared()
    session.receive_shards(shared)

    def leaves_a_thread():
        shared = train.get_dataset_shard()

        def report_late():
            shared.begun.wait()
            try:
                train.report(late=True)
            except RuntimeError as error:
                shared.errors.append(str(error))

        shared.thread = threading.Thread(target=report_late, name="late")
        shared.thread.start()

    def reports_from_a_thread():
        shared = train.get_dataset_shard()
        shared.begun.set()
        shared.thread.join()
        own = threading.Thread(target=train.report, kwargs={"late": False})
        own.start()
        own.join()

    runner, plan = make(leaves_a_thread)
    runner.begin(plan)
    assert runner.next().kind == "end"
    runner.begin(Plan("two", cloudpickle.dumps(reports_from_a_thread)))
    assert runner.next().metrics["late"] is False
    assert runner.next().kind == "end"
    assert len(shared.errors) == 1
    assert "report() was called in a thread, 'late'" in shared.errors[0]


def test_a_stop_ends_a_function_that_waits_for_the_driver(make):
    def function():
        try:
            while True:
                train.report(a=1)
        except Exception:  # as training loops have it
            return "went on"

    runner, plan = make(function)
    runner.begin(plan)
    runner.next()
    runner.request_stop(True)
    runner.end_run()
    with pytest.raises(RuntimeError, match="was stopped"):
        runner.next()
    assert session.current() is None


def test_what_a_function_raises_is_raised_as_itself(make):
    def function():
        raise ValueError("bad batch")

    runner, plan = make(function)
    runner.begin(plan)
    with pytest.raises(ValueError, match="bad batch"):
        runner.next()


def test_a_worker_knows_its_place_between_runs_as_well():
    """Classes of `to_worker_group` ask for it, and they are no run."""
    runner = FunctionRunner(False)
    try:
        runner.setup(WorkerContext(world_rank=1, world_size=2, local_rank=1, local_world_size=2))
        assert (train.world_rank(), train.local_rank(), train.world_size()) == (1, 1, 2)
        assert train.get_context().get_local_world_size() == 2
        runner.rejoin(WorkerContext(world_rank=0, world_size=1), 0)
        assert (train.world_rank(), train.world_size()) == (0, 1)
    finally:
        runner.teardown()
    assert session.worker_context() is None


def test_a_new_generation_forgets_the_function(make):
    runner, plan = make(lambda: 1)
    runner.begin(plan)
    runner.rejoin(WorkerContext(world_rank=1, world_size=3), leader=0)
    with pytest.raises(RuntimeError, match="no function"):
        runner.next()
    runner.begin(Plan("two", cloudpickle.dumps(train.world_rank)))
    assert runner.next().value == 1


def test_gpus_of_a_node_are_visible_to_all_its_workers_where_that_is_asked_for(monkeypatch):
    name = "TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES"  # of the driver; the last word
    asked = ((True, None, "0,1"), (False, None, "1"), (True, "0", "1"), (False, "1", "0,1"))
    for shares, switch, seen in asked:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        monkeypatch.delenv(name, raising=False)
        if switch is not None:
            monkeypatch.setenv(name, switch)
        context = WorkerContext(visible_gpus=("0", "1"), gpu_index=1)
        FunctionRunner(shares).prepare(context)
        assert __import__("os").environ["CUDA_VISIBLE_DEVICES"] == seen


def test_a_worker_hands_its_checkpoint_over_where_its_rank_is_asked_for(make):
    def function():
        train.report({"a": 1}, checkpoint=train.Checkpoint.from_dict({"b": 2}))

    runner, plan = make(function, rank=1)
    assert runner.checkpoint(rank=1) is None  # as after a restart
    runner.begin(plan)
    turn = runner.next()
    assert (turn.has_checkpoint, turn.checkpoint) == (True, None)
    assert runner.checkpoint(rank=0) is None
    assert cloudpickle.loads(runner.checkpoint(rank=1)) == {"b": 2}
