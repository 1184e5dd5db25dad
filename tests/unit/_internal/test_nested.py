"""Nested containers of state, mapped leaf by leaf."""

import collections
import copy
import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raysgd._internal.nested import describe, map_leaves

LEAVES = st.one_of(st.integers(), st.text(max_size=3), st.none())
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(collections.OrderedDict),
    ),
    max_leaves=8,
)


@given(TREES)
def test_map_leaves_keeps_the_shape_and_the_original(tree):
    before = copy.deepcopy(tree)
    boxed = map_leaves(tree, lambda leaf: {"box": leaf})
    assert tree == before

    def unboxed(mapped, original):
        if type(original) in (list, tuple):
            assert type(mapped) is type(original)
            return type(original)(map(unboxed, mapped, original))
        if isinstance(original, dict):
            assert type(mapped) is type(original)
            assert list(mapped) == list(original)
            return type(original)((k, unboxed(mapped[k], original[k])) for k in original)
        return mapped["box"]

    assert unboxed(boxed, tree) == tree


def test_a_named_tuple_is_a_leaf():
    point = collections.namedtuple("point", "x y")(1, 2)
    assert map_leaves([point], lambda leaf: leaf is point) == [True]


@dataclasses.dataclass(slots=True)
class Slots:
    image: object


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_every_batch_can_be_described():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    batch = [Slots(torch.ones(4, 5)), {"nested": nested}, Slots]
    assert describe(batch) == "[Slots{image: float32[4, 5]}, {nested: Tensor}, type]"
