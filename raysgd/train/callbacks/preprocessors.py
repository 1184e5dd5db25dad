"""What may be done to results before a callback gets them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from raysgd.callbacks.values import numbers_in

__all__ = [
    "AverageResultsPreprocessor",
    "ExcludedKeysResultsPreprocessor",
    "IndexedResultsPreprocessor",
    "MaxResultsPreprocessor",
    "ResultsPreprocessor",
    "SequentialResultsPreprocessor",
    "WeightedAverageResultsPreprocessor",
]

logger = logging.getLogger(__name__)

Results = list[dict[str, Any]]


class ResultsPreprocessor:
    """Changes what the workers reported; override `preprocess`."""

    def preprocess(self, results: Results) -> Results:
        """Return the results as they shall be."""
        return results


class IndexedResultsPreprocessor(ResultsPreprocessor):
    """Keeps the results of some workers alone.

    Args:
        indices: their ranks; None for all.
    """

    def __init__(self, indices: int | Iterable[int] | None) -> None:
        self._indices = [indices] if isinstance(indices, int) else indices
        self._indices = None if self._indices is None else list(self._indices)

    def preprocess(self, results: Results) -> Results:
        """Return the results of these workers, in that order; of those that there are now."""
        if self._indices is None:
            return results
        return [results[index] for index in self._indices if index < len(results)]


class ExcludedKeysResultsPreprocessor(ResultsPreprocessor):
    """Leaves some metrics out.

    Args:
        excluded_keys: their names.
    """

    def __init__(self, excluded_keys: Iterable[str] | None = None) -> None:
        self._excluded = set(excluded_keys or ())

    def preprocess(self, results: Results) -> Results:
        """Return the results without these."""
        return [
            {key: value for key, value in result.items() if key not in self._excluded}
            for result in results
        ]


class SequentialResultsPreprocessor(ResultsPreprocessor):
    """Applies several, one after the other."""

    def __init__(self, preprocessors: Sequence[ResultsPreprocessor]) -> None:
        self._preprocessors = list(preprocessors)

    def preprocess(self, results: Results) -> Results:
        """Return the results after all of them."""
        for preprocessor in self._preprocessors:
            results = preprocessor.preprocess(results)
        return results


class _Aggregating(ResultsPreprocessor):
    """Adds a number over the workers that have reported it to the results of each."""

    def __init__(self, keys: Iterable[str] | None = None) -> None:
        self._keys = None if keys is None else list(keys)

    def _aggregated(
        self, results: Results, name: str, aggregate: Callable[[dict[int, float]], float]
    ) -> Results:
        """Add what `aggregate` makes of the workers' numbers, by rank."""
        numbers = [numbers_in(result) for result in results]
        found: dict[str, float] = {}
        for key in self._keys or list(dict.fromkeys(key for each in numbers for key in each)):
            held = {rank: each[key] for rank, each in enumerate(numbers) if key in each}
            if held:
                found[name.format(key)] = aggregate(held)
            if len(held) < len(results):
                said = "%s counts ranks %s alone, since the others have reported no number."
                logger.warning(said, name.format(key), list(held))
        return [{**result, **found} for result in results]


class AverageResultsPreprocessor(_Aggregating):
    """Adds ``avg(name)``, the mean over the workers.

    Args:
        keys: of which metrics; None for all that are numbers.
    """

    def preprocess(self, results: Results) -> Results:
        """Return the results with the means."""
        return self._aggregated(results, "avg({})", lambda held: sum(held.values()) / len(held))


class MaxResultsPreprocessor(_Aggregating):
    """Adds ``max(name)``, the largest value over the workers.

    Args:
        keys: of which metrics; None for all that are numbers.
    """

    def preprocess(self, results: Results) -> Results:
        """Return the results with the largest values."""
        return self._aggregated(results, "max({})", lambda held: max(held.values()))


class WeightedAverageResultsPreprocessor(_Aggregating):
    """Adds ``weight_avg_WEIGHT(name)``, the mean over the workers, weighted by another metric.

    Args:
        keys: of which metrics; None for all that are numbers.
        weight_key: name of the metric that is the weight. Workers without a number there do not
            count. If there is none, or their sum is zero, all workers count equally.
    """

    def __init__(self, keys: Iterable[str] | None = None, weight_key: str = "nb_steps") -> None:
        super().__init__(keys)
        self._weight_key = weight_key

    def preprocess(self, results: Results) -> Results:
        """Return the results with the means."""
        found = [numbers_in(result).get(self._weight_key, math.nan) for result in results]
        missing = [rank for rank, weight in enumerate(found) if math.isnan(weight)]
        weights = [0.0 if math.isnan(weight) else weight for weight in found]
        if sum(weights) == 0:
            logger.warning("Workers count equally: no worker has a weight %r.", self._weight_key)
            weights = [1.0] * len(results)
        elif missing:
            logger.warning("Ranks %s do not count: no weight %r.", missing, self._weight_key)

        def mean(held: dict[int, float]) -> float:
            total = sum(weights[rank] for rank in held)
            if total == 0:
                return sum(held.values()) / len(held)
            return sum(value * weights[rank] for rank, value in held.items()) / total

        return self._aggregated(results, f"weight_avg_{self._weight_key}({{}})", mean)
