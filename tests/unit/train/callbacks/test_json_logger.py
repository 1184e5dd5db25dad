"""The log of a run as one JSON file."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.train.callbacks import JsonLoggerCallback
from raysgd.train.constants import PYTORCH_PROFILER_KEY
from raysgd.train.result import REPORTS


def test_the_json_log_is_whole_after_each_report(tmp_path):
    callback = JsonLoggerCallback(workers_to_log=None)
    callback.start_training(logdir=tmp_path, config={})
    assert json.loads(callback.log_path.read_text()) == []
    for n in range(3):
        callback.handle_result([{"n": n}, {"n": n, "odd": object, "nan": float("nan")}])
        logged = json.loads(callback.log_path.read_text())
        assert [results[0] for results in logged] == [{"n": k} for k in range(n + 1)]
    assert logged[0][1]["nan"] == "nan"


def test_a_subclass_may_start_the_log_by_its_folder_alone(tmp_path):
    class Mine(JsonLoggerCallback):
        def start_training(self, logdir, **info):
            super().start_training(logdir)

    callback = Mine()
    callback.start_training(tmp_path, config={"lr": 1})
    assert json.loads(callback.log_path.read_text()) == []


def test_a_log_has_no_folder_before_a_run():
    with pytest.raises(RuntimeError, match="JsonLoggerCallback has no folder"):
        _ = JsonLoggerCallback().log_path


@given(st.lists(st.lists(st.dictionaries(st.text(), st.text(), max_size=3), max_size=2)))
def test_what_was_reported_is_read_back(tmp_path, reports):
    callback = JsonLoggerCallback(workers_to_log=None)
    callback.start_training(logdir=tmp_path, config={})
    for results in reports:
        callback.handle_result(results)
    assert json.loads(callback.log_path.read_text(encoding="utf-8")) == reports


def test_what_json_has_not_is_written_as_text(tmp_path):
    callback = JsonLoggerCallback(filename="log.json")
    callback.start_training(logdir=tmp_path, config={})
    callback.process_results([{"set": {1}, ("a", 1): 2}, {"of": "another worker"}])
    assert callback.log_path == tmp_path / "log.json"
    assert json.loads(callback.log_path.read_text()) == [[{"set": "{1}", "('a', 1)": 2}]]


def test_a_run_begins_a_log_of_its_own(tmp_path):
    callback = JsonLoggerCallback()
    for n in range(2):
        callback.start_training(logdir=tmp_path, config={})
        callback.process_results([{"n": n}])
    assert json.loads((tmp_path / "results.json").read_text()) == [[{"n": 1}]]


@pytest.mark.parametrize("cut", [0, 1, 5])
def test_a_restored_run_keeps_the_rows_before(tmp_path, cut):
    for n in range(2):
        (tmp_path / REPORTS).write_text('{"n": 0}\n' * n)
        callback = JsonLoggerCallback(tmp_path / "log")
        callback.start_training(logdir=tmp_path, config={})
        callback.process_results([{"n": 2 * n}])
        callback.process_results([{"n": 2 * n + 1}])
        if n == 0:  # the driver may have been killed while it wrote
            whole = callback.log_path.read_bytes()
            callback.log_path.write_bytes(whole[: len(whole) - cut])
    expected = [0, 1, 2, 3] if cut == 0 else [0, 2, 3]
    assert json.loads(callback.log_path.read_text()) == [[{"n": n}] for n in expected]


def test_traces_of_the_profiler_are_not_written(tmp_path):
    callback = JsonLoggerCallback()
    callback.start_training(logdir=str(tmp_path), config={})
    callback.process_results([{"loss": 1.0, PYTORCH_PROFILER_KEY: [("trace.json", "{}")]}])
    assert json.loads(callback.log_path.read_text()) == [[{"loss": 1.0}]]
