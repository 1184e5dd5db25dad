"""Where the time of training goes, on workers that run."""

import json
import time

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator
from raysgd.elastic import speed_monitor

SLEEP_S, BATCH_SIZE = 0.5, 4  # the sleep must exceed other work on a busy machine


class SlowData(TensorDataset):
    """Data whose batches take `SLEEP_S` longer on the second worker."""

    is_slow = False

    def __getitem__(self, index):
        if self.is_slow:
            time.sleep(SLEEP_S / BATCH_SIZE)
        return super().__getitem__(index)


class OneSlowLoader(TrainingOperator):
    """A step that calls neither ``self.backward`` nor ``self.optimizer_step``."""

    def setup(self, config):
        torch.manual_seed(0)
        # Its gradients are too large for the mesh: DistributedDataParallel waits for gloo.
        model = torch.nn.Sequential(torch.nn.Linear(8, 512), torch.nn.Linear(512, 512))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.model, self.optimizer = self.register(models=model, optimizers=optimizer)
        data = SlowData(torch.randn(56, 8))
        data.is_slow = self.world_rank == 1
        self.register_data(train_loader=DataLoader(data, batch_size=BATCH_SIZE))

    def train_batch(self, batch, batch_info):
        loss = self.model(batch[0]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"num_samples": len(batch[0])}


@pytest.fixture
def quick(monkeypatch):
    """Look at shorter times."""
    monkeypatch.setattr(speed_monitor, "_WINDOW_S", 0.1)
    monkeypatch.setattr(speed_monitor, "_MIN_S", 0.5)
    monkeypatch.setattr(speed_monitor, "_MIN_STEPS", 4)


@pytest.mark.slow("two workers start, and one of them sleeps for three seconds")
def test_a_slow_loader_of_one_worker_is_named(module_cluster, quick, tmp_path, caplog):
    with TorchTrainer(
        training_operator_cls=OneSlowLoader, num_workers=2, logdir=tmp_path
    ) as trainer:
        trainer.train(num_steps=3)
        trainer.fit(1, verbose=False)
        report = trainer.speed()
    fast, slow = report.workers
    assert report.advice.startswith(f"Worker 1 on {slow.host} waits for data")
    assert "raise DataLoader(num_workers=0)" in report.advice
    assert report.advice in caplog.text, "fit logs it at its end"
    assert slow.phase_s["data"] > 0.8 * SLEEP_S
    assert slow.phase_s["data"] > fast.phase_s["data"]
    assert slow.phase_s["wait"] < fast.phase_s["wait"], "for gradients of the other worker"
    assert fast.phase_s["save"] > slow.phase_s["save"] == 0, "worker 0 takes the snapshots"
    for worker in report.workers:
        assert worker.num_steps == 7
        parts = worker.phase_s
        assert min(parts["forward"], parts["backward"], parts["optimizer"]) > 0
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["kind"] == "train"
    assert line["speed"]["data_s"][1] > 0.8 * SLEEP_S
