"""Fixtures of the unit tests, which do not start Ray."""

import gc

import pytest

from raysgd._internal.runner import WorkerContext
from raysgd.backends import create_backend
from tests.operators import Classifier, local

SMALL = {"num_samples": 40, "batch_size": 8}
"""Config for epochs of five batches."""


@pytest.fixture
def process_group():
    """Create a gloo process group with one worker."""
    backend = create_backend("gloo", 30)
    context = WorkerContext(has_process_group=True)
    backend.setup(context, backend.create_rendezvous(["127.0.0.1"]))
    yield
    gc.collect()  # first: a wrapper in a cycle keeps threads, at which forks or collections hang
    backend.teardown()
    backend.close()


@pytest.fixture
def make_trainer():
    """A factory of trainers whose only worker is this process, on CPU."""
    made = []

    def make(operator_cls=Classifier, config=None, **arguments):
        made.append(local(operator_cls, {**SMALL, **(config or {})}, num_workers=1, **arguments))
        return made[-1]

    yield make
    for trainer in made:
        trainer.shutdown()


@pytest.fixture
def board(monkeypatch):
    """A function that reads a folder as TensorBoard does."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # TensorBoard sorts the files of one second by name, and would read file 10 before file 9
    number = event_file_writer.AtomicCounter(1000)
    monkeypatch.setattr(event_file_writer, "_global_uid", number)

    def read(folder):
        accumulator = EventAccumulator(str(folder))
        accumulator.Reload()
        return accumulator

    return read
