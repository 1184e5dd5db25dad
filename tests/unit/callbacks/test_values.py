"""Metrics and configs as plain values."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raysgd.callbacks.values import jsonable, scalars

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=8,
)


def refuse(name):
    raise AssertionError(f"{name} is no JSON")


@settings(max_examples=30)
@given(JSON)
def test_what_json_has_comes_back_as_it_was(value):
    def texts(held):
        """Infinities, which JSON has not, are texts."""
        if isinstance(held, dict):
            return {key: texts(each) for key, each in held.items()}
        if isinstance(held, list):
            return [texts(each) for each in held]
        return str(held) if isinstance(held, float) and math.isinf(held) else held

    shown = json.loads(json.dumps(jsonable(value)), parse_constant=refuse)
    assert shown == texts(value)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (torch.tensor(2.5), 2.5),
        (torch.tensor([3]), 3),
        (torch.tensor(1.5, dtype=torch.bfloat16), 1.5),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.array([[4.0]]), 4.0),
        (np.longdouble(1.5), 1.5),
        (np.str_("text"), "text"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_numbers_and_strings_of_any_library_become_python_types(value, plain):
    found = jsonable({"value": value})["value"]
    assert (found, type(found)) == (plain, type(plain))
    assert scalars({"value": value}) == {"value": plain}


def test_not_a_number_is_a_text_in_json_and_a_number_in_metrics():
    assert jsonable([float("nan"), math.inf]) == ["nan", "inf"]
    assert math.isnan(scalars({"loss": float("nan")})["loss"])


@pytest.mark.parametrize(
    "value", [object(), {1}, b"bytes", 1j, np.clongdouble(1), torch.zeros(2), {1: "number as key"}]
)
def test_other_types_are_left_out_of_metrics_and_rejected_by_jsonable(value):
    with pytest.raises(TypeError, match="JSON cannot"):
        jsonable([value])
    if not isinstance(value, dict):
        assert scalars({"a": value, "b": 1}) == {"b": 1}
