"""Ray Datasets, split across the workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["Datasets"]

logger = logging.getLogger(__name__)


class Datasets:
    """The data sets of a run.

    Args:
        given: a data set, a dict of them by name, or None.
        is_split: returns for a name whether to split that data set. Otherwise every worker gets all
            of it.

    Raises:
        TypeError: if a value to split is not a Ray Dataset.
    """

    def __init__(self, given: Any, is_split: Callable[[str], bool] = lambda name: True) -> None:
        self._given = (dict(given) or None) if isinstance(given, Mapping) else given
        self._is_split = is_split
        self._kept: dict[str, Any] = {}
        self._warned: set[tuple[str, int]] = set()
        named = self._given if isinstance(self._given, dict) else {"": self._given}
        for name, dataset in named.items():
            is_dataset = hasattr(dataset, "split") and not isinstance(dataset, str)
            if dataset is not None and is_split(name) and not is_dataset:
                shown = f"dataset={dataset!r}" if not name else f"dataset {name!r}"
                raise TypeError(f"{shown}: must be a Ray Dataset, or a dict of them by name.")

    def shared_out(self, actors: Sequence[Any]) -> list[Any]:
        """Return the shard of each worker. Shards have equal size and local rows if possible.

        For several data sets, each worker gets a dict of shards by name. Without data sets, it gets
        None.
        """
        if not isinstance(self._given, dict):
            return self._shares("", self._given, actors)
        shares = {name: self._shares(name, data, actors) for name, data in self._given.items()}
        return [{name: each[rank] for name, each in shares.items()} for rank in range(len(actors))]

    def materialize(self) -> None:
        """Read the data sets to split, before workers reserve the CPUs that reading needs."""
        named = self._given if isinstance(self._given, dict) else {"": self._given}
        for name, dataset in named.items():
            if dataset is not None and self._is_split(name):
                self._materialized(name, dataset)

    def _materialized(self, name: str, dataset: Any) -> Any:
        """Return the data set with fixed rows, so that a restart gets the same shards."""
        if name not in self._kept:
            if _is_lazy(dataset):
                logger.warning(
                    "Data set %r is read once, before training. What its map functions draw at "
                    "random is the same in every epoch: draw it in the training function instead. "
                    "Pass dataset.materialize() to avoid this warning.",
                    name,
                )
                _warn_without_cpu(name)
            self._kept[name] = getattr(dataset, "materialize", lambda: dataset)()
        return self._kept[name]

    def _shares(self, name: str, dataset: Any, actors: Sequence[Any]) -> list[Any]:
        if dataset is None or not self._is_split(name):
            if _is_lazy(dataset):
                _warn_without_cpu(name)
            return [dataset] * len(actors)
        dataset, num_workers = self._materialized(name, dataset), len(actors)
        num_rows = dataset.count() if hasattr(dataset, "count") else 0
        if num_rows % num_workers and (name, num_workers) not in self._warned:
            self._warned.add((name, num_workers))
            logger.warning(
                "Data set %r has %d rows, and %d workers get equally many: %d each. The other %d "
                "rows are not used.",
                name,
                num_rows,
                num_workers,
                num_rows // num_workers,
                num_rows % num_workers,
            )
        return list(dataset.split(num_workers, equal=True, locality_hints=list(actors)))


def _is_lazy(dataset: Any) -> bool:
    is_done = type(dataset).__name__ == "MaterializedDataset"
    return hasattr(dataset, "materialize") and not is_done


def _warn_without_cpu(name: str) -> None:
    from raysgd.cluster.ray_session import free_cpus  # imports Ray

    if free_cpus() < 1:
        logger.warning(
            "Data set %r is read by Ray tasks, and no CPU of the cluster is free for them now. If "
            "the workers hold all CPUs, this waits forever: leave one free, or pass "
            "dataset.materialize(), called before the workers start.",
            name,
        )
