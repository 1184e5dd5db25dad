"""What to do about losses: defaults, and values that make no sense."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd import ElasticConfig

DEFAULTS = {
    "min_workers": None,
    "max_attempts": 10,
    "initial_s": 1.0,
    "factor": 2.0,
    "max_s": 60.0,
    "jitter": 0.1,
    "resize_cooldown_s": 10.0,
    "hang_timeout_s": None,
    "driver_grace_s": 60.0,
    "in_place": True,
    "grow": True,
    "snapshot_every": "epoch",
    "global_batch": "keep",
}


def test_the_defaults_are_as_promised():
    assert dataclasses.asdict(ElasticConfig()) == DEFAULTS


def test_a_config_cannot_be_changed():
    config = ElasticConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.grow = False
    assert config.grow
    assert hash(config) == hash(ElasticConfig())


def test_values_are_given_by_name():
    with pytest.raises(TypeError):
        ElasticConfig(2)
    with pytest.raises(TypeError, match="min_worker"):
        ElasticConfig(min_worker=2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_workers", None),
        ("min_workers", 1),
        ("max_attempts", 1),
        ("initial_s", 0),
        ("initial_s", 0.5),
        ("factor", 1),
        ("factor", 1.0),
        ("max_s", 0),
        ("jitter", 0),
        ("jitter", 1.0),
        ("resize_cooldown_s", 0),
        ("hang_timeout_s", None),
        ("hang_timeout_s", 0.1),
        ("in_place", False),
        ("grow", False),
        ("snapshot_every", "epoch"),
        ("snapshot_every", 1),
        ("snapshot_every", None),
        ("global_batch", "scale"),
    ],
)
def test_the_ends_of_each_range_are_allowed(name, value):
    assert getattr(ElasticConfig(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_workers", 0),
        ("min_workers", -1),
        ("max_attempts", 0),
        ("initial_s", -0.1),
        ("factor", 0.99),
        ("factor", 0),
        ("max_s", -1),
        ("jitter", -0.1),
        ("jitter", 1.1),
        ("resize_cooldown_s", -1),
        ("hang_timeout_s", -1),
        ("snapshot_every", 0),
        ("snapshot_every", -5),
        ("snapshot_every", "step"),
        ("snapshot_every", "EPOCH"),
        ("global_batch", "keeps"),
        ("global_batch", None),
        *(
            (name, value)
            for name in ("initial_s", "factor", "max_s", "resize_cooldown_s", "hang_timeout_s")
            for value in (math.inf, -math.inf, math.nan)
        ),
        ("jitter", math.nan),
    ],
)
def test_a_value_out_of_its_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"ElasticConfig\({name}={value!r}\): must be"):
        ElasticConfig(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("min_workers", value) for value in (1.5, "1", True, [1])),
        *(("max_attempts", value) for value in (None, 1.5, "1", True)),
        *(
            (name, value)
            for name in ("initial_s", "factor", "max_s", "jitter", "resize_cooldown_s")
            for value in (None, "1", True, [1.0], 1j)
        ),
        *(("hang_timeout_s", value) for value in ("1", True, [1.0])),
        *((name, value) for name in ("in_place", "grow") for value in (None, 0, 1, "yes")),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(name, value):
    with pytest.raises(TypeError, match=rf"ElasticConfig\({name}=.*\): must be"):
        ElasticConfig(**{name: value})


@pytest.mark.parametrize("value", [True, False, 1.0, 2.5, [3], b"epoch"])
def test_a_snapshot_interval_of_another_type_is_refused_by_name(value):
    with pytest.raises((TypeError, ValueError), match=r"ElasticConfig\(snapshot_every=.*\): must"):
        ElasticConfig(snapshot_every=value)


def test_workers_cannot_hang_for_no_time():
    """Every worker would be stuck, and killed, at the first look."""
    with pytest.raises(ValueError, match="hang_timeout_s"):
        ElasticConfig(hang_timeout_s=0)


@given(
    st.sampled_from(["initial_s", "max_s", "resize_cooldown_s", "hang_timeout_s"]),
    st.floats(min_value=1e-6, max_value=1e9) | st.integers(1, 10**9),
)
def test_every_positive_number_of_seconds_is_kept_as_it_is(name, value):
    assert getattr(ElasticConfig(**{name: value}), name) == value
