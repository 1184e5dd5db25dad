"""How many workers fit into given resources, and which group sizes to try at a start."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["start_sizes", "workers_that_fit"]


def workers_that_fit(resources: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    """Return how many bundles fit if all resources are on one node: an upper bound.

    >>> workers_that_fit({"CPU": 5.0}, {"CPU": 2})
    2
    """
    counts = [int(resources.get(name, 0) // need) for name, need in bundle.items() if need > 0]
    return min(counts, default=0)


def start_sizes(num_workers: int, min_workers: int, capacity: int, free: int) -> list[int]:
    """Return the group sizes to try at the start, from the largest to `min_workers`.

    Args:
        num_workers: the most workers.
        min_workers: the fewest.
        capacity: how many the whole cluster could hold.
        free: how many it seems to hold now. The free resources that Ray reports lag behind by up
            to a second, so `num_workers` comes first if the cluster could hold them.

    >>> start_sizes(4, 1, capacity=8, free=2)
    [4, 2, 1]
    >>> start_sizes(4, 1, capacity=3, free=3)
    [3, 1]
    """
    sizes = {min_workers, max(min_workers, min(num_workers, capacity, free))}
    if capacity >= num_workers:
        sizes.add(num_workers)
    return sorted(sizes, reverse=True)
