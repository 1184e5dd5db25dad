"""Ray Datasets, split across the workers."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raysgd.cluster import remote_functions
from raysgd.train.worker_session import set_datasets

logger = logging.getLogger(__name__)


class Datasets:
    """The data sets of a run: one, several by name, or None.

    `is_split(name)` returns whether to split a data set. If False, every worker gets all rows.
    """

    def __init__(self, datasets: Any, is_split: Callable[[str], bool] = lambda name: True) -> None:
        if isinstance(datasets, Mapping) and not datasets:
            datasets = None
        self._has_names = isinstance(datasets, Mapping)
        self._named = dict(datasets) if self._has_names else {"dataset": datasets}
        self._to_split = [n for n, data in self._named.items() if data is not None and is_split(n)]
        for name in self._to_split:
            if not hasattr(self._named[name], "materialize"):
                shown = f"dataset {name!r}" if self._has_names else f"dataset={datasets!r}"
                raise TypeError(f"{shown}: must be a Ray Dataset, or a dict of Datasets by name.")

    def send(self, members: Sequence[Any]) -> None:
        """Send each worker its part of the data sets."""
        shards = self.split([each.actor for each in members])
        calls = [m.execute(set_datasets, own) for m, own in zip(members, shards, strict=True)]
        remote_functions.results(members, calls)

    def split(self, actors: Sequence[Any]) -> list[Any]:
        """Return the shard of each worker. Shards have equal size and local rows if possible.

        With several data sets, each worker gets a dict of shards by name. Without data sets, each
        worker gets None.
        """
        self.materialize()
        shards = {name: self._shards(name, actors) for name in self._named}
        if not self._has_names:
            return shards["dataset"]
        return [{name: each[rank] for name, each in shards.items()} for rank in range(len(actors))]

    def materialize(self) -> None:
        """Read the data sets to split before the workers reserve the CPUs that reading needs.

        A restart gets the same shards, because the rows are fixed then.
        """
        from raysgd.cluster.ray_session import free_cpus  # imports Ray

        for name, dataset in self._named.items():
            if not _is_lazy(dataset):
                continue
            if free_cpus() < 1:
                logger.warning(
                    "Data set %r waits for a free CPU, and there is none. If the workers hold all "
                    "CPUs, leave one free, or pass dataset.materialize().",
                    name,
                )
            if name in self._to_split:
                logger.warning(
                    "Data set %r is read once, before training. Random map functions give the same "
                    "rows in every epoch: draw random numbers in the training function. To avoid "
                    "this warning, pass dataset.materialize().",
                    name,
                )
                self._named[name] = dataset.materialize()

    def _shards(self, name: str, actors: Sequence[Any]) -> list[Any]:
        dataset, num_workers = self._named[name], len(actors)
        if name not in self._to_split:
            return [dataset] * num_workers
        num_rows = dataset.count()
        if num_unused := num_rows % num_workers:
            logger.warning(
                "%d of %d rows of data set %r are not used, so that %d workers get equal shards.",
                num_unused,
                num_rows,
                name,
                num_workers,
            )
        return list(dataset.split(num_workers, equal=True, locality_hints=list(actors)))


def _is_lazy(dataset: Any) -> bool:
    return hasattr(dataset, "materialize") and type(dataset).__name__ != "MaterializedDataset"
