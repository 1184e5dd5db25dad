"""Callbacks of training functions, without a run."""

import json
from pathlib import Path

import pytest

from raysgd.train.callbacks import (
    JsonLoggerCallback,
    TorchTensorboardProfilerCallback,
    TrainingCallback,
)
from raysgd.train.callbacks.observed import Observed
from raysgd.train.callbacks.profiler import PROFILE_TRACES


def test_the_json_log_is_whole_after_each_report(tmp_path):
    callback = JsonLoggerCallback(workers_to_log=None)
    callback.start_training(logdir=tmp_path, config={})
    assert json.loads(callback.log_path.read_text()) == []
    for n in range(3):
        callback.handle_result([{"n": n}, {"n": n, "odd": object, "nan": float("nan")}])
        logged = json.loads(callback.log_path.read_text())
        assert [results[0] for results in logged] == [{"n": k} for k in range(n + 1)]
    assert logged[0][1]["nan"] == "nan"


def test_a_log_has_no_folder_before_a_run():
    with pytest.raises(RuntimeError, match="JsonLoggerCallback has no folder"):
        _ = JsonLoggerCallback().log_path


def test_traces_are_written_into_their_folder_alone(tmp_path):
    callback = TorchTensorboardProfilerCallback()
    callback.start_training(logdir=tmp_path, config={})
    callback.process_results([{PROFILE_TRACES: [("../worker_0.json", "{}")]}, {}])
    assert [p.name for p in (tmp_path / "pytorch_profiler").iterdir()] == ["worker_0.json"]
    assert not (tmp_path / "worker_0.json").exists()


class Told(TrainingCallback):
    def __init__(self, fails=False):
        self.error, self.fails = None, fails

    def finish_training(self, error=False, **info):
        self.error = error
        if self.fails:
            raise KeyError("disk full")


def test_all_are_told_the_truth_about_the_end():
    good, bad, last = Told(), Told(fails=True), Told()
    observed = Observed([good, bad, last])
    with pytest.raises(KeyError, match="disk full"), observed.run(Path(), {}):
        pass
    assert [c.error for c in (good, bad, last)] == [False, False, False]
    with pytest.raises(ValueError, match="first"), observed.run(Path(), {}):
        raise ValueError("what went wrong first")
    assert [c.error for c in (good, bad, last)] == [True, True, True]


def test_each_gets_results_of_its_own():
    class Changes(TrainingCallback):
        def handle_result(self, results, **info):
            results[0]["a"] += 1
            assert results == [{"a": 2}]

    Observed([Changes(), Changes()]).handle([{"a": 1}])
