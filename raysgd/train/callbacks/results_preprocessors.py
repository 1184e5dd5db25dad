"""The preprocessors of results, by the module that older scripts import them from."""

from __future__ import annotations

from raysgd.train.callbacks.preprocessors import (
    AverageResultsPreprocessor,
    ExcludedKeysResultsPreprocessor,
    IndexedResultsPreprocessor,
    MaxResultsPreprocessor,
    ResultsPreprocessor,
    SequentialResultsPreprocessor,
    WeightedAverageResultsPreprocessor,
)

__all__ = [
    "AverageResultsPreprocessor",
    "ExcludedKeysResultsPreprocessor",
    "IndexedResultsPreprocessor",
    "MaxResultsPreprocessor",
    "ResultsPreprocessor",
    "SequentialResultsPreprocessor",
    "WeightedAverageResultsPreprocessor",
]
