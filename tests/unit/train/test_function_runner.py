"""The runner of a training function in a worker: results, stops, and restarts."""

import importlib
import multiprocessing
import os
import sys
import threading
import weakref
from functools import partial
from types import SimpleNamespace

import cloudpickle
import pytest
import torch

from raysgd import train
from raysgd._internal.runner import WorkerContext
from raysgd.elastic.call import LoadRequest
from raysgd.train import integrations, worker_session
from raysgd.train.function_runner import EndRunRequest, FunctionRunner, NextResultRequest
from raysgd.train.worker_session import RunSpec


class Worker:
    """Sends requests to a runner, as the driver does."""

    def __init__(self, rank):
        self.rank, self.runner = rank, FunctionRunner(False)
        self.runner.setup(WorkerContext(world_rank=rank, world_size=2))

    def begin(self, function, run="one", checkpoint=None):
        spec = RunSpec(run, cloudpickle.dumps(function), checkpoint)
        self.runner.handle(LoadRequest(state=vars(spec)))

    def next(self):
        return self.runner.handle(NextResultRequest())


@pytest.fixture
def worker(request):
    worker = Worker(getattr(request, "param", 0))
    yield worker
    worker.runner.handle(EndRunRequest())
    worker.runner.teardown()
    worker_session.set_datasets(None)


@pytest.mark.filterwarnings(r"ignore:`\w+` is meant to only be called")  # by Ray 2.44
@pytest.mark.filterwarnings(r"ignore:This API is deprecated")
@pytest.mark.parametrize("worker", [0, 1], indirect=True)
def test_ray_sets_up_a_tracker_on_worker_0_only(worker, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    package = importlib.import_module("ray.air.integrations")
    for name in ("mlflow", "wandb"):  # restore the modules of Ray
        module = importlib.import_module(f"{package.__name__}.{name}")
        monkeypatch.delitem(sys.modules, module.__name__)
        monkeypatch.delattr(package, name)
    monkeypatch.setattr(sys, "meta_path", [integrations.IntegrationFinder, *sys.meta_path])
    uri = (tmp_path / "runs").as_uri()

    def function():
        from ray.air.integrations import mlflow, wandb

        run = mlflow.setup_mlflow(
            tracking_uri=uri, experiment_name="a", create_experiment_if_not_exists=True
        )
        run.log_metric("loss", 0.5)
        run.end_run()
        with run.start_run():
            run.log_metric("loss", 0.5)
        return wandb.WandbLoggerCallback.__name__

    worker.begin(function)
    assert worker.next().return_value == "WandbLoggerCallback"
    assert (tmp_path / "runs").exists() == (worker.rank == 0)


def test_a_run_that_ignores_everything_keeps_nothing(run):
    run(rank=1, size=2)
    ignored, loss = integrations._on_worker_0(lambda: None), torch.ones(1)
    with ignored as inner:
        inner.log({"loss": loss}).more[0] = loss
    kept = weakref.ref(loss)
    del loss
    assert kept() is None


def test_turns_come_one_after_the_other_and_the_value_at_the_end(worker):
    def function():
        train.report(a=1)
        train.save_checkpoint(b=2)
        return train.world_size()

    worker.begin(function)
    results = [worker.next() for _ in range(3)]
    assert [result.kind for result in results] == ["report", "checkpoint", "end"]
    assert results[2].return_value == 2
    assert worker.runner.status().process.is_blocked_on_driver
    assert worker.runner.status().position.global_step == 1


def test_a_second_run_may_use_another_precision_of_accelerate(worker):
    pytest.importorskip("accelerate")

    def function(precision):
        from accelerate import Accelerator

        return Accelerator(mixed_precision=precision, cpu=True).mixed_precision

    for run, precision in enumerate(("no", "bf16", "no")):
        worker.begin(partial(function, precision), run)
        assert worker.next().return_value == precision


def test_runs_of_wandb_end_with_the_function(worker, monkeypatch):
    codes = []
    stand_in = SimpleNamespace(teardown=lambda exit_code: codes.append(exit_code))
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    worker.begin(int)
    worker.next()
    worker.begin([].pop, "two")
    with pytest.raises(IndexError):
        worker.next()
    assert codes == [0, 1]


def test_a_value_that_cannot_be_pickled_becomes_none(worker, caplog):
    worker.begin(threading.Lock)
    assert worker.next().return_value is None
    assert "returned a lock that cannot be pickled" in caplog.text


def test_after_a_restart_the_function_begins_from_the_checkpoint(worker):
    worker.begin(train.load_checkpoint, checkpoint=cloudpickle.dumps({"step": 3}))
    assert worker.next().return_value == {"step": 3}


def test_a_stop_ends_a_function_that_waits_for_the_driver(worker):
    def function():
        try:
            while True:
                train.report(a=1)
        except Exception:
            return "a training loop caught the stop"

    worker.begin(function)
    worker.next()
    worker.runner.handle(EndRunRequest())
    with pytest.raises(RuntimeError, match="was stopped"):
        worker.next()
    assert worker_session.process_state.session is None


def test_a_new_generation_drops_the_function_and_the_rank(worker):
    worker.begin(lambda: 1)
    worker.runner.rejoin(WorkerContext(world_rank=1, world_size=3), leader_rank=0)
    with pytest.raises(RuntimeError, match="no function"):
        worker.next()
    worker.begin(train.world_rank, "two")
    assert worker.next().return_value == 1
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # as a loader may start them
        assert pool.apply(train.world_rank) == 1


@pytest.mark.parametrize(
    ("shares", "variable", "visible"),
    [(True, None, "0,1"), (False, None, "1"), (True, "0", "1"), (False, "1", "0,1")],
)
def test_workers_of_a_node_see_all_its_gpus_if_asked_for(monkeypatch, shares, variable, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    if variable is not None:
        monkeypatch.setenv("TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES", variable)
    FunctionRunner(shares).prepare(WorkerContext(visible_gpus=("0", "1"), gpu_index=1))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
