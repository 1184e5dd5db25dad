"""Counts of epochs and steps in a state that shall be loaded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.errors import CheckpointError
from raysgd.loop.state import check_position

COUNTS = st.integers(0, 10**12)
PLACES = ("epoch", "offset", "validation_offset")


@given(COUNTS, COUNTS, st.fixed_dictionaries({key: COUNTS for key in PLACES}))
def test_counts_are_taken(epoch, global_step, data):
    check_position({"epoch": epoch, "global_step": global_step, "data": data})


def test_older_states_say_less():
    check_position({"epoch": 3})
    check_position({"epoch": 3, "data": None})
    check_position({"epoch": 3, "data": {"epoch": 3, "offset": 0, "rng": "anything"}})


@pytest.mark.parametrize("key", ["epoch", "offset"])
def test_a_place_that_is_cut_off_is_an_error(key):
    data = {"epoch": 3, "offset": 0}
    del data[key]
    with pytest.raises(CheckpointError, match=rf"data\['{key}'\] must be a count.*None"):
        check_position({"epoch": 3, "data": data})


@pytest.mark.parametrize("wrong", [-1, 1.0, True, "1", None, [1], 2**62])
@pytest.mark.parametrize("key", ["epoch", "global_step"])
def test_what_is_no_count_is_named_with_its_value(key, wrong):
    with pytest.raises(CheckpointError) as caught:
        check_position({"epoch": 0, "global_step": 0, key: wrong})
    assert str(caught.value) == f"The state's {key} must be a count, but it is {wrong!r}."


@pytest.mark.parametrize("key", PLACES)
def test_what_is_no_place_in_the_data_is_named(key):
    with pytest.raises(CheckpointError, match=rf"data\['{key}'\] must be a count.*-1"):
        check_position({"epoch": 0, "data": {**dict.fromkeys(PLACES, 0), key: -1}})


@pytest.mark.parametrize("wrong", [[1], {"train": -1}, {"train": "1"}])
def test_seeds_of_loaders_that_are_no_counts_are_an_error(wrong):
    data = {"epoch": 0, "offset": 0, "loader_seeds": {"train": 5}}
    check_position({"epoch": 0, "data": data})
    with pytest.raises(CheckpointError, match=r"data\['loader_seeds'\].* must be a"):
        check_position({"epoch": 0, "data": {**data, "loader_seeds": wrong}})


@pytest.mark.parametrize("data", [3, [1], "text"])
def test_data_that_holds_no_counts_is_an_error(data):
    with pytest.raises(CheckpointError, match="data must be a dict of counts, but it is"):
        check_position({"epoch": 0, "data": data})
