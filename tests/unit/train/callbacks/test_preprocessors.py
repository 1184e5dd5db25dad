"""Preprocessors change results before a callback gets them."""

import pytest

from raysgd.train.callbacks.results_preprocessors import (
    AverageResultsPreprocessor,
    ExcludedKeysResultsPreprocessor,
    IndexedResultsPreprocessor,
    MaxResultsPreprocessor,
    SequentialResultsPreprocessor,
    WeightedAverageResultsPreprocessor,
)

RESULTS = [{"a": 1.0, "n": 1, "name": "x"}, {"a": 4.0, "n": 3, "name": "y"}]


@pytest.mark.parametrize(
    ("preprocessor", "expected"),
    [
        (IndexedResultsPreprocessor(1), [RESULTS[1]]),
        (IndexedResultsPreprocessor([1, 0, 5]), RESULTS[::-1]),
        (IndexedResultsPreprocessor(None), RESULTS),
        (ExcludedKeysResultsPreprocessor(["a", "n"]), [{"name": "x"}, {"name": "y"}]),
        (
            SequentialResultsPreprocessor(
                [AverageResultsPreprocessor(["a"]), IndexedResultsPreprocessor(0)]
            ),
            [{**RESULTS[0], "avg(a)": 2.5}],
        ),
    ],
)
def test_results_are_selected(preprocessor, expected):
    assert preprocessor.preprocess(RESULTS) == expected


@pytest.mark.parametrize(
    ("preprocessor", "added"),
    [
        (AverageResultsPreprocessor(["a"]), {"avg(a)": 3}),
        (AverageResultsPreprocessor(), {"avg(a)": 3, "avg(n)": 3, "avg(b)": 1}),
        (MaxResultsPreprocessor(["a", "c"]), {"max(a)": 4}),
        (WeightedAverageResultsPreprocessor(["a"], "n"), {"weight_avg_n(a)": 3.5}),
        (WeightedAverageResultsPreprocessor(["a"], "z"), {"weight_avg_z(a)": 3}),
    ],
)
def test_a_value_over_the_workers_that_reported_a_number_is_added(preprocessor, added):
    results = [{"a": 2, "n": 1}, {"a": "text", "b": 1, "n": 5}, {"a": 4, "n": 3}]
    assert preprocessor.preprocess(results) == [{**result, **added} for result in results]


@pytest.mark.parametrize(("wrong", "most"), [(None, 3), (0, 3), (float("nan"), float("nan"))])
def test_workers_without_a_weight_do_not_count(wrong, most):
    results = [{"a": 2, "n": 1}, {"a": float("nan"), "n": wrong}, {"a": 4, "n": 3}]
    (first, *_) = WeightedAverageResultsPreprocessor(["a"], "n").preprocess(results)
    assert first["weight_avg_n(a)"] == 3.5
    (first, *_) = MaxResultsPreprocessor(["n"]).preprocess(results)
    assert first["max(n)"] == pytest.approx(most, nan_ok=True)
