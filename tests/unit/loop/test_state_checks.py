"""Counts of epochs and steps in a state to load."""

import pytest

from raysgd.errors import CheckpointError
from raysgd.loop.state import check_position


@pytest.mark.parametrize("data", [None, {"epoch": 3, "offset": 0, "rng": "anything"}])
def test_older_states_lack_some_counts(data):
    check_position({"epoch": 3, "data": data})


@pytest.mark.parametrize("wrong", [-1, 1.0, True, "1", None, 2**62])
@pytest.mark.parametrize("key", ["epoch", "global_step"])
def test_a_wrong_count_is_named_with_its_value(key, wrong):
    with pytest.raises(CheckpointError) as caught:
        check_position({"epoch": 0, "global_step": 0, key: wrong})
    assert str(caught.value) == f"The state's {key} must be a count, but it is {wrong!r}."


@pytest.mark.parametrize("key", ["epoch", "offset", "validation_offset"])
def test_a_wrong_place_in_the_data_is_named(key):
    with pytest.raises(CheckpointError, match=rf"data\['{key}'\] must be a count.*-1"):
        check_position({"epoch": 0, "data": {"epoch": 0, "offset": 0, key: -1}})


def test_data_must_be_a_dict_with_a_place():
    with pytest.raises(CheckpointError, match="data must be a dict"):
        check_position({"epoch": 0, "data": [1]})
    with pytest.raises(CheckpointError, match=r"data\['offset'\] must be a count.*None"):
        check_position({"epoch": 0, "data": {"epoch": 0}})
