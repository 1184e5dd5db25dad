"""Writing behind: in order, one at a time, and no failure goes by unsaid."""

import re
import subprocess
import sys
import threading

import pytest

from raysgd.checkpoint import BackgroundWriter, read_file
from raysgd.errors import CheckpointError
from tests.conftest import wait_until
from tests.unit.checkpoint.states import step_of


class Gate:
    """A write that waits until it is let go."""

    def __init__(self):
        self.begun = threading.Event()
        self.go = threading.Event()

    def __call__(self):
        self.begun.set()
        assert self.go.wait(30)


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.go.set()


def fail():
    raise CheckpointError("Cannot save to there: the disk is full")


def threads():
    return [t for t in threading.enumerate() if t.name.startswith("raysgd-checkpoint-writer")]


def test_write_runs_in_the_background(gate):
    writer = BackgroundWriter()
    writer.submit(gate, "there")
    assert gate.begun.wait(10)
    gate.go.set()
    writer.wait()
    wait_until(lambda: not threads())


def test_next_write_waits_for_the_previous_one(gate):
    writer, order = BackgroundWriter(), []
    writer.submit(lambda: (gate(), order.append("first")), "first")
    submitted = threading.Event()

    def submit():
        writer.submit(lambda: order.append("second"), "second")
        submitted.set()

    thread = threading.Thread(target=submit)
    thread.start()
    assert gate.begun.wait(10)
    assert not submitted.is_set()
    assert len(threads()) == 1
    gate.go.set()
    thread.join(10)
    writer.wait()
    assert order == ["first", "second"]


def test_after_a_failure_the_next_write_is_refused_and_the_one_after_is_not():
    writer, done = BackgroundWriter(), []
    writer.submit(fail, "there")
    with pytest.raises(CheckpointError, match="disk is full"):
        writer.submit(lambda: done.append(1), "there")
    assert done == []
    writer.submit(lambda: done.append(2), "there")
    writer.wait()
    assert done == [2]


def test_any_other_error_names_the_path():
    def break_down():
        raise MemoryError("no room")

    writer = BackgroundWriter()
    writer.submit(break_down, "over/there")
    with pytest.raises(CheckpointError, match=r"over/there.*no room") as caught:
        writer.wait()
    assert isinstance(caught.value.__cause__, MemoryError)


SCRIPT = """
import sys
from raysgd.checkpoint import BackgroundWriter, write_file
from tests.unit.checkpoint.states import state_at

writer, folder = BackgroundWriter(), sys.argv[1]
writer.submit(lambda: write_file(state_at(3), folder + "/state.pt"), "state.pt")
another = BackgroundWriter()
another.submit(lambda: write_file(state_at(3), folder), folder)
"""


def test_a_script_that_ends_does_not_lose_its_write(tmp_path):
    command = [sys.executable, "-W", "error", "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert step_of(read_file(tmp_path / "state.pt")) == 3
    assert re.fullmatch("Could not write a checkpoint: .* Is a directory.*", done.stderr.strip())
