"""Large values on connections between the driver and its workers."""

import contextlib
import pickle
import socket
import struct

import numpy as np
import pytest

from raysgd.checkpoint.manifest import HashingFile
from raysgd.cluster import large_values
from raysgd.cluster.serialization import pack
from raysgd.cluster.worker import Worker
from raysgd.comm import connection
from raysgd.comm.connection import Address
from raysgd.comm.network import LOOPBACK
from tests.conftest import wait_until
from tests.unit.cluster.test_worker import FakeRunner

LARGE = 20_000_001


def make(size):
    return {"a": np.arange(size, dtype=np.uint8), "b": "text", "c": [np.ones((100, 101)).T]}


@pytest.mark.parametrize("size", [10, LARGE])
def test_an_answer_passes_through_the_inbox_if_it_is_large(size):
    worker = Worker()
    worker.runner = FakeRunner()
    worker.runner.handle = make
    with large_values.Inbox([LOOPBACK]) as inbox:
        outcome = worker.handle(size, inbox.expect())
    assert isinstance(outcome.payload, Address) == (size == LARGE)
    outcome.payload = inbox.resolve(outcome.payload)
    np.testing.assert_equal(outcome.unpack(), make(size))
    outcome.unpack()["a"][0] = 1  # belongs to the caller


def write_all(file):
    file.write(bytes(2 * LARGE))


def write_a_part(file):
    file.write(bytes(LARGE))
    raise ValueError("odd")


def write_file(write, file):
    """Let a worker write a file of the driver, and return the driver's answer."""
    worker = Worker()
    worker.runner = FakeRunner()
    worker.runner.handle = lambda request: large_values.FileContent(write, {"epoch": 3})
    with large_values.Inbox([LOOPBACK], file.restart) as inbox:
        outcome = worker.handle(None, inbox.expect())
    outcome.payload = inbox.resolve(outcome.payload)
    return outcome.unpack()


def test_a_second_attempt_replaces_what_the_first_has_written(tmp_path):
    with open(tmp_path / "file", "xb+") as file:
        hashing = HashingFile(file)
        assert str(write_file(write_a_part, hashing)) == "odd"
        assert write_file(write_all, hashing) == {"epoch": 3}
        assert file.seek(0, 2) == 2 * LARGE


def test_a_full_disk_is_an_error_of_the_driver():
    with open("/dev/full", "wb", buffering=0) as file:
        hashing = HashingFile(file)
        hashing.restart = lambda: hashing  # a device cannot be truncated
        with pytest.raises(large_values.StorageError, match="No space left on device"):
            write_file(write_all, hashing)


def test_a_lost_driver_is_an_error_of_a_value_that_is_still_to_come():
    with large_values.serve_value(pack(make(LARGE)), [LOOPBACK]) as address:
        found = large_values.IncomingValue(address)
    with contextlib.closing(found), pytest.raises((EOFError, ConnectionError)):
        found.receive()


def test_a_lost_worker_is_no_error_of_the_disk():
    with (
        large_values.Inbox([LOOPBACK], large_values.unnamed_file) as inbox,
        connection.connect(inbox.expect(), 9) as worker,
    ):
        worker.sendall(connection.add_length(pickle.dumps((b"", [LARGE]))) + bytes(10))
        worker.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        worker.close()  # an error for the driver
        wait_until(lambda: not inbox._listener._connections)
