"""Preprocessors change results before a callback gets them."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from raysgd._internal.values import numbers_in

logger = logging.getLogger(__name__)

Results = list[dict[str, Any]]


class ResultsPreprocessor:
    """Changes the results of the workers; override `preprocess`."""

    def preprocess(self, results: Results) -> Results:
        """Return the changed results, by rank."""
        return results


class IndexedResultsPreprocessor(ResultsPreprocessor):
    """Keeps only the results of the workers with these ranks; None keeps all."""

    def __init__(self, indices: int | Iterable[int] | None) -> None:
        indices = [indices] if isinstance(indices, int) else indices
        self._indices = None if indices is None else list(indices)

    def preprocess(self, results: Results) -> Results:
        if self._indices is None:
            return results
        return [results[index] for index in self._indices if index < len(results)]


class ExcludedKeysResultsPreprocessor(ResultsPreprocessor):
    """Removes the metrics with these names."""

    def __init__(self, excluded_keys: Iterable[str] | None = None) -> None:
        self._excluded = set(excluded_keys or ())

    def preprocess(self, results: Results) -> Results:
        return [
            {key: value for key, value in result.items() if key not in self._excluded}
            for result in results
        ]


class SequentialResultsPreprocessor(ResultsPreprocessor):
    """Applies several preprocessors, one after the other."""

    def __init__(self, preprocessors: Sequence[ResultsPreprocessor]) -> None:
        self._preprocessors = list(preprocessors)

    def preprocess(self, results: Results) -> Results:
        for preprocessor in self._preprocessors:
            results = preprocessor.preprocess(results)
        return results


class _Aggregator(ResultsPreprocessor):
    """Adds to every result a value over the workers that reported a number."""

    _name: str
    """Name of the added metric, with braces for the name of the reported one."""

    def __init__(self, keys: Iterable[str] | None = None) -> None:
        self._keys = None if keys is None else list(keys)

    def preprocess(self, results: Results) -> Results:
        by_rank = [numbers_in(result) for result in results]
        added: dict[str, float] = {}
        for key in self._keys or dict.fromkeys(key for each in by_rank for key in each):
            reported = {rank: each[key] for rank, each in enumerate(by_rank) if key in each}
            if reported:
                added[self._name.format(key)] = self._aggregate(reported, results)
        return [{**result, **added} for result in results]

    def _aggregate(self, numbers: Mapping[int, float], results: Results) -> float:
        """Return one value for the numbers by rank."""
        raise NotImplementedError


class AverageResultsPreprocessor(_Aggregator):
    """Adds ``avg(name)``, the mean over the workers, for `keys` or all metrics that are numbers."""

    _name = "avg({})"

    def _aggregate(self, numbers: Mapping[int, float], results: Results) -> float:
        return sum(numbers.values()) / len(numbers)


class MaxResultsPreprocessor(_Aggregator):
    """Adds ``max(name)``, the maximum over the workers, or NaN, for `keys` or all numbers."""

    _name = "max({})"

    def _aggregate(self, numbers: Mapping[int, float], results: Results) -> float:
        return max(numbers.values(), key=lambda number: (math.isnan(number), number))


class WeightedAverageResultsPreprocessor(_Aggregator):
    """Adds ``weight_avg_WEIGHT(name)``, the mean over the workers, weighted by another metric.

    Adds the mean for `keys`, or for all metrics that are numbers. `weight_key` names the metric
    with the weights. Workers without a weight do not count. If the sum of the weights is zero, all
    workers count equally.
    """

    def __init__(self, keys: Iterable[str] | None = None, weight_key: str = "nb_steps") -> None:
        super().__init__(keys)
        self._weight_key = weight_key
        self._name = f"weight_avg_{weight_key}({{}})"

    def _aggregate(self, numbers: Mapping[int, float], results: Results) -> float:
        key = self._weight_key
        weights = {rank: numbers_in(results[rank]).get(key, 0.0) for rank in numbers}
        weights = {rank: weight for rank, weight in weights.items() if abs(weight) > 0}  # not NaN
        total = sum(weights.values())
        if total == 0:
            logger.warning(
                "All workers count equally, because the weights %r are missing or sum to zero.", key
            )
            return sum(numbers.values()) / len(numbers)
        return sum(numbers[rank] * weight for rank, weight in weights.items()) / total


__all__ = sorted(name for name in globals() if name.endswith("ResultsPreprocessor"))
