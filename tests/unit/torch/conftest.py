"""Fixtures for the PyTorch tests."""

import gc

import pytest

from raysgd._internal.context import WorkerContext
from raysgd.backends import create_backend
from tests.unit.torch.cases import processes

MOST_WORKERS = 4


@pytest.fixture
def process_group():
    """Create a gloo process group with one worker."""
    backend = create_backend("gloo", 30)
    context = WorkerContext(distributed=True)
    backend.setup(context, backend.prepare(["127.0.0.1"]))
    yield
    backend.teardown()
    backend.close()
    gc.collect()  # a wrapper in a reference cycle keeps the threads of its group; forks would hang


@pytest.fixture(scope="module")
def workers():
    """Return a function that plays a case and returns the result of each worker."""
    with processes(MOST_WORKERS) as run:
        yield run
