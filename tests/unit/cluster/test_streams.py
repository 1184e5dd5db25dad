"""Large values on connections between the driver and its workers."""

import numpy as np
import pytest

from raysgd.cluster import streams
from raysgd.cluster.serialization import pack
from raysgd.cluster.worker import Worker
from raysgd.comm.network import LOOPBACK
from tests.unit.cluster.test_worker import FakeRunner

LARGE = 20_000_001


def make(size):
    return {"a": np.arange(size, dtype=np.uint8), "b": "text", "c": [np.ones((100, 101)).T]}


@pytest.mark.parametrize("size", [10, LARGE])
def test_an_answer_passes_through_the_inbox_if_it_is_large(size):
    worker = Worker()
    worker.runner = FakeRunner()
    worker.runner.handle = make
    with streams.Inbox([LOOPBACK], streams.ReceivedValue) as inbox:
        outcome = worker.call(size, inbox.address)
    assert isinstance(outcome.payload, streams.Ticket) == (size == LARGE)
    outcome.payload = inbox.take(outcome.payload)
    np.testing.assert_equal(outcome.value(), make(size))
    outcome.value()["a"][0] = 1  # belongs to the caller


def test_a_worker_receives_arrays_in_their_places():
    expected, place = make(LARGE), np.zeros(LARGE, np.uint8)
    with (
        streams.offered(pack({"c": expected["c"], **expected}), [LOOPBACK]) as address,
        streams.incoming(address) as found,
    ):
        at = found.value["a"].ctypes.data
        assert at in found.addresses
        found.fill({at: place}, before=True)
        np.testing.assert_equal(found.value["c"], expected["c"])
        assert not place.any()
        found.fill({at: place})
    assert np.array_equal(place, expected["a"])
    assert not np.array_equal(found.value["a"], expected["a"])


def test_a_lost_driver_is_an_error_of_a_value_that_is_still_to_come():
    with streams.offered(pack(make(LARGE)), [LOOPBACK]) as address:
        connection = streams.incoming(address)
        found = connection.__enter__()
    with pytest.raises((EOFError, ConnectionError)):
        found.fill({})
    connection.__exit__(None, None, None)
