"""The environment of Horovod, its rendezvous, and the error if Horovod is missing."""

import contextlib
import socket
import urllib.request

import pytest

from raysgd._internal.context import WorkerContext
from raysgd.backends import create_backend
from raysgd.comm import horovod as module
from raysgd.comm.horovod import HorovodRendezvous, horovod_environment
from raysgd.comm.network import listeners
from tests.conftest import import_horovod


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.setattr(module, "interface_of", lambda address: f"interface of {address}")


def places(addresses, single_node=False):
    rendezvous = HorovodRendezvous("10.0.0.9", 777, tuple(addresses), single_node)
    return [
        horovod_environment(
            WorkerContext(world_rank=rank, world_size=len(addresses), node_ip=address),
            rendezvous,
            1800,
        )
        for rank, address in enumerate(addresses)
    ]


def column(found, name):
    return [place[f"HOROVOD_{name}"] for place in found]


def test_ranks_are_counted_by_host(environment):
    found = places(["a", "a", "b"])
    assert column(found, "RANK") == ["0", "1", "2"]
    assert column(found, "SIZE") == ["3"] * 3
    assert column(found, "LOCAL_RANK") == ["0", "1", "0"]
    assert column(found, "LOCAL_SIZE") == ["2", "2", "1"]
    assert column(found, "CROSS_RANK") == ["0", "0", "1"]
    assert column(found, "CROSS_SIZE") == ["2", "1", "2"]
    assert column(found, "GLOO_IFACE") == [f"interface of {name}" for name in "aab"]


def test_on_one_machine_workers_talk_over_loopback(environment):
    (place,) = places(["10.0.0.9"], single_node=True)
    assert place["HOROVOD_GLOO_IFACE"] == "interface of 127.0.0.1"
    assert place["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "777"
    assert place["HOROVOD_CONTROLLER"] == place["HOROVOD_CPU_OPERATIONS"] == "gloo"


def test_a_worker_alone_needs_no_rendezvous(environment):
    found = horovod_environment(WorkerContext(), None, 1800)
    assert (found["HOROVOD_RANK"], found["HOROVOD_SIZE"]) == ("0", "1")
    assert "HOROVOD_GLOO_RENDEZVOUS_ADDR" not in found


def test_rendezvous_listens_on_loopback_and_ignores_strangers():
    import_horovod()
    backend, before = create_backend("horovod", 1800), listeners()
    rendezvous = backend.prepare(["127.0.0.1"] * 2)
    place = (rendezvous.host, rendezvous.port)
    assert listeners() - before == {place} == {("127.0.0.1", rendezvous.port)}
    with contextlib.ExitStack() as strangers:
        for said in [b"", b"G", b"\xff" * 100, b"PUT / HTTP/1.1\r\n"] * 10:
            strangers.enter_context(socket.create_connection(place)).sendall(said)
        url = f"http://{place[0]}:{place[1]}/global/0"
        urllib.request.urlopen(urllib.request.Request(url, b"here", method="PUT"), timeout=10)
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert answer.read() == b"here"
    backend.met()
    assert place not in listeners()


def test_without_horovod_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "raysgd\[horovod\]".*docs/horovod.md'):
        create_backend("horovod", 1800)
