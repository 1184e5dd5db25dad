"""Scripts for `ray.train` of Ray 1.13, with only the imports changed.

A training function is followed by a test, which does what the script did with its trainer. All
tests share one trainer. The test that kills a worker comes after those that may leave something in
the processes. The test that ends the workers is the last.

Workers import this module, so it imports slow packages only in functions.
"""

import json
import os
import signal
import sys
import threading

import cloudpickle
import pytest
import ray
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import train
from raysgd.train import CheckpointStrategy, Trainer, TrainingCallback, session
from raysgd.train.callbacks.profile import TorchTensorboardProfilerCallback
from raysgd.train.callbacks.results_preprocessors import AverageResultsPreprocessor
from raysgd.train.constants import TIMESTAMP
from raysgd.train.torch import TorchWorkerProfiler  # also makes train.torch
from tests.conftest import wait_until


@pytest.fixture(scope="module")
def trainer(module_cluster, tmp_path_factory):
    logdir = str(tmp_path_factory.mktemp("logs"))
    trainer = Trainer(backend="torch", num_workers=2, logdir=logdir, max_retries=-1)
    trainer.start()
    yield trainer
    trainer.shutdown()


def line(num_points=64):
    x = torch.linspace(-1, 1, num_points).reshape(-1, 1)
    return TensorDataset(x, 2 * x + 1)


# ---- linear regression, with the helpers for models and loaders


def linear_epoch(loader, model, loss_fn, optimizer):
    for X, y in loader:  # noqa: N806  as scripts named it
        loss = loss_fn(model(X), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def linear_func(config):
    # different weights, which DistributedDataParallel synchronizes
    torch.manual_seed(train.world_rank())
    loader = DataLoader(line(), batch_size=config.get("batch_size", 8), shuffle=True)
    loader = train.torch.prepare_data_loader(loader)
    model = train.torch.prepare_model(nn.Linear(1, config.get("hidden_size", 1)))
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=config.get("lr", 1e-2))
    results = []
    for _ in range(config.get("epochs", 3)):
        result = {"loss": linear_epoch(loader, model, loss_fn, optimizer)}
        train.report(**result)
        results.append(result)
    weight, _ = model.state_dict().values()
    return results, len(loader), weight.item()


def has_dynamo():
    return "torch._dynamo.eval_frame" in sys.modules


def test_linear(trainer):
    before = trainer.run(has_dynamo)  # another test may have loaded it
    config = {"lr": 0.2, "batch_size": 8, "epochs": 6}
    results = trainer.run(linear_func, config=config)
    assert [r[1] for r in results] == [4, 4]
    assert results[0][2] == results[1][2] == pytest.approx(2, abs=0.1)
    losses = [result["loss"] for result in results[0][0]]
    assert losses[-1] < 0.1 * losses[0]
    assert trainer.run(has_dynamo) == before


# ---- an iterator over the results


def test_an_iterator_over_results(trainer):
    def train_func(config):
        for epoch in range(config["epochs"]):
            session.report(epoch=epoch, rank=session.world_rank())
        return "done"

    iterator = trainer.run_iterator(train_func, config={"epochs": 3})
    assert not iterator.is_finished()
    assert iterator.get_final_results() is None
    for epoch, results in enumerate(iterator):
        assert [(r["epoch"], r["rank"]) for r in results] == [(epoch, 0), (epoch, 1)]
    assert iterator.is_finished()
    assert iterator.get_final_results() == ["done", "done"]
    forced = trainer.run_iterator(train_func, config={"epochs": 3})
    assert forced.get_final_results(force=True) == ["done", "done"]
    assert list(forced) == []


# ---- checkpoints: keep some of them, and resume from one


def run_number(trainer):
    return int(trainer.latest_run_dir.name.removeprefix("run_"))


def checkpoint_func(config):
    state = train.load_checkpoint()
    start = state["epoch"] + 1 if state else 0
    model = nn.Linear(1, 1)
    if state:
        model.load_state_dict(state["model"])
    for epoch in range(start, start + 4):
        loss = config["losses"][epoch % 4]
        train.save_checkpoint(epoch=epoch, loss=loss, model=model.state_dict())
    return start


def test_checkpoints_with_a_strategy(trainer):
    strategy = CheckpointStrategy(
        num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min"
    )
    config = {"losses": [2.0, 4.0, 1.0, 3.0]}
    assert trainer.run(checkpoint_func, config, checkpoint_strategy=strategy) == [0, 0]
    first = run_number(trainer)
    assert trainer.latest_checkpoint["epoch"] == 3
    files = sorted(path.name for path in trainer.latest_checkpoint_dir.iterdir())
    assert files == ["checkpoint_000001", "checkpoint_000003"]
    assert trainer.best_checkpoint["loss"] == 1.0
    with trainer.best_checkpoint_path.open("rb") as file:
        assert cloudpickle.load(file)["loss"] == 1.0
    best = trainer.load_checkpoint_from_path(checkpoint_file_path=trainer.best_checkpoint_path)
    assert best["epoch"] == 2
    path = trainer.best_checkpoint_path
    assert trainer.run(checkpoint_func, config, checkpoint=best) == [3, 3]
    assert trainer.run(checkpoint_func, config, checkpoint=str(path)) == [3, 3]
    assert run_number(trainer) == first + 2
    none = CheckpointStrategy(num_to_keep=0)
    trainer.run(checkpoint_func, config, checkpoint_strategy=none)
    assert trainer.best_checkpoint_path is None
    assert trainer.latest_checkpoint_dir is None
    assert trainer.latest_checkpoint["epoch"] == 3
    assert trainer.latest_checkpoint[TIMESTAMP] >= best[TIMESTAMP]


# ---- callbacks


def test_callbacks(trainer):
    class Average(TrainingCallback):
        results_preprocessor = AverageResultsPreprocessor(["loss"])

        def __init__(self):
            self.means, self.log = [], []

        def start_training(self, logdir, config, **info):
            self.log.append((os.path.basename(logdir), config))

        def handle_result(self, results, **info):
            self.means.append(results[0]["avg(loss)"])

        def finish_training(self, error=False, **info):
            self.log.append(error)

    def train_func(config):
        for n in range(config["n"]):
            train.report(loss=n + train.world_rank(), epoch=n)
        if config.get("fails"):
            raise ValueError("no more")

    average = Average()
    trainer.run(train_func, config={"n": 2}, callbacks=[average])
    assert average.means == [0.5, 1.5]
    assert average.log == [(trainer.latest_run_dir.name, {"n": 2}), False]
    with pytest.raises(ValueError, match="no more"):
        trainer.run(train_func, config={"n": 1, "fails": True}, callbacks=[average])
    assert average.log[-1] is True


# ---- profiles


def profiled_func(config):
    twp = TorchWorkerProfiler(trace_dir=config["trace_dir"])
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=0, warmup=0, active=1),
        on_trace_ready=twp.trace_handler,
    ) as p:
        for epoch in range(2):
            linear_epoch(
                DataLoader(line(8), batch_size=8),
                model := nn.Linear(1, 1),
                nn.MSELoss(),
                torch.optim.SGD(model.parameters(), lr=0.1),
            )
            p.step()
            train.report(epoch=epoch, **twp.get_and_clear_profile_traces())


def test_profiles_of_the_workers(trainer, tmp_path):
    config = {"trace_dir": str(tmp_path / "traces")}
    trainer.run(profiled_func, config, callbacks=[TorchTensorboardProfilerCallback()])
    traces = sorted((trainer.latest_run_dir / "pytorch_profiler").iterdir())
    assert sorted(os.listdir(tmp_path / "traces")) == [trace.name for trace in traces]
    assert {trace.name.split("_")[1] for trace in traces} == {"0", "1"}
    assert all("traceEvents" in json.loads(trace.read_text()) for trace in traces)


# ---- a worker that dies


on_gpu = set()
"""On a worker: addresses of the tensors that count as tensors on a GPU."""


def on_a_gpu(tensor):
    """Give a tensor a location that exists only in this process, like that of a GPU."""
    if not on_gpu:
        torch.serialization.register_package(
            0,
            lambda storage: "gpu:0" if storage.data_ptr() in on_gpu else None,
            lambda storage, location: storage if location == "gpu:0" else None,
        )
    on_gpu.add(tensor.untyped_storage().data_ptr())
    return tensor


def fragile_func(config):
    state = train.load_checkpoint() or {"epoch": -1}
    model = train.torch.prepare_model(nn.Linear(1, 1))
    for epoch in range(state["epoch"] + 1, 4):
        if epoch == 2 and state["epoch"] == -1 and train.world_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        weight = on_a_gpu(torch.tensor([float(epoch)]))
        train.save_checkpoint(epoch=epoch, weight=weight, model=model)
        train.report(epoch=epoch, weight=weight, model=model)
    return state["epoch"], state["weight"], type(state["model"]), on_a_gpu(torch.ones(2))


@pytest.mark.slow("both workers restart, and import torch")
def test_a_function_continues_after_a_worker_dies(trainer):
    """The driver has neither the GPU of the tensors nor the process group of the model."""
    seen = []

    class Callback(TrainingCallback):
        def handle_result(self, results, **info):
            seen.append((results[0]["weight"].item(), type(results[0]["model"])))

    results = trainer.run(fragile_func, config={}, callbacks=[Callback()])
    assert [result[:3] for result in results] == [(1, 1.0, nn.Linear)] * 2
    assert results[0][3].tolist() == [1.0, 1.0]
    assert seen[-2:] == [(2.0, nn.Linear), (3.0, nn.Linear)]
    assert trainer.latest_checkpoint["weight"] == 3.0
    assert trainer.load_checkpoint_from_path(trainer.best_checkpoint_path)["weight"] == 3.0
    with trainer.best_checkpoint_path.open("rb") as file:
        assert isinstance(cloudpickle.load(file)["model"], nn.Linear)


# ---- objects on the workers, and the shutdown of busy workers


class Busy:
    def place(self, factor=1):
        return train.world_rank() * factor, train.local_rank(), train.world_size()

    def wait_for_ever(self, begun):
        begun.touch()
        threading.Event().wait()


def test_busy_workers_are_killed_after_patience_s(trainer, tmp_path):
    workers = trainer.to_worker_group(Busy)
    assert len(workers) == 2
    assert ray.get([worker.place.remote(factor=5) for worker in workers]) == [(0, 0, 2), (5, 1, 2)]
    calls = [workers[i].wait_for_ever.remote(tmp_path / f"begun{i}") for i in range(2)]
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    ray.kill(workers[0].actor)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(calls[0])
    workers.shutdown(patience_s=0.1)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(calls[1])
    trainer.start()  # for the other tests
