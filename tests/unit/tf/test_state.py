"""Copies of state as arrays, and generators of random numbers as plain data."""

import json
import random
import threading

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from raysgd.tf.state import copied_tree, rng_state, set_rng_state  # noqa: E402


def draws():
    return random.random(), random.gauss(0, 1), np.random.rand(3).tolist(), np.random.randn(1)[0]


def test_random_numbers_go_on_where_they_were():
    draws()
    state = rng_state()
    expected = draws()
    draws()
    set_rng_state(state)
    assert draws() == expected


def test_random_states_may_have_become_lists_and_arrays_on_their_way():
    state = rng_state()
    expected = draws()
    kind, keys, *rest = state["numpy"]
    through = json.loads(
        json.dumps({"python": state["python"], "numpy": [kind, keys.tolist(), *rest]})
    )
    set_rng_state(through)
    assert draws() == expected


def test_a_copy_stays_as_it_was_and_has_no_tensors():
    variable, array = tf.Variable([1.0, 2.0]), np.ones(2)
    tree = {"a": [variable, (array, {1})], "constant": tf.constant(3), "text": "x"}
    copied = copied_tree(tree)
    variable.assign([0.0, 0.0])
    array[:] = 0
    tree["a"][1][1].add(2)
    assert type(copied["a"][0]) is np.ndarray
    assert copied["a"][0].tolist() == [1, 2]
    assert copied["a"][1][0].tolist() == [1, 1]
    assert copied["a"][1][1] == {1}
    assert (int(copied["constant"]), copied["text"]) == (3, "x")


def test_numbers_of_numpy_keep_their_types():
    found = copied_tree([np.float32(0.5), np.array(3)])
    assert [type(each) for each in found] == [np.float32, np.ndarray]


def test_what_cannot_be_copied_is_left_to_the_file_to_refuse():
    lock = threading.Lock()
    assert copied_tree({"lock": lock})["lock"] is lock
