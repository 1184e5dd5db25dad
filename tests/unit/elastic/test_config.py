"""ElasticConfig: defaults and invalid values."""

import dataclasses
import math
import re

import pytest

from raysgd import ElasticConfig

DEFAULTS = {
    "shares": "even",
    "max_start_attempts": 10,
    "backoff_initial_s": 1.0,
    "backoff_max_s": 60.0,
    "resize_cooldown_s": 10.0,
    "driver_grace_s": 60.0,
    "replace_workers": True,
    "snapshot_every": "auto",
    "global_batch": "keep",
}


def test_the_defaults_are_as_promised():
    config = ElasticConfig()
    assert dataclasses.asdict(config) == DEFAULTS
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.replace_workers = False
    with pytest.raises(TypeError, match="positional"):
        ElasticConfig("even")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_start_attempts", 1),
        ("backoff_initial_s", 0),
        ("backoff_max_s", 0),
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
    ("error", "name", "values", "says"),
    [
        (ValueError, "max_start_attempts", (0,), "must be"),
        (ValueError, "backoff_initial_s", (-0.1, math.inf, math.nan), "must be"),
        (ValueError, "backoff_max_s", (-1, math.inf, math.nan), "must be"),
        (ValueError, "resize_cooldown_s", (-1, math.inf, math.nan), "must be"),
        (ValueError, "driver_grace_s", (-1, math.inf, math.nan), "must be"),
        (ValueError, "snapshot_every", (0, -5), "must be"),
        (ValueError, "snapshot_every", ("step",), 'must be "auto", "epoch", a number of steps, or'),
        (ValueError, "global_batch", ("keeps", None), "must be"),
        (TypeError, "max_start_attempts", (None, 1.5, "1", True), "must be"),
        (TypeError, "backoff_initial_s", (None, "1", True, [1.0], 1j), "must be"),
        (TypeError, "replace_workers", (None, 1), "must be"),
        (TypeError, "snapshot_every", (True, 2.5, [3], b"epoch"), "must be"),
    ],
)
def test_a_value_that_is_not_allowed_is_an_error(error, name, values, says):
    for value in values:
        said = re.escape(f"ElasticConfig({name}={value!r}): {says}")
        with pytest.raises(error, match=said):
            ElasticConfig(**{name: value})
