"""Callbacks that measure: learning rates, resources, models, traces, and non-finite losses."""

import gzip
import json
import math
import re

import pytest
import torch

from raysgd.callbacks import (
    Callback,
    CheckpointCallback,
    DeviceStatsMonitor,
    JsonlLogger,
    LearningRateMonitor,
    ModelSummary,
    TerminateOnNaN,
    TorchProfiler,
)
from raysgd.callbacks import measurements as module
from raysgd.errors import WorkerLostError
from tests.operators import Classifier
from tests.unit.recorder import Recorder


class TwoOptimizers(Recorder):
    def setup(self, config):
        model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Linear(4, 1))
        halves = [
            torch.optim.SGD(model[0].parameters(), lr=0.5),
            torch.optim.SGD(
                [{"params": [model[1].weight], "lr": 0.25}, {"params": [model[1].bias], "lr": 2}]
            ),
        ]
        self.register(models=model, optimizers=halves)
        self.register_data(**self.make_loaders(config))

    def train_batch(self, batch, batch_info):
        return {}


def test_the_learning_rate_at_the_end_of_the_epoch_is_a_metric(make_trainer, tmp_path):
    def scheduler(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    # the logger comes first in the list, but its log contains the rate
    trainer = make_trainer(
        Recorder,
        {"scheduler": scheduler},
        scheduler_step_freq="epoch",
        callbacks=[JsonlLogger(), LearningRateMonitor()],
        logdir=tmp_path,
    )
    assert [trainer.train()["lr"] for _ in range(2)] == [0.005, 0.0025]
    assert trainer.train(num_steps=1)["lr"] == 0.0025
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["metrics"]["lr"] for line in logged[1:]] == [0.005, 0.0025, 0.0025]


def test_every_optimizer_and_every_group_has_a_rate(make_trainer):
    result = make_trainer(TwoOptimizers, callbacks=[LearningRateMonitor()]).train()
    rates = {name: value for name, value in result.items() if name.startswith("lr")}
    assert rates == {"lr-0": 0.5, "lr-1/group0": 0.25, "lr-1/group1": 2.0}


def test_worker_lost_in_the_hook_does_not_end_the_run(make_trainer, monkeypatch, caplog):
    trainer = make_trainer(callbacks=[LearningRateMonitor()])

    def lose(function):
        raise WorkerLostError("gone", rank=0)

    monkeypatch.setattr(trainer, "apply_all_operators", lose)
    assert "lr" not in trainer.train()
    assert "LearningRateMonitor has no metrics for epoch 1" in caplog.text


def test_optimizers_of_keras_have_a_rate_too():
    pytest.importorskip("tensorflow")
    import keras

    from raysgd import TFTrainer
    from tests.tf_operators import Digits

    class Decaying(Digits):
        def setup(self, config):
            rate = keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.5, 0.25])
            super().setup({**config, "lr": rate})

    with TFTrainer(
        training_operator_cls=Decaying,
        config={"num_samples": 128, "optimizer": "SGD"},
        use_local=True,
        callbacks=[LearningRateMonitor()],
    ) as trainer:
        assert trainer.train()["lr"] == 0.25


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["train_loss", "val_loss", "trainLoss"])
def test_a_loss_that_is_no_number_ends_the_run(make_trainer, tmp_path, value, name):
    method = "validate_batch" if name == "val_loss" else "train_batch"
    saving = CheckpointCallback(tmp_path, monitor="val_loss")
    trainer = make_trainer(Recorder, callbacks=[TerminateOnNaN(), saving])
    operator = trainer.get_local_operator()
    original = getattr(operator, method)

    def spoiled(batch, batch_info):
        metrics = original(batch, batch_info)
        if batch_info["epoch_idx"] == (1 if method == "train_batch" else 2):
            metrics |= {name: value, "val_other": 1.0}
        return metrics

    setattr(operator, method, spoiled)
    history = trainer.fit(5)
    assert len(history) == 2
    step = 6 if method == "train_batch" else 10  # a loss of training ends its step
    assert f"{name} is {value} in epoch 2, step {step}." in history.stop_reason
    if method == "validate_batch" and math.isnan(value):
        assert "epoch-00001" in saving.best


def test_a_keras_model_that_diverges_ends_in_that_step(tmp_path):
    pytest.importorskip("tensorflow")
    from raysgd.tf import TFTrainer
    from tests.tf_operators import Digits

    with TFTrainer(
        training_operator_cls=Digits,
        config={"lr": math.nan, "num_samples": 128, "optimizer": "SGD"},
        use_local=True,
        callbacks=[TerminateOnNaN(), CheckpointCallback(tmp_path, every=1)],
    ) as trainer:
        history = trainer.fit(1)
    assert history.stop_reason == "train_loss is nan in epoch 1, step 2."
    assert not [*tmp_path.iterdir()]


def test_resource_usage_of_workers_is_among_the_metrics(make_trainer):
    metrics = make_trainer(Recorder, callbacks=[DeviceStatsMonitor()]).fit(2)[-1]
    assert 10 < metrics["memory_mib"] < 1e6
    assert metrics["cpu_percent"] >= 0
    assert ("gpu_memory_mib" in metrics) == torch.cuda.is_initialized()


def test_a_table_of_the_model_is_printed_at_the_start(make_trainer, capsys):
    trainer = make_trainer(Classifier, callbacks=[ModelSummary()])
    model = trainer.get_local_operator().model
    model[0].bias.requires_grad_(False)
    model.module = torch.nn.Linear(2, 2).requires_grad_(False)  # no wrapper, but the user's
    trainer.train(num_steps=1)
    table = capsys.readouterr().out.splitlines()
    assert [re.split("  +", line) for line in table] == [
        ["part", "type", "parameters", "trained", "size"],
        ["0", "Linear(in_features=8, out_features=16, bias=True)", "144", "128", "0.6 KiB"],
        ["1", "ReLU", "0", "0", "0.0 KiB"],
        ["2", "Linear(in_features=16, out_features=2, bias=True)", "34", "34", "0.1 KiB"],
        ["module", "Linear(in_features=2, out_features=2, bias=True)", "6", "0", "0.0 KiB"],
        ["all", "184", "162", "0.7 KiB"],
    ]


# ---- traces


def num_updates(path):
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return sum(event.get("name", "").startswith("Optimizer.step#") for event in events)


@pytest.mark.parametrize(("skip_first", "num_steps"), [(0, 1), (2, 3), (4, 3)])
def test_the_profiler_traces_the_chosen_steps(make_trainer, tmp_path, skip_first, num_steps):
    profiler = TorchProfiler(num_steps, skip_first)
    trainer = make_trainer(Recorder, callbacks=[profiler], logdir=tmp_path)
    trainer.fit(3)
    last = skip_first + num_steps
    assert profiler.trace_path == tmp_path / "profile" / f"trace-step-{last:08d}.json.gz"
    assert list((tmp_path / "profile").iterdir()) == [profiler.trace_path]
    assert num_updates(profiler.trace_path) == num_steps
    assert trainer.get_local_operator().trained == [*range(40)] * 3


def test_a_run_that_ends_early_keeps_its_partial_trace(make_trainer, tmp_path):
    profiler = TorchProfiler(100, 2)
    make_trainer(Recorder, callbacks=[profiler], logdir=tmp_path).fit(1)
    assert profiler.trace_path.name == "trace-step-00000005.json.gz"
    assert num_updates(profiler.trace_path) == 3
    assert not module._profilers


def test_losing_the_profiled_worker_loses_only_the_trace(make_trainer, tmp_path, caplog):
    profiler = TorchProfiler(2, 0)
    trainer = make_trainer(Recorder, logdir=tmp_path)

    class Losing(Callback):
        def next_pause(self, global_step):
            return 1 if global_step == 0 else None

        def on_pause(self, trainer):
            module._profilers.pop().stop()

    trainer.fit(2, callbacks=[Losing(), profiler])
    assert profiler.trace_path is None
    assert "worker 0 was lost" in caplog.text
