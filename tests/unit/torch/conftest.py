"""Fixtures for the PyTorch tests."""

import pytest

from tests.unit.torch.cases import processes

MOST_WORKERS = 4


@pytest.fixture(scope="module")
def workers():
    """Return a function that plays a case and returns the result of each worker."""
    with processes(MOST_WORKERS) as run:
        yield run
