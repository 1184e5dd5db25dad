"""Each token but the first is a target once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raysgd.operators.token_windows import TokenWindows


@given(st.integers(2, 60), st.integers(1, 20))
def test_targets_are_the_text_without_its_first_token_and_inputs_come_before(size, length):
    windows = TokenWindows(torch.arange(size), length)
    samples = [windows[index] for index in range(len(windows))]
    targets = torch.cat([target for _, target in samples])
    inputs = torch.cat([tokens for tokens, _ in samples])
    counts = targets != -100
    assert targets[counts].tolist() == list(range(1, size))
    assert inputs[counts].tolist() == list(range(size - 1))
    assert {tuple(t.shape) for sample in samples for t in sample} == {(length,)}


def test_it_ends():
    windows = TokenWindows(torch.arange(5), 2)
    assert len(list(windows)) == 2
    with pytest.raises(IndexError, match="2"):
        windows[2]
