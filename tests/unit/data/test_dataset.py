"""Data sets of items that workers fetch."""

import pickle
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.data import Dataset


@given(st.lists(st.integers(), max_size=20), st.data())
def test_items_come_in_the_order_of_the_indices(items, data):
    dataset = Dataset(items)
    indices = data.draw(st.lists(st.integers(0, len(items) - 1))) if items else []
    assert dataset.fetch(indices) == [items[index] for index in indices]
    assert dataset.__getitems__(indices) == dataset.fetch(indices)
    assert [dataset[index] for index in indices] == dataset.fetch(indices)
    assert len(dataset) == len(items)


def test_download_comes_before_transform():
    dataset = Dataset([1, 2], download_func=lambda i: f"d{i}", transform=lambda s: f"t{s}")
    assert dataset.fetch([0, 1]) == ["td1", "td2"]


class Parallel:
    """A fake of the Ray ``ParallelIterator``, which is not iterable itself."""

    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return f"ParallelIterator[{self.name}]"

    def __iter__(self):
        raise TypeError("You must use it.gather_sync()")

    def gather_sync(self):
        return iter([1, 2, 3])


def test_a_parallel_iterator_of_ray_is_read_into_a_list_and_a_sequence_is_not():
    assert Dataset(data=Parallel("from_items[int, 3, shards=2]")).fetch([0, 2]) == [1, 3]
    with pytest.raises(ValueError, match="Leave out repeat=True"):
        Dataset(Parallel("from_items[int, 3, shards=1, repeat=True]"))
    assert Dataset(range(10**9)).fetch([10**8]) == [10**8]


def test_concurrent_downloads_happen_at_the_same_time_and_keep_their_order():
    barrier = threading.Barrier(3, timeout=20)

    def download(item):
        barrier.wait()  # passes only when three downloads are under way
        return item * 10

    data = Dataset(range(3), download_func=download, max_concurrency=3)
    assert data.fetch([2, 0, 1]) == [20, 0, 10]


@pytest.mark.parametrize("concurrency", [0, 4])
def test_an_error_of_a_download_reaches_the_caller(concurrency):
    def download(item):
        raise ConnectionError(f"no {item}")

    with pytest.raises(ConnectionError, match="no 1"):
        Dataset([1], download_func=download, max_concurrency=concurrency).fetch([0])


def test_each_dataset_has_batches_and_an_identity_and_keeps_it_when_pickled():
    with pytest.raises(ValueError, match="batch_size=0"):
        Dataset([1], batch_size=0)
    first, second = Dataset([1]), Dataset([1])
    assert first.uid != second.uid
    assert pickle.loads(pickle.dumps(first)).uid == first.uid
