"""The result of `fit()`, and the file with its reports."""

import math
from unittest.mock import MagicMock

import numpy as np
import pytest

from raysgd.train import DataParallelTrainer
from raysgd.train.result import REPORTS, Result, append_report, read_reports


@pytest.fixture
def path(tmp_path):
    return tmp_path / REPORTS


def test_the_history_is_in_the_folder_of_the_run(tmp_path, path):
    result = Result({"n": 1}, None, path=str(tmp_path))
    assert result.history == []
    path.write_text('{"n": 0}\n{"n": 1}\n')
    assert result.history == [{"n": 0}, {"n": 1}]
    assert list(result.metrics_dataframe["n"]) == [0, 1]
    assert result.error is None
    assert result.log_dir == tmp_path


@pytest.mark.parametrize(("reports", "last"), [([], {"n": 1}), ([[{"n": {2}}]], {"n": {2}})])
def test_a_result_has_the_last_report_also_of_an_earlier_life(path, monkeypatch, reports, last):
    executor = MagicMock(**{"fetch_next_result.side_effect": [*reports, None]})
    monkeypatch.setattr(DataParallelTrainer, "create_executor", lambda trainer: executor)
    path.write_text('{"n": 1}\n')
    trainer = DataParallelTrainer(print, train_loop_config={"lr": 0.5})
    trainer._restored_folder = path.parent
    assert trainer.fit().metrics == last
    assert DataParallelTrainer.restore(path.parent).train_loop_config == {"lr": 0.5}


def test_a_restored_run_continues_after_the_last_complete_report(path):
    path.write_text('{"n": 0}\n{"n": 1}\n{"n": 2, "lo')  # the writer was killed
    append_report(path, {"n": 2})
    assert read_reports(path) == [{"n": 0}, {"n": 1}, {"n": 2}]


@pytest.mark.parametrize(("first", "again"), [(2, 3), (0, 4), (3, 4), (3, 3)])
def test_reports_that_a_restart_repeats_are_in_the_history_once(tmp_path, path, first, again):
    for life, numbers in enumerate((range(4), range(first, again))):
        for n in numbers:
            append_report(path, {"life": life, "_training_iteration": n + 1})
    result = Result(None, None, path=str(tmp_path))
    expected = [(0, n + 1) for n in range(first)] + [(1, n + 1) for n in range(first, again)]
    found = [(report["life"], report["_training_iteration"]) for report in result.history]
    assert found == (expected if again > first else [(0, n + 1) for n in range(4)])
    assert len(result.metrics_dataframe) == len(found)


def test_values_that_json_does_not_have_are_not_in_the_history(path):
    ring = []
    ring.append(ring)
    append_report(path, {"a": 1, "object": object(), "ring": ring})
    assert read_reports(path) == [{"a": 1}]


def test_numbers_that_are_not_finite_stay_numbers(tmp_path, path):
    append_report(path, {"loss": np.float32("nan"), "bound": {"high": [float("inf")]}})
    result = Result(None, None, path=str(tmp_path))
    (found,) = result.history
    assert math.isnan(found["loss"])
    assert found["bound"] == {"high": [math.inf]}
    assert result.metrics_dataframe["loss"].isna().all()
