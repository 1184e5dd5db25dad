"""Sums of gradients have the same bits on any number of workers."""

import itertools

import pytest
import torch

from raysgd.torch.strategies.tree_sum import TreeSum, subtrees
from tests.conftest import run_ranks

SHAPES = [(3, 5), (), (7,)]
NUM_LEAVES = 6
SUM = """
from raysgd.data.partition import part_bounds
from raysgd.torch.strategies import tree_sum
from tests.unit.torch.strategies.test_tree_sum import NUM_LEAVES, bits, leaf, whole_sum

join()
for tree_sum._SMALL_BYTES in (tree_sum._SMALL_BYTES, 0):
    tree = tree_sum.TreeSum()
    for number in range(*part_bounds(NUM_LEAVES, dist.get_world_size(), rank)):
        tree.add(0, number, leaf(number))
    total = tree_sum.sum_over_workers(tree, NUM_LEAVES)
    assert bits(total) == bits(whole_sum(NUM_LEAVES))
print("good")
"""


def leaf(number):
    generator = torch.Generator().manual_seed(number)
    random = [torch.randn(shape, generator=generator) * 10.0 ** (number % 3) for shape in SHAPES]
    return [*random, torch.tensor([-0.0, number / 3]).double()]


def bits(tensors):
    return [tensor.contiguous().view(-1).view(torch.uint8).tolist() for tensor in tensors]


def whole_sum(num_leaves):
    tree = TreeSum()
    for number in range(num_leaves):
        tree.add(0, number, leaf(number))
    return tree.total()


@pytest.mark.parametrize("num_leaves", range(1, 12))
def test_subtrees_of_any_workers_make_the_same_sum(num_leaves):
    for size in range(1, num_leaves + 1):
        bounds = [num_leaves * rank // size for rank in range(size + 1)]
        tree = TreeSum()
        for first, stop in itertools.pairwise(bounds):
            own = TreeSum()
            for number in range(first, stop):
                own.add(0, number, leaf(number))
            assert [root[:2] for root in own.roots] == subtrees(first, stop)
            for root in own.roots:
                tree.add(*root)
        assert bits(tree.total()) == bits(whole_sum(num_leaves))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_workers_exchange_the_roots_of_their_subtrees(size):
    run_ranks(SUM, size)
