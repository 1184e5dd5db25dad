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


@pytest.mark.parametrize(
    ("preprocessor", "name", "value"),
    [
        (AverageResultsPreprocessor(["a", "c"]), "avg(a)", 3),
        (MaxResultsPreprocessor(["a", "c"]), "max(a)", 4),
        (WeightedAverageResultsPreprocessor(["a", "c"], "n"), "weight_avg_n(a)", 3.5),
    ],
)
def test_workers_count_that_have_reported_a_number(preprocessor, name, value, caplog):
    results = [{"a": 2, "n": 1}, {"b": 1, "n": 5}, {"a": 4, "n": 3}]
    assert preprocessor.preprocess(results) == [{**result, name: value} for result in results]
    assert f"{name} counts ranks [0, 2] alone" in caplog.text
    assert f"{name.replace('(a)', '(c)')} counts ranks [] alone" in caplog.text


@pytest.mark.parametrize("wrong", [None, "five", float("nan")])
def test_workers_whose_weight_is_no_number_do_not_count(wrong, caplog):
    results = [{"a": 2, "n": 1}, {"a": 100, "n": wrong}, {"a": 4, "n": 3}]
    (first, *_) = WeightedAverageResultsPreprocessor(["a"], "n").preprocess(results)
    assert first["weight_avg_n(a)"] == 3.5
    assert "Ranks [1] do not count: no weight 'n'" in caplog.text


def test_one_after_the_other():
    both = SequentialResultsPreprocessor(
        [AverageResultsPreprocessor(["a"]), IndexedResultsPreprocessor(0)]
    )
    assert both.preprocess(RESULTS) == [{**RESULTS[0], "avg(a)": 2.5}]
