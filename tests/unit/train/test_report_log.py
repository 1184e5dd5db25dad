"""The log of reports, which a restored run goes on with."""

import json
import math
import os

import numpy as np
import pytest

from raysgd.train.result import ReportLog, Result, read_reports


@pytest.fixture
def path(tmp_path):
    return tmp_path / "result.json"


def test_each_report_can_be_read_at_once(path):
    with ReportLog(path) as log:
        assert log.last is None
        for n in range(3):
            log.write({"n": n})
            assert read_reports(path) == [{"n": k} for k in range(n + 1)]
        assert log.last == {"n": 2}


def test_a_restored_run_goes_on_after_the_last_whole_report(path):
    with ReportLog(path) as log:
        log.write({"n": 0})
        log.write({"n": 1})
    with path.open("a") as file:
        file.write('{"n": 2, "lo')  # its writer was killed
    with ReportLog(path) as log:
        assert log.last == {"n": 1}
        log.write({"n": 2})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"n": 0},
        {"n": 1},
        {"n": 2},
    ]


def test_what_json_has_not_is_left_out_of_the_file_and_kept_in_memory(path):
    ring = []
    ring.append(ring)
    odd = {"a": 1, "nan": float("nan"), "object": object(), "ring": ring, 5: "number as name"}
    with ReportLog(path) as log:
        log.write(odd)
        assert log.last == odd
    (found,) = read_reports(path)
    assert (found["a"], found.keys()) == (1, {"a", "nan"})


def test_numbers_that_are_not_finite_stay_numbers(tmp_path, path):
    with ReportLog(path) as log:
        log.write({"loss": np.float32("nan"), "bound": {"high": [float("inf")]}})
    with ReportLog(path):  # a restored run writes the reports again
        result = Result(None, None, path=str(tmp_path))
    (found,) = result.history
    assert math.isnan(found["loss"])
    assert found["bound"] == {"high": [math.inf]}
    assert result.metrics_dataframe["loss"].isna().all()


def test_what_was_reported_is_kept_as_it_was(path):
    report = {"a": 1}
    with ReportLog(path) as log:
        log.write(report)
        report["a"] = 2
        assert log.last == {"a": 1}


def test_a_restored_run_that_is_killed_as_it_begins_loses_no_report(path, monkeypatch):
    with ReportLog(path) as log:
        log.write({"n": 0})
    before = path.read_text()

    def killed(*arguments):
        assert path.read_text() == before
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt), ReportLog(path):
        pytest.fail("it has not begun")
    assert path.read_text() == before
