"""Fixtures for the PyTorch tests."""

import pytest

from tests.unit.torch.cases import processes

MAX_WORKERS = 4


@pytest.fixture(scope="module")
def workers():
    """Return a function that plays a case and returns the result of each worker."""
    with processes(MAX_WORKERS) as run:
        yield run
