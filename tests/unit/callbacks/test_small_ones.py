"""TerminateOnNaN, DeviceStats, and ModelSummary."""

import math
import re

import pytest
import torch

from raysgd.callbacks import CheckpointCallback, DeviceStats, ModelSummary, TerminateOnNaN
from tests.operators import Classifier
from tests.unit.recorder import Recorder


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("method", ["train_batch", "validate_batch"])
def test_a_loss_that_is_no_number_ends_the_run(make_trainer, tmp_path, value, method):
    saving = CheckpointCallback(tmp_path, monitor="val_loss")
    trainer = make_trainer(Recorder, callbacks=[TerminateOnNaN(), saving])
    operator = trainer.get_local_operator()
    original = getattr(operator, method)

    def spoiled(batch, batch_info):
        metrics = original(batch, batch_info)
        if batch_info["epoch_idx"] == (1 if method == "train_batch" else 2):
            metrics |= {"train_loss": value, "val_loss": value, "val_other": 1.0}
        return metrics

    setattr(operator, method, spoiled)
    history = trainer.fit(5)
    assert len(history) == 2
    assert f"_loss is {value} in epoch 2." in history.stop_reason
    if method == "validate_batch" and math.isnan(value):
        assert "epoch-00001" in saving.best


def test_what_workers_use_is_among_the_metrics(make_trainer):
    metrics = make_trainer(Recorder, callbacks=[DeviceStats()]).fit(2)[-1]
    assert 10 < metrics["memory_mib"] < 1e6
    assert metrics["cpu_percent"] >= 0
    assert ("gpu_memory_mib" in metrics) == torch.cuda.is_initialized()


def test_a_table_of_the_model_is_printed_at_the_start(make_trainer, capsys):
    trainer = make_trainer(Classifier, callbacks=[ModelSummary()])
    model = trainer.get_local_operator().model
    model[0].bias.requires_grad_(False)
    model.module = torch.nn.Linear(2, 2)  # a part of the user's, and no wrapper of ours
    trainer.train(num_steps=1)
    table = capsys.readouterr().out.splitlines()
    assert [re.split("  +", line) for line in table] == [
        ["part", "type", "parameters", "trained", "size"],
        ["0", "Linear(in_features=8, out_features=16, bias=True)", "144", "128", "0.6 KiB"],
        ["1", "ReLU", "0", "0", "0.0 KiB"],
        ["2", "Linear(in_features=16, out_features=2, bias=True)", "34", "34", "0.1 KiB"],
        ["module", "Linear(in_features=2, out_features=2, bias=True)", "6", "6", "0.0 KiB"],
        ["all", "184", "168", "0.7 KiB"],
    ]
