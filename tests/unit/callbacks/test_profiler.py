"""A trace of some steps."""

import gzip
import json

import pytest

from raysgd.callbacks import Callback, TorchProfiler
from raysgd.callbacks import profiler as module
from tests.unit.recorder import Recorder


def num_updates(path):
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return sum(event.get("name", "").startswith("Optimizer.step#") for event in events)


@pytest.mark.parametrize(("skip_steps", "num_steps"), [(0, 1), (2, 3), (4, 3)])
def test_so_many_steps_are_profiled(make_trainer, tmp_path, skip_steps, num_steps):
    profiler = TorchProfiler(num_steps, skip_steps)
    trainer = make_trainer(Recorder, callbacks=[profiler], logdir=tmp_path)
    trainer.fit(3)
    last = skip_steps + num_steps
    assert profiler.trace == tmp_path / "profile" / f"trace-step-{last:08d}.json.gz"
    assert list((tmp_path / "profile").iterdir()) == [profiler.trace]
    assert num_updates(profiler.trace) == num_steps
    assert trainer.get_local_operator().trained == [*range(40)] * 3


def test_a_run_that_ends_first_has_the_trace_so_far(make_trainer, tmp_path):
    profiler = TorchProfiler(100, 2)
    make_trainer(Recorder, callbacks=[profiler], logdir=tmp_path).fit(1)
    assert profiler.trace.name == "trace-step-00000005.json.gz"
    assert num_updates(profiler.trace) == 3
    assert not module._running


def test_a_worker_that_is_lost_takes_its_trace_along(make_trainer, tmp_path, caplog):
    profiler = TorchProfiler(2, 0)
    trainer = make_trainer(Recorder, logdir=tmp_path)

    class Losing(Callback):
        def next_pause(self, global_step):
            return 1 if global_step == 0 else None

        def on_pause(self, trainer):
            module._running.pop().stop()

    trainer.fit(2, callbacks=[Losing(), profiler])
    assert profiler.trace is None
    assert "worker 0 was lost" in caplog.text


@pytest.mark.parametrize("arguments", [{"num_steps": 0}, {"skip_steps": -1}])
def test_wrong_arguments_raise(arguments):
    with pytest.raises(ValueError, match="TorchProfiler"):
        TorchProfiler(**arguments)
