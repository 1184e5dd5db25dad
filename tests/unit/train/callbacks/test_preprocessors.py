"""What is done to results before a callback gets them."""

import pytest

from raysgd.train.callbacks.preprocessors import (
    AverageResultsPreprocessor,
    ExcludedKeysResultsPreprocessor,
    IndexedResultsPreprocessor,
    MaxResultsPreprocessor,
    SequentialResultsPreprocessor,
    WeightedAverageResultsPreprocessor,
)

RESULTS = [{"a": 1.0, "n": 1, "name": "x"}, {"a": 4.0, "n": 3, "name": "y"}]


def test_results_of_some_workers():
    assert IndexedResultsPreprocessor(1).preprocess(RESULTS) == [RESULTS[1]]
    assert IndexedResultsPreprocessor([1, 0, 5]).preprocess(RESULTS) == RESULTS[::-1]
    assert IndexedResultsPreprocessor(None).preprocess(RESULTS) == RESULTS


def test_some_metrics_left_out():
    assert ExcludedKeysResultsPreprocessor(["a", "n"]).preprocess(RESULTS) == [
        {"name": "x"},
        {"name": "y"},
    ]


@pytest.mark.parametrize(
    ("preprocessor", "name", "value"),
    [
        (AverageResultsPreprocessor(["a"]), "avg(a)", 2.5),
        (MaxResultsPreprocessor(["a"]), "max(a)", 4.0),
        (WeightedAverageResultsPreprocessor(["a"], "n"), "weight_avg_n(a)", 3.25),
        (WeightedAverageResultsPreprocessor(["a"], "none"), "weight_avg_none(a)", 2.5),
    ],
)
def test_a_number_over_all_workers_is_added_for_each(preprocessor, name, value):
    assert preprocessor.preprocess(RESULTS) == [{**r, name: value} for r in RESULTS]


def test_without_names_all_numbers_are_taken():
    assert AverageResultsPreprocessor().preprocess(RESULTS)[0] == {
        **RESULTS[0],
        "avg(a)": 2.5,
        "avg(n)": 2,
    }


def test_what_not_every_worker_reports_is_left_out(caplog):
    results = [{"a": 1}, {"b": 1}]
    assert MaxResultsPreprocessor(["a"]).preprocess(results) == results
    assert "max(a)" in caplog.text


def test_one_after_the_other():
    both = SequentialResultsPreprocessor(
        [AverageResultsPreprocessor(["a"]), IndexedResultsPreprocessor(0)]
    )
    assert both.preprocess(RESULTS) == [{**RESULTS[0], "avg(a)": 2.5}]
