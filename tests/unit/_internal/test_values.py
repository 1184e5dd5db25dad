"""Metrics and configs as plain values."""

import math
from decimal import Decimal

import numpy as np
import pytest
import torch

from raysgd._internal.values import flatten_scalars, to_jsonable


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
        (Decimal("0.5"), 0.5),
        (np.str_("text"), "text"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_numbers_and_strings_of_any_library_become_python_types(value, plain):
    found = to_jsonable({"value": value})["value"]
    assert (found, type(found)) == (plain, type(plain))
    assert flatten_scalars({"value": value}) == {"value": plain}


def test_not_a_number_is_a_text_in_json_and_a_number_in_metrics():
    assert to_jsonable([float("nan"), 10**400, -(10**400)]) == ["nan", "inf", "-inf"]
    assert math.isnan(flatten_scalars({"loss": float("nan")})["loss"])


@pytest.mark.parametrize(
    "value", [object(), {1}, b"bytes", 1j, np.clongdouble(1), torch.zeros(2), {1: "number as key"}]
)
def test_other_types_are_left_out_of_metrics_and_rejected_by_jsonable(value):
    with pytest.raises(TypeError, match="JSON cannot"):
        to_jsonable([value])
    if not isinstance(value, dict):
        assert flatten_scalars({"a": value, "b": 1}) == {"b": 1}
