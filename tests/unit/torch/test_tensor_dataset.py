"""Tensor data sets, indexed many samples at a time: the batches are those of a plain loader."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from raysgd.torch.tensor_dataset import rows_of
from tests.unit.torch.test_loading import indices, same, tensors, wrap


@given(
    st.integers(1, 50),
    st.integers(1, 12),
    st.booleans(),
    st.integers(0, 2),
    st.booleans(),
)
def test_batches_of_tensors_equal_a_plain_loaders(size, batch_size, drop_last, nested, matrix):
    columns = (torch.randn(size, 3) if matrix else torch.arange(size), torch.arange(size))
    data = TensorDataset(*columns)
    for _ in range(nested):
        data = Subset(data, torch.randperm(len(data))[: max(1, len(data) - 1)].tolist())
    loader = DataLoader(data, batch_size=batch_size, drop_last=drop_last)
    source = wrap(loader)
    assert rows_of(loader) is not None
    made, expected = list(source.batches(0, 0)), list(loader)
    assert len(source) == len(expected)
    assert all(map(same, made, expected))
    assert len(made) == len(expected)


def test_many_batches_and_large_ones_are_fetched_in_pieces_without_a_seam():
    for data, batch_size in ((tensors(1000), 3), (TensorDataset(torch.randn(64, 2**14)), 5)):
        loader = DataLoader(data, batch_size=batch_size)
        made = list(wrap(loader).batches(0, 0))
        assert len(made) == len(loader)
        assert all(map(same, made, loader))


def test_the_fast_and_the_slow_path_give_the_same_order():
    fast = DataLoader(tensors(), batch_size=3, shuffle=True)
    slow = DataLoader(
        tensors(), batch_size=3, shuffle=True, collate_fn=lambda s: default_collate(s)
    )
    assert rows_of(fast) is not None
    assert rows_of(slow) is None
    for epoch in range(3):
        ways = zip(wrap(fast).batches(epoch, 0), wrap(slow).batches(epoch, 0), strict=True)
        assert all(same(a, b) for a, b in ways)


def test_changing_a_batch_in_place_leaves_the_data_as_it_is():
    data = tensors(8)
    for features, _ in wrap(DataLoader(data, batch_size=4)).batches(0, 0):
        features.zero_()
    assert data.tensors[0].tolist() == list(range(8))


def test_subclasses_of_tensor_data_sets_keep_their_own_items():
    class Doubling(TensorDataset):
        def __getitem__(self, index):
            return tuple(column * 2 for column in super().__getitem__(index))

    class DoublingSubset(Subset):
        def __getitem__(self, index):
            return tuple(column * 2 for column in super().__getitem__(index))

        def __getitems__(self, indices):
            return [self[index] for index in indices]

    for data in (
        Doubling(torch.arange(6)),
        DoublingSubset(TensorDataset(torch.arange(6)), range(6)),
    ):
        source = wrap(DataLoader(data, batch_size=6))
        assert indices(source.batches(0, 0)) == [0, 2, 4, 6, 8, 10]


def test_only_loaders_that_do_nothing_but_stack_rows_take_the_fast_path():
    data = tensors()
    assert rows_of(DataLoader(Subset(data, range(5)))) is not None
    for loader in (
        DataLoader(data, num_workers=1),
        DataLoader(data, batch_size=None),
        DataLoader(list(range(5))),
        DataLoader(Subset(list(range(5)), [1])),
    ):
        assert rows_of(loader) is None


def test_indices_of_a_subset_may_be_of_any_kind():
    data = tensors()
    for chosen in ([3, 1], (3, 1), torch.tensor([3, 1]), torch.tensor([3, 1]).numpy()):
        assert indices(wrap(DataLoader(Subset(data, chosen))).batches(0, 0)) == [3, 1]


@pytest.mark.parametrize("layout", ["coo", "nested"])
def test_tensors_that_are_not_dense_are_read_one_by_one(layout):
    dense = torch.eye(6)
    made = {
        "coo": dense.to_sparse,
        "nested": lambda: torch.nested.as_nested_tensor(list(dense), layout=torch.jagged),
    }[layout]()
    data = TensorDataset(made)
    assert rows_of(DataLoader(data)) is None
    if layout == "coo":
        source = wrap(DataLoader(data, batch_size=3, collate_fn=_dense))
        assert torch.equal(torch.cat(list(source.batches(0, 0))), dense)


def _dense(samples):
    return torch.stack([sample.to_dense() for (sample,) in samples])
