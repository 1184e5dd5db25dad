"""Callbacks that write or print what the workers report."""

import json

import numpy as np
import pytest

from raysgd.train.callbacks import (
    JsonLoggerCallback,
    MLflowLoggerCallback,
    PrintCallback,
    TBXLoggerCallback,
    TorchTensorboardProfilerCallback,
)
from raysgd.train.callbacks.callback import FileCallback
from raysgd.train.constants import PYTORCH_PROFILER_KEY
from raysgd.train.result import REPORTS


@pytest.fixture
def log(tmp_path):
    """Return a function that writes reports to a JSON log, and returns its path."""

    def write(*reports, **arguments):
        callback = JsonLoggerCallback(tmp_path / "log", **arguments)
        callback.start_training(logdir=tmp_path, config={})
        for results in reports:
            callback.process_results(results)
        return callback.log_path

    return write


@pytest.mark.parametrize(
    ("given", "expected"), [(None, "run"), ("own/a", "own/a"), ("~/logs", "logs")]
)
def test_files_are_in_the_given_folder_or_in_that_of_the_run(
    tmp_path, monkeypatch, given, expected
):
    monkeypatch.setenv("HOME", str(tmp_path))
    callback = FileCallback(tmp_path / given if given == "own/a" else given, None)
    callback.start_training(logdir=tmp_path / "run", config={})
    assert callback.logdir == tmp_path / expected
    assert callback.logdir.is_dir()


def test_the_json_log_is_valid_after_each_report(tmp_path, log):
    for num in range(3):
        path = log(*([{"n": n}, {"n": n, "é": "nan"}] for n in range(num)), workers_to_log=None)
        logged = json.loads(path.read_text(encoding="utf-8"))
        assert logged == [[{"n": n}, {"n": n, "é": "nan"}] for n in range(num)]


def test_a_subclass_may_start_the_log_with_only_its_folder(tmp_path):
    class Mine(JsonLoggerCallback):
        def start_training(self, logdir, **info):
            super().start_training(logdir)

    callback = Mine()
    callback.start_training(tmp_path, config={"lr": 1})
    assert json.loads(callback.log_path.read_text()) == []


def test_the_json_log_has_other_values_as_text_and_no_reserved_ones(log):
    results = {"set": {1}, ("a", 1): 2, "nan": float("nan"), PYTORCH_PROFILER_KEY: []}
    path = log([results, {"of": "another worker"}], filename="log.json")
    assert path.name == "log.json"
    assert json.loads(path.read_text()) == [[{"set": "{1}", "('a', 1)": 2, "nan": "nan"}]]


@pytest.mark.parametrize(
    ("restored", "cut", "expected"),
    [(False, 0, [2]), (True, 0, [0, 1, 2]), (True, 2, [0, 2]), (True, 10, [0, 2])],
)
def test_only_a_restored_run_keeps_the_complete_rows(tmp_path, log, restored, cut, expected):
    path = log([{"n": 0}], [{"n": 1}])
    path.write_bytes(path.read_bytes()[: -cut or None])
    (tmp_path / REPORTS).write_text('{"n": 0}\n' * restored)
    log([{"n": 2}])
    assert json.loads(path.read_text()) == [[{"n": n}] for n in expected]


def test_reports_are_printed_as_indented_json(capsys):
    callback = PrintCallback()
    callback.process_results([{"loss": 0.25, PYTORCH_PROFILER_KEY: []}, {}, {"odd": {1}}])
    printed = capsys.readouterr().out
    assert json.loads(printed) == [{"loss": 0.25}, {}, {"odd": "{1}"}]
    assert '\n        "loss": 0.25\n' in printed


def test_traces_are_written_only_into_their_folder(tmp_path):
    callback = TorchTensorboardProfilerCallback()
    callback.start_training(logdir=tmp_path, config={})
    callback.process_results([{PYTORCH_PROFILER_KEY: [("../worker_0.json", "{}")]}, {}])
    assert [p.name for p in (tmp_path / "pytorch_profiler").iterdir()] == ["worker_0.json"]
    assert not (tmp_path / "worker_0.json").exists()


def test_tensorboard_gets_numbers_as_scalars_and_shows_repeated_steps_once(tmp_path, board):
    callback = TBXLoggerCallback()
    callback.start_training(logdir=tmp_path, config={})
    own = {"_timestamp": 1.0, "_training_iteration": 7, "_time_this_iter_s": 0.5}
    lists = {"list": [1, 2], "array": np.ones((2, 3))}
    nested = {"val": {"loss": 0.25, "each": (0.5, np.inf)}}
    for step in (6, 7, 8, 7):  # after 8, the workers restart from a checkpoint
        own["_training_iteration"] = step
        result = {"loss": 0.5, "one": np.ones(1), **own, **lists, **nested}
        callback.process_results([result, {"b": 1}])
    callback.finish_training()
    found = board(tmp_path)
    scalars = {"loss", "one", "val/loss", "_time_this_iter_s"}
    assert set(found.Tags()["scalars"]) == {f"ray/train/{name}" for name in scalars}
    assert [each.step for each in found.Scalars("ray/train/loss")] == [6, 7]


def test_a_relative_folder_of_mlflow_is_that_of_the_first_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    callback = MLflowLoggerCallback("runs")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")  # as a script that restores the run
    callback.start_training(logdir=tmp_path / "run", config={})
    callback.finish_training()
    assert (tmp_path / "runs").is_dir()


@pytest.mark.parametrize("uri", [None, "elsewhere"])
@pytest.mark.parametrize("restored", [True, False])
def test_a_restored_run_continues_its_mlflow_run(tmp_path, monkeypatch, uri, restored):
    from mlflow import MlflowClient  # takes two seconds

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder, chosen = tmp_path / (uri or "run/mlruns"), None if restored else tmp_path / "run"
    ids = []
    for loss in (2.0, 1.0):
        callbacks = [
            MLflowLoggerCallback(uri and folder, experiment_name=name, logdir=chosen)
            for name in ("a", "b/c")
        ]
        for callback in callbacks:  # the driver is killed before it finishes the first ones
            callback.start_training(logdir=tmp_path / "run", config={"lr": loss})
            result = {"loss": loss, "_training_iteration": int(3 - loss)}
            for _ in range(2):  # a restart repeats the report
                callback.process_results([result])
        ids.append([callback.run_id for callback in callbacks])
    callbacks[0].finish_training()
    first, second = ids
    assert len(set(first)) == 2
    assert (first == second) == restored
    client = MlflowClient(str(folder))
    run = client.get_run(second[0])
    assert run.info.status == "FINISHED"
    losses = [each.value for each in client.get_metric_history(second[0], "loss")]
    assert losses == ([2, 1] if restored else [1])
