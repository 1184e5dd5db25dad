"""Ray Datasets, shared out over the workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["Datasets"]


class Datasets:
    """What a run trains on.

    Args:
        given: a data set, or a dict of them by name; None for none.
        is_split: says of a name whether that data set is shared out, or whole on every worker.

    Raises:
        TypeError: if something that is to be shared out cannot be.
    """

    def __init__(self, given: Any, is_split: Callable[[str], bool] = lambda name: True) -> None:
        self._given = (dict(given) or None) if isinstance(given, Mapping) else given
        self._is_split = is_split
        self._kept: dict[str, Any] = {}
        named = self._given if isinstance(self._given, dict) else {"": self._given}
        for name, dataset in named.items():
            is_dataset = hasattr(dataset, "split") and not isinstance(dataset, str)
            if dataset is not None and is_split(name) and not is_dataset:
                shown = f"dataset={dataset!r}" if not name else f"dataset {name!r}"
                raise TypeError(f"{shown}: must be a Ray Dataset, or a dict of them by name.")

    def shared_out(self, actors: Sequence[Any]) -> list[Any]:
        """Return each worker's share, equally large, of rows that are near it where possible.

        Of several data sets it is a dict of shares, by name; without any it is None.
        """
        if not isinstance(self._given, dict):
            return self._shares("", self._given, actors)
        shares = {name: self._shares(name, data, actors) for name, data in self._given.items()}
        return [{name: each[rank] for name, each in shares.items()} for rank in range(len(actors))]

    def _shares(self, name: str, dataset: Any, actors: Sequence[Any]) -> list[Any]:
        if dataset is None or not self._is_split(name):
            return [dataset] * len(actors)
        if name not in self._kept:  # the same rows after a restart, whatever was drawn at random
            materialize = getattr(dataset, "materialize", lambda: dataset)
            self._kept[name] = materialize()
        dataset = self._kept[name]
        return list(dataset.split(len(actors), equal=True, locality_hints=list(actors)))
