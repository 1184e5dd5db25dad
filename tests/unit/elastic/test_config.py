"""ElasticConfig: defaults and invalid values."""

import dataclasses
import math

import pytest

from raysgd import ElasticConfig

DEFAULTS = {
    "shares": "even",
    "max_attempts": 10,
    "initial_s": 1.0,
    "max_s": 60.0,
    "resize_cooldown_s": 10.0,
    "driver_grace_s": 60.0,
    "grow": True,
    "snapshot_every": "auto",
    "global_batch": "keep",
}


def test_the_defaults_are_as_promised():
    config = ElasticConfig()
    assert dataclasses.asdict(config) == DEFAULTS
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.grow = False
    with pytest.raises(TypeError, match="positional"):
        ElasticConfig("even")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_attempts", 1),
        ("initial_s", 0),
        ("max_s", 0),
        ("resize_cooldown_s", 0),
        ("snapshot_every", 1),
        ("snapshot_every", "epoch"),
        ("snapshot_every", None),
        ("global_batch", "scale"),
    ],
)
def test_the_ends_of_each_range_are_allowed(name, value):
    assert getattr(ElasticConfig(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("max_attempts", (0,), "must be"),
        ("initial_s", (-0.1, math.inf, math.nan), "must be"),
        ("max_s", (-1, math.inf, math.nan), "must be"),
        ("resize_cooldown_s", (-1, math.inf, math.nan), "must be"),
        ("driver_grace_s", (-1, math.inf, math.nan), "must be"),
        ("snapshot_every", (0, -5), "must be"),
        ("snapshot_every", ("step", "EPOCH"), 'must be "auto", "epoch", a number of steps, or No'),
        ("global_batch", ("keeps", None), "must be"),
    ],
)
def test_a_value_out_of_its_range_is_an_error(name, values, says):
    for value in values:
        with pytest.raises(ValueError, match=rf"ElasticConfig\({name}={value!r}\): {says}"):
            ElasticConfig(**{name: value})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_attempts", (None, 1.5, "1", True)),
        ("initial_s", (None, "1", True, [1.0], 1j)),
        ("grow", (None, 1)),
        ("snapshot_every", (True, 2.5, [3], b"epoch")),
    ],
)
def test_a_value_of_another_type_is_an_error(name, values):
    for value in values:
        with pytest.raises(TypeError, match=rf"ElasticConfig\({name}=.*\): must be"):
            ElasticConfig(**{name: value})
