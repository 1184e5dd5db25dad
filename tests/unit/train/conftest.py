"""What several tests of functions need."""

import pytest

from raysgd._internal.context import WorkerContext
from raysgd.train import session
from raysgd.train.session import Plan, Session


class Taken:
    """Stands in for the handover: takes everything at once."""

    def __init__(self):
        self.turns = []
        self.safe = []
        self.waited = []

    def put(self, turn):
        self.turns.append(turn)

    def put_safely(self, turn):
        self.turns.append(turn)
        self.safe.append(turn)

    def until_dealt_with(self, turn, timeout_s=None):
        self.waited.append(turn)


@pytest.fixture
def run():
    """Enter a session; it is left when the test ends."""
    entered = []

    def enter(rank=0, size=2, shards=None, encode=None, **planned):
        context = WorkerContext(world_rank=rank, world_size=size, local_rank=rank)
        taken = Taken()
        running = Session(Plan("one", b"", **planned), context, taken, shards, encode)
        session.enter(running)
        entered.append(running)
        return taken

    yield enter
    for running in entered:
        session.leave(running)
