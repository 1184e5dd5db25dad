"""Ray Datasets, split across the workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

_UNNAMED = "dataset"


class Datasets:
    """The data sets of a run: one, several by name, or None.

    `is_split(name)` returns whether to split a data set. If False, every worker gets all rows.
    """

    def __init__(self, given: Any, is_split: Callable[[str], bool] = lambda name: True) -> None:
        self._has_names = isinstance(given, Mapping) and bool(given)
        self._named: dict[str, Any] = (
            dict(given) if isinstance(given, Mapping) else {_UNNAMED: given}
        )
        self._is_split = is_split
        self._fixed: dict[str, Any] = {}
        for name, dataset in self._named.items():
            is_dataset = hasattr(dataset, "split") and not isinstance(dataset, str)
            if dataset is not None and is_split(name) and not is_dataset:
                shown = f"dataset {name!r}" if self._has_names else f"dataset={dataset!r}"
                raise TypeError(f"{shown}: must be a Ray Dataset, or a dict of Datasets by name.")

    def shared_out(self, actors: Sequence[Any]) -> list[Any]:
        """Return the shard of each worker. Shards have equal size and local rows if possible.

        With several data sets, each worker gets a dict of shards by name. Without data sets, each
        worker gets None.
        """
        shares = {name: self._shares(name, data, actors) for name, data in self._named.items()}
        if not self._has_names:
            return shares.get(_UNNAMED, [None] * len(actors))
        return [{name: each[rank] for name, each in shares.items()} for rank in range(len(actors))]

    def materialize(self) -> None:
        """Read the data sets to split before the workers reserve the CPUs that reading needs."""
        for name, dataset in self._named.items():
            if dataset is not None and self._is_split(name):
                self._materialized(name, dataset)

    def _materialized(self, name: str, dataset: Any) -> Any:
        """Return the data set with fixed rows, so that a restart gets the same shards."""
        if name not in self._fixed:
            if _is_lazy(dataset):
                logger.warning(
                    "Data set %r is read once, before training. Random map functions give the same "
                    "rows in every epoch: draw random numbers in the training function. To avoid "
                    "this warning, pass dataset.materialize().",
                    name,
                )
                _warn_without_cpu(name)
            self._fixed[name] = getattr(dataset, "materialize", lambda: dataset)()
        return self._fixed[name]

    def _shares(self, name: str, dataset: Any, actors: Sequence[Any]) -> list[Any]:
        if dataset is None or not self._is_split(name):
            if _is_lazy(dataset):
                _warn_without_cpu(name)
            return [dataset] * len(actors)
        dataset, num_workers = self._materialized(name, dataset), len(actors)
        num_rows = dataset.count() if hasattr(dataset, "count") else 0
        num_unused = num_rows % num_workers
        if num_unused:
            logger.warning(
                "%d of %d rows of data set %r are not used, so that %d workers get equal shards.",
                num_unused,
                num_rows,
                name,
                num_workers,
            )
        return list(dataset.split(num_workers, equal=True, locality_hints=list(actors)))


def _is_lazy(dataset: Any) -> bool:
    is_done = type(dataset).__name__ == "MaterializedDataset"
    return hasattr(dataset, "materialize") and not is_done


def _warn_without_cpu(name: str) -> None:
    from raysgd.cluster.ray_session import free_cpus  # imports Ray

    if free_cpus() < 1:
        logger.warning(
            "Data set %r waits for a free CPU, and there is none. If the workers hold all CPUs, "
            "leave one free, or pass dataset.materialize().",
            name,
        )
