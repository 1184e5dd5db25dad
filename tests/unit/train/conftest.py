"""Fixtures for tests of training functions."""

import pytest

from raysgd._internal.runner import WorkerContext
from raysgd.train.worker_session import RunSpec, Session, process_state


class FakeQueue:
    """Takes every turn immediately."""

    def __init__(self):
        self.turns = []

    def put(self, turn):
        self.turns.append(turn)


@pytest.fixture
def run():
    """Return a function that enters a session until the test ends, and returns its queue."""

    def enter(rank=0, size=2, shards=None, **planned):
        process_state.context = WorkerContext(world_rank=rank, world_size=size, local_rank=rank)
        queue = FakeQueue()
        process_state.session = Session(RunSpec("one", b"", **planned), queue)
        process_state.datasets, process_state.accelerator, process_state.seed = shards, None, None
        return queue

    yield enter
    process_state.session = process_state.context = process_state.datasets = None
