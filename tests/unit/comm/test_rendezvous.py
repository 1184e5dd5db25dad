"""The store of a generation, with real sockets and threads."""

import contextlib
import datetime
import errno
import gc
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from raysgd.comm import rendezvous as store_module
from raysgd.comm.gloo import GlooGroup
from raysgd.comm.rendezvous import StoreAddress, StoreServer
from raysgd.comm.torch_store import TorchStore
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
    """Start a wait in a thread, and return its future once the store has been asked."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(client.wait, keys, LONG)
    pool.shutdown(wait=False)
    while not client._client._lock.locked() and not future.done():
        time.sleep(0.001)
    return future


def test_one_that_nobody_closes_keeps_no_process_alive(server):
    assert server._thread.daemon


keys = st.sampled_from(["a", "b", "ключ\n"])
values = st.binary(max_size=20)
numbers = st.integers(-(2**40), 2**40)


@examples(60)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("set"), keys, values),
            st.tuples(st.just("append"), keys, values),
            st.tuples(st.just("compare_set"), keys, values, values),
            st.tuples(st.just("delete_key"), keys),
        )
    )
)
def test_a_store_does_what_torchs_own_does(operations):
    ours = StoreServer("127.0.0.1")
    client, reference = TorchStore(ours.address, LONG), dist.HashStore()
    try:
        for name, *arguments in operations:
            if name == "compare_set" and not arguments[1] and not reference.check([arguments[0]]):
                continue  # torch's stores do not agree here
            assert getattr(client, name)(*arguments) == getattr(reference, name)(*arguments)
        for key in ["a", "b", "ключ\n"]:
            assert client.check([key]) == reference.check([key])
            if reference.check([key]):
                assert client.get(key) == reference.get(key)
        assert client.num_keys() == reference.num_keys()
    finally:
        ours.close()


@examples(20)
@given(st.lists(numbers, min_size=1, max_size=5))
def test_numbers_are_added_up(amounts):
    server = StoreServer("127.0.0.1")
    client = TorchStore(server.address, LONG)
    assert [client.add("n", amount) for amount in amounts][-1] == sum(amounts)
    assert client.get("n") == str(sum(amounts)).encode()
    server.close()


def test_a_wait_ends_when_another_client_has_set_the_last_key(server, client):
    waits = waiting_for(client, ["a", "b"])
    other = TorchStore(server.address, LONG)
    other.set("a", "1")
    assert not waits.done()
    other.multi_set(["b", "c"], ["2", b"\xff\x00"])
    waits.result(10)
    assert client.multi_get(["a", "b", "c"]) == [b"1", b"2", b"\xff\x00"]


def test_a_key_that_does_not_come_is_named(client):
    with pytest.raises(dist.DistStoreError, match=r"Waited 0\.1 s.*here/1"):
        client.wait(["here/0", "here/1"], SHORT)
    client.set_timeout(SHORT)
    with pytest.raises(dist.DistStoreError, match="missing"):
        client.get("missing")
    client.set("missing", "found")  # the connection is as good as before
    assert client.get("missing") == b"found"


def test_a_deleted_key_is_waited_for_again(client):
    client.set("a", "1")
    assert client.delete_key("a")
    assert not client.delete_key("a")
    with pytest.raises(dist.DistStoreError):
        client.wait(["a"], SHORT)


def test_closing_the_store_ends_the_waits_and_refuses_replacements(server, client):
    waits = waiting_for(client, ["never"])
    server.close()
    with pytest.raises(dist.DistNetworkError, match="given up"):
        waits.result(10)
    with pytest.raises(dist.DistNetworkError, match=r"cannot be reached.*given up"):
        TorchStore(server.address, LONG)
    server.close()
    assert not server._thread.is_alive()


def test_closing_the_store_ends_connections_that_have_just_come():
    """At whatever point the store is with them; a garbage collection would end them too late."""
    gc.disable()
    try:
        for delay_s in np.linspace(0, 0.003, 100):
            server = StoreServer("127.0.0.1")
            come = [socket.create_connection(server.address[:2], 10) for _ in range(3)]
            until = time.perf_counter() + delay_s
            while time.perf_counter() < until:
                pass
            server.close()
            for connection in come:
                with connection, contextlib.suppress(ConnectionResetError):
                    assert connection.recv(1) == b""
    finally:
        gc.enable()


def test_closing_the_store_ends_what_forked_processes_have_too(server, client):
    """As the processes of a DataLoader have it where the driver is a worker."""
    waits = waiting_for(client, ["never"])
    held = [os.dup(each.fileno()) for each in (server._listener, *server._talks)]
    assert len(held) == 2
    server.close()
    with pytest.raises(dist.DistNetworkError, match="given up"):
        waits.result(10)
    with pytest.raises(ConnectionError):
        socket.create_connection(server.address[:2], 10)
    for descriptor in held:
        os.close(descriptor)


def test_a_client_with_many_requests_holds_no_other_up(server, client):
    client.add("count", 0)
    with socket.create_connection(server.address[:2], 10) as busy:
        requests = [["hello", server.address.token], *[["add", "count", 1]] * 50_000]
        busy.sendall(b"".join(json.dumps(request).encode() + b"\n" for request in requests))
        assert client.add("count", 0) < 50_000


def test_a_store_without_a_descriptor_accepts_when_it_has_one(monkeypatch):
    class Full(socket.socket):
        failures = 0

        def accept(self):
            if self.failures < 3:
                self.failures += 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    create_server = socket.create_server
    monkeypatch.setattr(
        socket, "create_server", lambda *a, **k: Full(fileno=create_server(*a, **k).detach())
    )
    monkeypatch.setattr(store_module, "_RETRY_S", 0.05)
    server = StoreServer("127.0.0.1")
    try:
        TorchStore(server.address, LONG).set("a", "1")
        assert server._listener.failures == 3
    finally:
        server.close()


def test_interrupting_a_client_ends_its_wait_and_no_others(server, client):
    other = TorchStore(server.address, LONG)
    waits, others_wait = waiting_for(client, ["never"]), waiting_for(other, ["later"])
    client.interrupt()
    with pytest.raises(dist.DistNetworkError):
        waits.result(10)
    with pytest.raises(dist.DistNetworkError):
        client.set("a", "1")
    TorchStore(server.address, LONG).set("later", "")
    others_wait.result(10)


def test_who_does_not_know_the_token_gets_no_answer(server):
    wrong = StoreAddress(server.address.host, server.address.port, "guess")
    with pytest.raises(dist.DistNetworkError):
        TorchStore(wrong, LONG)
    for line in [b"\n", b"GET / HTTP/1.1\r\n", b"\xff\xfe\n", b"[]\n", b""]:
        with socket.create_connection(server.address[:2], 10) as stranger:
            stranger.sendall(line)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100) == b""


def test_a_client_of_torchs_own_store_is_turned_away(server):
    """Code may read MASTER_ADDR and MASTER_PORT."""
    with pytest.raises(RuntimeError):
        dist.TCPStore(*server.address[:2], is_master=False, timeout=datetime.timedelta(seconds=0.5))


def test_a_request_that_is_none_ends_that_connection_alone(server, client):
    for request in [["unknown"], ["set", "a"], "text", [], ["add", "a", "b"], ["check", 3]]:
        with socket.create_connection(server.address[:2], 10) as stranger:
            answers = stranger.makefile("rb")
            stranger.sendall(json.dumps(["hello", server.address.token]).encode() + b"\n")
            assert answers.readline() == b"[true]\n"
            stranger.sendall(json.dumps(request).encode() + b"\n")
            assert answers.readline() == b""
    assert client.num_keys() == 0


def test_a_server_that_does_not_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(store_module, "_ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = StoreAddress(*silent.getsockname(), "token")
        with pytest.raises(dist.DistNetworkError, match=r"did not answer for 0\.2 s"):
            TorchStore(address, LONG)


def test_gloo_and_groups_of_the_users_own_meet_through_it(server):
    """torch calls it from C++, by names of its own."""

    def work(rank):
        store = TorchStore(server.address, LONG)
        group = dist.ProcessGroupGloo(dist.PrefixStore("own", store), rank, 2, LONG)
        tensor = torch.full((3,), float(rank + 1))
        group.allreduce([tensor]).wait()
        return store, tensor.tolist()

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(work, range(2)))
    assert [values for _, values in results] == [[3, 3, 3]] * 2
    through_torch = dist.PrefixStore("p", results[0][0])
    through_torch.set("a", "1")
    assert through_torch.add("n", 2) == 2
    assert through_torch.multi_get(["a", "n"]) == [b"1", b"2"]
    assert through_torch.check(["a"])
    assert through_torch.compare_set("a", "1", "2") == b"2"
    assert through_torch.num_keys() == results[0][0].num_keys()
    assert through_torch.delete_key("a")


def test_a_group_that_waits_for_a_peer_is_woken_by_closing_the_store(server):
    """The peer died between the barrier and gloo's own meeting."""
    store = TorchStore(server.address, LONG)
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(GlooGroup, store, 0, 2, LONG)
        observer = TorchStore(server.address, LONG)
        while observer.num_keys() == 0:
            time.sleep(0.001)
        server.close()
        with pytest.raises(Exception, match="given up"):
            made.result(10)


def test_many_workers_meet(server):
    everyone = [f"here/{rank}" for rank in range(40)]

    def come(rank):
        client = TorchStore(server.address, LONG)
        client.set(everyone[rank], "")
        client.wait(everyone, LONG)
        return client.add("count", 1)

    with ThreadPoolExecutor(40) as pool:
        assert sorted(pool.map(come, range(40))) == list(range(1, 41))


def test_a_store_leaves_no_thread_and_no_descriptor():
    def use():
        server = StoreServer("127.0.0.1")
        client = TorchStore(server.address, LONG)
        client.set("a", "1")
        server.close()

    use()
    before = len(os.listdir("/dev/fd")), threading.active_count()
    for _ in range(20):
        use()
    assert len(os.listdir("/dev/fd")) <= before[0]
    assert threading.active_count() <= before[1]
