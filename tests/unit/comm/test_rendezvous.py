"""The store of a generation, with real sockets and threads."""

import asyncio
import datetime
import pickle
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from raysgd.comm import rendezvous as store_module
from raysgd.comm.connection import Address, add_length, connect, read
from raysgd.comm.rendezvous import StoreServer
from raysgd.comm.torch import TorchStore
from tests.conftest import examples

SHORT = datetime.timedelta(seconds=0.1)
LONG = datetime.timedelta(seconds=30)


@pytest.fixture
def server():
    server = StoreServer("127.0.0.1")
    yield server
    server.close()


@pytest.fixture
def client(server):
    return TorchStore(server.address, LONG)


def waiting_for(client, keys):
    """Start a wait in a thread, and return its future when the wait has begun."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(client.wait, keys, LONG)
    pool.shutdown(wait=False)
    while not client._client._lock.locked() and not future.done():
        time.sleep(0.001)
    return future


keys = st.sampled_from(["a", "b", "ключ\n"])


@examples(60)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("set"), keys, st.binary(max_size=20)),
            st.tuples(st.just("check"), st.lists(keys)),
        )
    )
)
def test_a_store_does_what_a_store_of_pytorch_does(operations):
    ours = StoreServer("127.0.0.1")
    client, reference = TorchStore(ours.address, LONG), dist.HashStore()
    try:
        for name, *arguments in operations:
            assert getattr(client, name)(*arguments) == getattr(reference, name)(*arguments)
        for key in ["a", "b", "ключ\n"]:
            if reference.check([key]):
                assert client.get(key) == reference.get(key)
    finally:
        ours.close()


def test_a_wait_ends_when_another_client_has_set_the_last_key(server, client):
    waits = waiting_for(client, ["a", "b"])
    other = TorchStore(server.address, LONG)
    other.set("a", "1")
    assert not waits.done()
    other.set("c", b"\xff\x00")
    other.set("b", "2")
    waits.result(10)
    assert client.multi_get(["a", "b", "c"]) == [b"1", b"2", b"\xff\x00"]


def test_a_key_that_does_not_come_is_named(client):
    client.set_timeout(SHORT)
    with pytest.raises(dist.DistStoreError, match=r"here/1, missing within 0\.1 s"):
        client.multi_get(["here/1", "missing"])
    client.set("missing", "found")  # the connection still works
    assert client.get("missing") == b"found"


def test_closing_the_store_ends_the_waits_and_refuses_replacements(server, client):
    waits = waiting_for(client, ["never"])
    server.close()
    with pytest.raises(dist.DistNetworkError, match="has ended"):
        waits.result(10)
    with pytest.raises(dist.DistNetworkError, match=r"cannot be reached.*has ended"):
        TorchStore(server.address, LONG)
    server.close()


def test_a_client_with_many_requests_holds_no_other_up(server, client):
    client.add("count", 0)
    with connect(server.address, 10) as busy:
        busy.sendall(add_length(pickle.dumps(("add", "count", 1))) * 50_000)
        assert client.add("count", 0) < 50_000


def test_an_invalid_request_closes_only_its_own_connection(server, client, caplog):
    for request in [["unknown"], ["set", "a"], "text", [], ["add", "a", "b"], ["check", 3]]:
        with connect(server.address, 10) as other, other.makefile("rb") as answers:
            other.sendall(add_length(pickle.dumps(request)))
            with pytest.raises(EOFError):
                read(answers)
    assert not client.check(["a"])
    assert "closed because of an error" in caplog.text


def test_requests_to_a_silent_server_time_out(server, client, monkeypatch):
    monkeypatch.setattr(store_module, "_ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address(*silent.getsockname(), "key")
        with pytest.raises(dist.DistNetworkError, match=r"cannot be reached \(timed out\)"):
            TorchStore(address, LONG)
    monkeypatch.setattr(server, "_operations", {"get": lambda *_: asyncio.sleep(20)})
    with pytest.raises(dist.DistNetworkError, match=r"did not answer for 0\.3 s"):
        client.wait(["a"], SHORT)
