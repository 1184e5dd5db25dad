"""The measured speed of a worker, which determines its share of a batch."""

from types import SimpleNamespace

import pytest
import torch

from raysgd.data.partition import MicroBatchPlan
from raysgd.loop.update import Update
from raysgd.torch.features.throughput import ThroughputMeter
from tests.unit.cluster.clock import ManualClock


@pytest.fixture
def clock(monkeypatch):
    clock = ManualClock()
    time = SimpleNamespace(perf_counter=clock.monotonic)
    monkeypatch.setattr("raysgd.torch.features.throughput.time", time)
    return clock


def make():
    model = torch.nn.Linear(2, 1)
    settings = SimpleNamespace(device=torch.device("cpu"))
    return model, ThroughputMeter(SimpleNamespace(settings=settings, models=[model]))


def step(clock, model, speed, seconds, end=ThroughputMeter.commit):
    update = Update()
    update.begin_micro_batch(MicroBatchPlan(num_samples=8))
    speed.begin_micro_batch(update)
    clock.sleep(seconds)
    model(torch.ones(1, 2)).sum().backward()
    clock.sleep(5.0)  # the time to wait for other workers
    end(speed, update)


def test_speed_is_the_median_of_samples_by_the_time_to_the_last_gradient(clock):
    model, speed = make()
    step(clock, model, speed, seconds=3.0)
    assert speed.samples_per_s() == 0.0, "the first step does not count"
    for seconds in (0.5, 2.0, 0.5):
        step(clock, model, speed, seconds)
    assert speed.samples_per_s() == pytest.approx(16.0)


def test_a_warm_up_counts_though_it_is_rolled_back(clock):
    model, speed = make()
    for seconds in (3.0, 0.5):
        step(clock, model, speed, seconds, end=ThroughputMeter.roll_back)
    assert speed.samples_per_s() == pytest.approx(16.0)
