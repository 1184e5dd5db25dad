"""The executor of training functions on a real cluster: order, hooks, ranks, turns, checkpoints.

Most tests share two workers.
"""

import functools
import os
import signal

import cloudpickle
import pytest
import ray

from raysgd import train
from raysgd.train import worker_group
from raysgd.train.backend import (
    BackendConfig,
    BackendExecutor,
    InactiveWorkerGroupError,
    TrainBackendError,
    TrainingWorkerError,
    WorkerGroup,
)
from raysgd.train.worker_group import TrainWorkerGroup
from tests.conftest import wait_until


@pytest.fixture(scope="module")
def executor(module_cluster):
    """Two shared workers. A run may lose workers once."""
    made = BackendExecutor(BackendConfig(), 2, max_retries=1)
    made.start(initialization_hook=lambda: os.environ.update(RAYSGD_HOOK=str(os.getpid())))
    yield made
    made.shutdown()


def saves_twice():
    for epoch in range(2):
        train.save_checkpoint(epoch=epoch)


def test_the_hook_runs_on_every_worker_and_functions_return_by_rank(executor):
    hooked = executor.run(lambda: os.environ["RAYSGD_HOOK"])
    assert hooked == [str(pid) for pid in executor.run(os.getpid)]
    hosts = [worker.metadata.hostname for worker in executor.worker_group.workers]
    assert hosts == [os.uname().nodename] * 2
    executor.start_training(lambda: (train.world_rank(), train.local_rank()))
    assert executor.finish_training() == [(0, 0), (1, 1)]


def test_calls_out_of_order_are_errors_and_change_nothing(executor):
    for call in (executor.fetch_next_result, executor.finish_training, executor.pause_reporting):
        with pytest.raises(TrainBackendError, match="start_training"):
            call()
    executor.start_training(lambda: 1)
    with pytest.raises(TrainBackendError, match="finish_training"):
        executor.start_training(lambda: 2)
    with pytest.raises(ZeroDivisionError):
        executor.run(lambda: 1 / 0)
    assert executor.finish_training() == [1, 1]


def test_a_run_without_checkpoints_keeps_earlier_ones(executor, tmp_path):
    executor.start_training(saves_twice, tmp_path / "1", latest_checkpoint_id=100)
    executor.finish_training()
    assert executor.latest_checkpoint_id == 102
    assert executor.latest_checkpoint_dir == tmp_path / "1" / "checkpoints"
    newest = executor.latest_checkpoint_path
    executor.start_training(train.load_checkpoint, tmp_path / "2", checkpoint={"epoch": 7})
    executor.finish_training()
    assert executor.latest_checkpoint["epoch"] == 1
    assert executor.latest_checkpoint_path == executor.best_checkpoint_path == newest


def test_an_error_is_raised_while_other_workers_are_busy(executor, tmp_path):
    group, done = executor.worker_group, tmp_path / "done"

    def work(pid):
        if os.getpid() == pid:
            raise ValueError("on purpose")
        wait_until(done.exists)
        return "done"

    last = group.execute(os.getpid)[1]
    for execute in (group.execute, lambda *call: executor.run(functools.partial(*call))):
        with pytest.raises(ValueError, match="on purpose"):
            execute(work, last)
        assert not done.exists()
        done.touch()
        assert execute(work, 0) == ["done"] * 2  # waits for the busy worker
        done.unlink()


class Counter:
    def __init__(self, start, by=1):
        self.value, self.by = start, by

    def add(self, times=1):
        self.value += times * self.by
        return self.value

    def _value(self):
        return self.value


def test_methods_of_classes_on_the_workers_are_those_of_actors(executor):
    first, second = (TrainWorkerGroup(executor, Counter, (n,), {"by": 2}) for n in (5, 100))
    sent = cloudpickle.loads(cloudpickle.dumps(first[0]))  # as in a task
    calls = [second[0].add.remote(), first[0].add.remote(times=2), sent._value.remote()]
    assert ray.get(calls) == [102, 9, 9]
    executor.run(lambda: worker_group._HOSTED.clear())  # as a restart does
    with pytest.raises(RuntimeError, match=r"add\(\): .* Call to_worker_group\(\) again"):
        ray.get(first[1].add.remote())
    ray.wait([first[1].actor.execute.remote(os._exit, 1)])  # returns when it has died
    assert len(TrainWorkerGroup(executor, Counter, (1,), {})) == 2  # restarts the workers


class KillsAsItIsShared:
    """Kills a worker when its shards are first sent."""

    def __init__(self, pid):
        self.pid = pid

    def materialize(self):
        return self

    def count(self):
        return 0

    def split(self, number, equal, locality_hints):
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)
            self.pid = None
        return [f"share {rank} of {number}" for rank in range(number)]


def test_loss_without_retries_ends_the_run_and_workers_can_start_again(module_cluster):
    executor = BackendExecutor(BackendConfig(), 1, max_retries=0)
    try:
        executor.start()
        data = KillsAsItIsShared(executor.run(os.getpid)[0])
        with pytest.raises(TrainingWorkerError, match="lost workers 1 time, but max_retries=0"):
            executor.start_training(train.get_dataset_shard, dataset=data)
        executor.shutdown()
        assert not executor.is_started
        with pytest.raises(InactiveWorkerGroupError):
            executor.run(lambda: 1)
        executor.start()
        with pytest.raises(TrainingWorkerError, match=r"call of run\(\) failed.*max_retries=0"):
            executor.run(lambda: os.kill(os.getpid(), signal.SIGKILL))
        assert executor.run(train.world_size) == [1]
    finally:
        executor.shutdown()


def test_workers_can_be_added_and_removed(module_cluster):
    group = WorkerGroup(num_workers=1)
    try:
        (first,) = group.execute(os.getpid)
        with pytest.raises(ZeroDivisionError):
            group.execute(lambda: 1 / 0)
        with pytest.raises(RuntimeError, match="already started"):
            group.start()
        group.add_workers(1)
        assert len(group) == 2
        for index in (-1, 2):
            for call in (group.execute_single, group.execute_single_async):
                with pytest.raises(ValueError, match=rf"worker_index={index}: .*0 and 1"):
                    call(index, print)
            with pytest.raises(ValueError, match=rf"worker_index={index}: .*0 and 1"):
                group.remove_workers([0, index])
        assert group.execute(lambda a, b=0: a + b, 1, b=2) == [3, 3]
        assert module_cluster.get(group.execute_async(os.getpid)) == group.execute(os.getpid)
        assert group.execute_single(1, lambda: 5) == 5
        assert module_cluster.get(group.execute_single_async(0, lambda: 6)) == 6
        second = group.execute(os.getpid)[1]
        group.remove_workers([0])
        assert group.execute(os.getpid) == [second] != [first]
    finally:
        group.shutdown(patience_s=1)
    for call in (group.execute, group.execute_async):
        with pytest.raises(RuntimeError, match=r"no workers.*Call start\(\) first"):
            call(os.getpid)
