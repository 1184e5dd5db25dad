"""The executor of training functions on a real cluster: order, hooks, ranks, turns, checkpoints."""

import json
import os
import signal
import subprocess
import sys

import pytest

from raysgd import ElasticConfig, train
from raysgd.train.backend import (
    Backend,
    BackendConfig,
    BackendExecutor,
    InactiveWorkerGroupError,
    TrainBackendError,
    TrainingWorkerError,
    WorkerGroup,
)
from raysgd.train.torch import TorchConfig
from tests.conftest import wait_until


class Noted(Backend):
    """Does nothing but share GPUs."""

    share_cuda_visible_devices = True


class NotedConfig(BackendConfig):
    @property
    def backend_cls(self):
        return Noted


@pytest.fixture
def executors(ray_cluster):
    made = []

    def make(config=None, num_workers=2, **arguments):
        executor = BackendExecutor(config or NotedConfig(), num_workers, **arguments)
        made.append(executor)
        return executor

    yield make
    for executor in made:
        executor.shutdown()


@pytest.fixture
def executor(executors):
    made = executors()
    made.start()
    return made


def saves_twice():
    for epoch in range(2):
        train.save_checkpoint(epoch=epoch)


def test_before_the_start_and_after_the_end_there_are_no_workers(executors, tmp_path):
    executor = executors()
    for _ in range(2):
        assert not executor.is_started
        for call in (
            lambda: executor.start_training(lambda: 1, run_dir=tmp_path),
            executor.fetch_next_result,
            executor.finish_training,
            lambda: executor.run(lambda: 1),
            lambda: executor.worker_group,
        ):
            with pytest.raises(InactiveWorkerGroupError):
                call()
        executor.start()
        assert len(executor.worker_group) == 2
        executor.shutdown()


def test_the_hook_runs_on_every_worker_and_functions_return_by_rank(executors, tmp_path):
    executor = executors()
    executor.start(initialization_hook=lambda: os.environ.update(RAYSGD_TEST="1"))
    assert executor.run(lambda: os.environ["RAYSGD_TEST"]) == ["1", "1"]
    executor.start_training(lambda: (train.world_rank(), train.local_rank()), tmp_path)
    assert executor.finish_training() == [(0, 0), (1, 1)]


def test_calls_out_of_order_are_errors_and_change_nothing(executor, tmp_path):
    for call in (executor.fetch_next_result, executor.finish_training, executor.pause_reporting):
        with pytest.raises(TrainBackendError, match="start_training"):
            call()
    executor.start_training(lambda: 1, run_dir=tmp_path)
    with pytest.raises(TrainBackendError, match="finish_training"):
        executor.start_training(lambda: 2, run_dir=tmp_path)
    assert executor.finish_training() == [1, 1]
    with pytest.raises(TrainBackendError):
        executor.fetch_next_result()


def test_reports_come_by_rank_and_those_that_nobody_fetches_hold_nothing_up(executor):
    def reports():
        for n in range(3):
            train.report(n=n, rank=train.world_rank())
        return "done"

    executor.start_training(reports)
    results = executor.fetch_next_result()
    assert [(r["n"], r["rank"], r["_training_iteration"]) for r in results] == [
        (0, 0, 1),
        (0, 1, 1),
    ]
    assert executor.finish_training() == ["done", "done"]


def test_checkpoints_are_numbered_from_the_id_that_was_given(executor, tmp_path):
    executor.start_training(saves_twice, tmp_path, latest_checkpoint_id=100)
    executor.finish_training()
    assert executor.latest_checkpoint_id == 102
    assert executor.latest_checkpoint == {"epoch": 1}
    assert executor.latest_checkpoint_dir == tmp_path / "checkpoints"
    assert executor.latest_checkpoint_path.name == "checkpoint_000102"
    assert executor.best_checkpoint_path == executor.latest_checkpoint_path
    assert sorted(os.listdir(tmp_path / "checkpoints")) == [
        "checkpoint_000101",
        "checkpoint_000102",
    ]


def test_a_run_starts_from_a_checkpoint_or_its_path(executor, tmp_path):
    executor.start_training(saves_twice, tmp_path)
    executor.finish_training()
    for given in ({"epoch": 1}, executor.latest_checkpoint_path):
        executor.start_training(lambda: train.load_checkpoint()["epoch"], checkpoint=given)
        assert executor.finish_training() == [1, 1]


@pytest.mark.parametrize("first", [0, 1])
def test_workers_that_report_and_save_differently_are_an_error(executor, first):
    def uneven():
        if train.world_rank() == first:
            train.save_checkpoint(epoch=0)
        else:
            train.report(epoch=0)

    executor.start_training(uneven)
    with pytest.raises(RuntimeError, match=f"worker {first} saved a checkpoint"):
        executor.finish_training()
    executor.start_training(lambda: 1)  # and the workers can be used on
    assert executor.finish_training() == [1, 1]


def test_a_worker_that_dies_is_an_error_once_there_are_no_retries_left(executors):
    executor = executors(max_retries=1)
    executor.start()

    def train_to_the_end():
        executor.start_training(lambda: os.kill(os.getpid(), signal.SIGKILL))
        executor.finish_training()

    with pytest.raises(TrainingWorkerError, match="lost workers 2 times") as raised:
        train_to_the_end()
    assert str(raised.value).count("process ") >= 2  # each with its cause
    with pytest.raises(RuntimeError):
        executor.run(lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert executor.run(lambda: 1) == [1, 1]


class KillsAsItIsShared:
    """Data of which a worker dies in the moment in which they are first shared out."""

    def __init__(self, pid):
        self.pid = pid

    def split(self, number, equal, locality_hints):
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)
            self.pid = None
        return [f"share {rank} of {number}" for rank in range(number)]


def test_a_worker_lost_as_data_are_shared_out_costs_a_retry_and_not_the_run(executors):
    executor = executors(max_retries=1)
    executor.start()
    data = KillsAsItIsShared(executor.run(os.getpid)[1])
    executor.start_training(train.get_dataset_shard, dataset=data)
    assert executor.finish_training() == ["share 0 of 2", "share 1 of 2"]


def test_a_worker_lost_as_data_are_shared_out_ends_a_run_without_retries(executors):
    executor = executors(max_retries=0)
    executor.start()
    data = KillsAsItIsShared(executor.run(os.getpid)[0])
    with pytest.raises(TrainingWorkerError, match="lost workers 1 times, and max_retries=0"):
        executor.start_training(train.get_dataset_shard, dataset=data)


def test_a_checkpoint_that_is_lost_with_its_worker_is_made_again(executors, tmp_path, monkeypatch):
    def function():
        reached = train.load_checkpoint()["step"] if train.load_checkpoint() else 0
        for step in range(reached + 1, 4):
            own = train.Checkpoint.from_dict({"step": step}) if train.world_rank() == 1 else None
            train.report({"step": step}, checkpoint=own)
        return reached

    executor = executors(max_retries=1)
    executor.start()
    supervisor = executor._supervisor
    call, asked = supervisor.call, []

    def call_of_a_worker_that_dies(method, **arguments):
        if method == "checkpoint":
            asked.append(arguments["rank"])
            if len(asked) == 2:
                supervisor.members[arguments["rank"]].kill_process()
        return call(method, **arguments)

    monkeypatch.setattr(supervisor, "call", call_of_a_worker_that_dies)
    executor.start_training(function, tmp_path)
    steps = []
    while (results := executor.fetch_next_result()) is not None:
        steps.append([result["step"] for result in results])
    assert steps == [[1, 1], [2, 2], [3, 3]]
    assert executor.finish_training() == [1, 1]  # from the checkpoint before
    assert executor.latest_checkpoint == {"step": 3}
    assert asked == [1] * 4


@pytest.mark.parametrize("init_method", ["env", "tcp"])
def test_torch_enters_and_leaves_its_process_group(executors, init_method):
    def size():
        import torch.distributed as dist

        rank = os.environ.get("RANK")
        return dist.get_world_size() if dist.is_initialized() else 0, rank

    executor = executors(TorchConfig(backend="gloo", init_method=init_method))
    executor.start()
    executor.start_training(size)
    ranks = ["0", "1"] if init_method == "env" else [None, None]
    assert executor.finish_training() == [(2, ranks[0]), (2, ranks[1])]
    executor._backend.on_shutdown(executor.worker_group, executor._backend_config)
    executor.start_training(size)
    assert [found[0] for found in executor.finish_training()] == [0, 0]


class Encoding(Backend):
    @staticmethod
    def encode_data(data):
        return {key: [value] for key, value in data.items()}

    @staticmethod
    def decode_data(data):
        return {k: v[0] if isinstance(v, list) else v for k, v in data.items()}


class EncodingConfig(BackendConfig):
    def backend_cls(self):
        return Encoding


def test_data_is_encoded_on_the_worker_and_decoded_on_the_driver(executors, tmp_path):
    def function():
        train.report(a=1)
        train.save_checkpoint(b=2)
        return train.load_checkpoint()

    executor = executors(EncodingConfig())
    executor.start()
    executor.start_training(function, tmp_path)
    assert [result["a"] for result in executor.fetch_next_result()] == [1, 1]
    assert executor.finish_training() == [{"b": 2}, {"b": 2}]
    assert executor.latest_checkpoint == {"b": 2}


def test_an_error_is_raised_while_other_workers_are_busy(ray_cluster, tmp_path):
    group, done = WorkerGroup(num_workers=2), tmp_path / "done"

    def work(pid):
        if os.getpid() == pid:
            raise ValueError("on purpose")
        wait_until(done.exists)
        return "done"

    try:
        last = group.execute(os.getpid)[1]
        with pytest.raises(ValueError, match="on purpose"):
            group.execute(work, last)
        assert not done.exists()
        done.touch()
        assert group.execute(work, 0) == ["done"] * 2  # after what was busy
    finally:
        group.shutdown(patience_s=1)


def test_workers_come_and_go_in_a_group_of_ones_own(ray_cluster):
    group = WorkerGroup(num_workers=2)
    try:
        assert group.execute(lambda a, b=0: a + b, 1, b=2) == [3, 3]
        assert ray_cluster.get(group.execute_async(os.getpid)) == group.execute(os.getpid)
        assert group.execute_single(1, lambda: 5) == 5
        assert ray_cluster.get(group.execute_single_async(0, lambda: 6)) == 6
        first, second = group.execute(os.getpid)
        group.add_workers(1)
        assert len(group) == 3
        group.remove_workers([0])
        assert group.execute(os.getpid)[0] == second != first
        with pytest.raises(RuntimeError, match="started already"):
            group.start()
        with pytest.raises(ValueError, match="worker_index=7"):
            group.execute_single(7, os.getpid)
        with pytest.raises(ZeroDivisionError):
            group.execute(lambda: 1 / 0)
    finally:
        group.shutdown(patience_s=1)
    with pytest.raises(RuntimeError, match="shut down"):
        group.execute(os.getpid)


def test_more_workers_later_when_there_is_room_for_them(ray_cluster, executors, tmp_path):
    """Two start, since half of the cluster is taken; they grow at a checkpoint, which is kept."""
    from ray.util import placement_group, remove_placement_group

    taken = placement_group([{"CPU": 2}])
    ray_cluster.get(taken.ready())
    executor = executors(num_workers=(1, 4), elastic=ElasticConfig(resize_cooldown_s=0.1))
    executor.start()

    def function():
        state = train.load_checkpoint() or {"step": 0, "sizes": []}
        step, sizes = state["step"], state["sizes"]
        while train.world_size() < 4 and step < 2000:
            step += 1
            sizes = sorted({*sizes, train.world_size()})
            train.save_checkpoint(step=step, sizes=sizes)
            train.report(step=step)
        return step, sizes, train.world_size()

    executor.start_training(function, tmp_path)
    steps = [executor.fetch_next_result()[0]["step"] for _ in range(5)]
    remove_placement_group(taken)
    while (results := executor.fetch_next_result()) is not None:
        steps.append(results[0]["step"])
    found = executor.finish_training()
    assert len(found) == 4
    assert found[0][1:] == ([2], 4)
    # no step was done twice: the function was held at its checkpoint when the workers restarted
    assert len(steps) == len(set(steps))
    assert [e.kind for e in executor.events] == ["started", "grown"]


GPU_NODES = """
import json, os, ray
from ray.cluster_utils import Cluster
from raysgd.train.backend import Backend, BackendConfig, BackendExecutor

class Sharing(Backend):
    share_cuda_visible_devices = True

class Config(BackendConfig):
    backend_cls = Sharing

cluster = Cluster()
for _ in range(2):
    cluster.add_node(num_cpus=2, num_gpus=2)
ray.init(address=cluster.address, log_to_driver=False)
found = {}
for num_workers in (1, 2, 3, 4):
    executor = BackendExecutor(Config(), num_workers, 0, 1)
    executor.start()
    executor.start_training(lambda: os.environ["CUDA_VISIBLE_DEVICES"])
    found[num_workers] = sorted(executor.finish_training())
    executor.shutdown()
print(json.dumps(found))
"""


def test_every_worker_sees_the_gpus_that_the_workers_of_its_node_have():
    """On two nodes with two GPUs each, which are only counted."""
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(
        [sys.executable, "-c", GPU_NODES],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["1"] in (["0"], ["1"])
    assert found["2"] == ["0,1", "0,1"]
    assert found["3"] in (["0", "0,1", "0,1"], ["0,1", "0,1", "1"])
    assert found["4"] == ["0,1"] * 4


def test_the_checkpoint_of_another_worker_is_kept_where_worker_0_has_none(executor):
    def function():
        made = train.Checkpoint.from_dict({"rank": 1}) if train.world_rank() == 1 else None
        train.report({"a": 1}, checkpoint=made)

    executor.start_training(function)
    executor.finish_training()
    assert executor.latest_checkpoint == {"rank": 1}
