"""The learning rates as metrics."""

import json

import pytest
import torch

from raysgd.callbacks import JsonlLogger, LearningRateLogger
from raysgd.errors import WorkerLostError
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


def test_the_rate_at_the_end_of_the_epoch_is_a_metric(make_trainer, tmp_path):
    def scheduler(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    # the loggers come first in the list, and see it all the same
    trainer = make_trainer(
        Recorder,
        {"scheduler": scheduler},
        scheduler_step_freq="epoch",
        callbacks=[JsonlLogger(), LearningRateLogger()],
        logdir=tmp_path,
    )
    assert [trainer.train()["lr"] for _ in range(2)] == [0.005, 0.0025]
    assert trainer.train(num_steps=1)["lr"] == 0.0025
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["metrics"]["lr"] for line in logged[1:]] == [0.005, 0.0025, 0.0025]


def test_every_optimizer_and_every_group_has_a_rate(make_trainer):
    result = make_trainer(TwoOptimizers, callbacks=[LearningRateLogger()]).train()
    rates = {name: value for name, value in result.items() if name.startswith("lr")}
    assert rates == {"lr-0": 0.5, "lr-1/group0": 0.25, "lr-1/group1": 2.0}


def test_worker_lost_in_the_hook_does_not_end_the_run(make_trainer, monkeypatch, caplog):
    trainer = make_trainer(callbacks=[LearningRateLogger()])

    def lose(function):
        raise WorkerLostError("gone", rank=0)

    monkeypatch.setattr(trainer, "apply_all_operators", lose)
    assert "lr" not in trainer.train()
    assert "LearningRateLogger has no metrics for epoch 1" in caplog.text


def test_optimizers_of_keras_have_a_rate_too():
    pytest.importorskip("tensorflow")
    import keras

    from raysgd import TFTrainer
    from tests.tf_operators import Digits

    class Decaying(Digits):
        def setup(self, config):
            rate = keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.5, 0.25])
            super().setup({**config, "lr": rate})

    for operator_cls, expected in ((Digits, 0.125), (Decaying, 0.25)):
        with TFTrainer(
            training_operator_cls=operator_cls,
            config={"lr": 0.125, "num_samples": 128, "optimizer": "SGD"},
            use_local=True,
            callbacks=[LearningRateLogger()],
        ) as trainer:
            assert trainer.train()["lr"] == expected
