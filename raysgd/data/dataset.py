"""Datasets whose items the workers fetch themselves."""

import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from raysgd._internal.arguments import as_int


class Dataset:
    """Items, such as paths or URLs, that the workers download, transform, and train on.

    Pass a data set to ``trainer.train(dataset=...)`` to replace the registered train loader. Each
    item goes to one worker, in order.

    >>> data = Dataset(range(4), batch_size=2, download_func=lambda i: i * 10)
    >>> data.fetch([0, 3])
    [0, 30]

    Args:
        data: The items. raysgd sends them to the workers, so prefer names of files to their
            content. Iterators, such as those of ``ray.util.iter``, must end.
        batch_size: Items per worker and step.
        download_func: Converts an item into a sample, on the worker. None uses items as samples.
        max_concurrency: Number of threads that download the items of a batch.
        transform: Converts a downloaded sample into ``(*features, target)``, on the worker.

    A batch combines its samples column by column. Tensors with at least one dimension are
    concatenated along the first, so a sample can itself be a small batch. Other values are stacked
    as in a DataLoader.
    """

    def __init__(
        self,
        data: Iterable[Any],
        batch_size: int = 32,
        download_func: Callable[[Any], Any] | None = None,
        max_concurrency: int = 0,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self.batch_size = as_int("Dataset", "batch_size", batch_size, 1)
        if hasattr(data, "gather_sync"):  # an iterator of ``ray.util.iter``
            if "repeat=True" in repr(data):
                raise ValueError(f"Dataset(data={data!r}): must end. Leave out repeat=True.")
            data = data.gather_sync()
        self.items: Sequence[Any] = data if isinstance(data, Sequence) else list(data)
        self.uid = uuid.uuid4().hex
        self._download = download_func
        self._transform = transform
        self._max_concurrency = max_concurrency

    def __len__(self) -> int:
        """Number of items."""
        return len(self.items)

    def fetch(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples at `indices`, downloaded and transformed."""
        items = [self.items[index] for index in indices]
        if self._download is not None:
            if self._max_concurrency > 1:
                with ThreadPoolExecutor(self._max_concurrency) as pool:
                    items = list(pool.map(self._download, items))
            else:
                items = [self._download(item) for item in items]
        return items if self._transform is None else [self._transform(item) for item in items]

    def __getitem__(self, index: int) -> Any:
        """Return one sample."""
        return self.fetch([index])[0]

    __getitems__ = fetch  # a DataLoader calls this for each batch
