"""The phases of steps on a device that works behind its host."""

import time

import pytest
import torch

from raysgd._internal import step_timing
from raysgd._internal.step_timing import DATA, FORWARD, OTHER, PHASES, SAVE, StepTiming
from tests.operators import on_gpu


class Device:
    """A device with a queue of work. The host adds work, and events that the device reaches."""

    def __init__(self):
        self.now = 0.0
        self.done_at = 0.0

    def work(self, seconds):
        self.done_at = max(self.done_at, self.now) + seconds

    def event(self):
        return DeviceEvent(self)


class DeviceEvent:
    def __init__(self, device):
        self.device = device

    def record(self):
        self.at = max(self.device.done_at, self.device.now)

    def query(self):
        return self.device.now >= self.at

    def elapsed_time(self, later):
        return 1000 * (later.at - self.at)


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(step_timing, "perf_counter", lambda: device.now)
    return device


def run(device, *, data_s=0.0, waits=False, saves_s=0.0):
    """Run steps of 0.1 s, whose work the host starts within 2 ms. Return the shares of phases."""
    timing = StepTiming(device.event)
    with timing.running():
        for _ in range(100):
            timing.begin(DATA)
            device.now += data_s
            timing.begin(FORWARD)
            device.work(0.1)
            # The queue of the device is full when the host is 0.3 s ahead.
            device.now = max(device.now + 0.002, device.done_at - 0.3)
            timing.begin(OTHER)
            if waits:
                device.now = max(device.now, device.done_at)
            with timing.within(SAVE):
                device.now += saves_s
    seconds = dict(zip(PHASES, timing.totals.phase_s, strict=True))
    assert sum(seconds.values()) == pytest.approx(device.now, rel=0.1)
    return {name: value / sum(seconds.values()) for name, value in seconds.items() if value}


@pytest.mark.parametrize(
    ("given", "shares", "within"),
    [
        ({"data_s": 0.09}, {"forward": 1.0}, 0.01),  # work hides the loader
        ({"data_s": 0.4}, {"data": 0.75, "forward": 0.25}, 0.02),
        ({"saves_s": 0.4}, {"save": 0.995, "forward": 0.005}, 0.001),
    ],
)
def test_a_device_without_work_waits_for_the_host(device, given, shares, within):
    assert run(device, **given) == pytest.approx(shares, abs=within)


def test_code_that_waits_for_the_device_is_other_code(device):
    assert run(device, waits=True)["other"] > 0.9


def test_an_error_of_the_device_stays_the_error(device):
    def fail():
        raise RuntimeError("the device is broken")

    def train():
        with timing.running():
            timing.begin(DATA)
            timing._device._new_event = fail
            raise ValueError("first error")

    timing = StepTiming(device.event)
    device.now = 1.0
    with pytest.raises(ValueError, match="first error"):
        train()


@pytest.mark.parametrize("step_s", [0.001, 0.01])
def test_few_steps_have_events(device, step_s):
    made = []
    timing = StepTiming(lambda: made.append(None) or device.event())
    with timing.running():
        for _ in range(1000):
            timing.begin(DATA)
            timing.begin(FORWARD)
            device.now += step_s
    assert len(made) <= 3 * (device.now / step_timing._EVERY_S + 1)


@on_gpu
def test_a_gpu_measures_its_phases():
    timing = StepTiming(lambda: torch.cuda.Event(enable_timing=True))
    matrix = torch.ones(4096, 4096, device="cuda")
    with timing.running():
        for _ in range(50):
            timing.begin(DATA)
            timing.begin(FORWARD)
            matrix @ matrix
            timing.begin(OTHER)
            torch.cuda.synchronize()
            time.sleep(0.01)
        timing.begin(DATA)
    assert timing.totals.phase_s[FORWARD] > 0
    assert timing.totals.phase_s[OTHER] > 0.4
