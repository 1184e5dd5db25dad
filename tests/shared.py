"""Trainers that the tests of a module share, because starting workers takes seconds."""

from tests.conftest import wait_until


class Shared:
    """A trainer that returns to its initial state before each test.

    Args:
        trainer: a trainer that has just started, with all of its workers.
        folder: contains the orders of a test to the workers; emptied before each test.
    """

    def __init__(self, trainer, folder=None):
        self.trainer = trainer
        self.folder = folder
        self.start = trainer.state_dict()
        self.num_before = 0

    def fresh(self):
        """Empty the folder, replace lost workers, and restore the initial state."""
        for path in self.folder.iterdir() if self.folder else ():
            path.unlink()
        make_whole(self.trainer)
        self.trainer.load_state_dict(self.start)
        self.num_before = len(self.trainer.events)
        return self

    @property
    def events(self):
        """The events since the last `fresh`."""
        return self.trainer.events[self.num_before :]

    @property
    def kinds(self):
        """The kinds of these events."""
        return [event.kind for event in self.events]


def make_whole(trainer):
    """Train until lost workers are replaced."""
    if trainer.num_workers < trainer.max_workers:
        wait_until(
            lambda: trainer.train(num_steps=1) and trainer.num_workers == trainer.max_workers,
            timeout_s=60,
        )
