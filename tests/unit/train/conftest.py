"""Fixtures for tests of training functions."""

import pytest

from raysgd._internal.context import WorkerContext
from raysgd.train.worker_session import Plan, Session, here


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
        here.context = WorkerContext(world_rank=rank, world_size=size, local_rank=rank)
        queue = FakeQueue()
        here.session, here.shards = Session(Plan("one", b"", **planned), queue), shards
        here.accelerator = here.seed = None
        return queue

    yield enter
    here.session = here.context = here.shards = None
