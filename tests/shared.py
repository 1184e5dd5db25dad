"""Trainers that the tests of a module share, since starting workers is what takes time."""

from tests.conftest import wait_until


class Shared:
    """A trainer that is put back to its start before each test.

    Args:
        trainer: it has just started, with all of its workers.
        folder: where tests leave orders for the workers; it is emptied before each test.
    """

    def __init__(self, trainer, folder=None):
        self.trainer = trainer
        self.folder = folder
        self.start = trainer.state_dict()
        self.num_before = 0

    def fresh(self):
        """Have all workers again, and the state of the start."""
        for path in self.folder.iterdir() if self.folder else ():
            path.unlink()
        make_whole(self.trainer)
        self.trainer.load_state_dict(self.start)
        self.num_before = len(self.trainer.events)
        return self

    @property
    def events(self):
        """What happened since."""
        return self.trainer.events[self.num_before :]

    @property
    def kinds(self):
        return [event.kind for event in self.events]


def make_whole(trainer):
    """Train until lost workers are replaced."""
    if trainer.num_workers < trainer.max_workers:
        wait_until(lambda: trainer.train(num_steps=1) and is_whole(trainer), timeout_s=60)


def is_whole(trainer):
    return trainer.num_workers == trainer.max_workers
