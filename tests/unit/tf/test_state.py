"""Copies of state as arrays."""

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from raysgd._internal.nested import map_leaves  # noqa: E402
from raysgd.tf.train_state import copy_leaf_to_arrays  # noqa: E402


def test_a_copy_stays_as_it_was_and_has_no_tensors():
    variable, array = tf.Variable([1.0, 2.0]), np.ones(2)
    tree = {"a": [variable, (array, {1})], "constant": tf.constant(3), "text": "x"}
    copied = map_leaves(tree, copy_leaf_to_arrays)
    variable.assign([0.0, 0.0])
    array[:] = 0
    tree["a"][1][1].add(2)
    assert type(copied["a"][0]) is np.ndarray
    assert copied["a"][0].tolist() == [1, 2]
    assert copied["a"][1][0].tolist() == [1, 1]
    assert copied["a"][1][1] == {1}
    assert (int(copied["constant"]), copied["text"]) == (3, "x")


def test_numbers_of_numpy_keep_their_types():
    found = map_leaves([np.float32(0.5), np.array(3)], copy_leaf_to_arrays)
    assert [type(each) for each in found] == [np.float32, np.ndarray]
