"""Fixtures for the PyTorch tests."""

import pytest

from raysgd._internal.context import WorkerContext
from raysgd.backends import create_backend


@pytest.fixture
def process_group():
    """Create a gloo process group with one worker."""
    backend = create_backend("gloo", 30)
    context = WorkerContext(distributed=True)
    backend.setup(context, backend.prepare(["127.0.0.1"]))
    yield
    backend.teardown()
    backend.close()
