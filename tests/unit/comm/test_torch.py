"""The backends for PyTorch: process groups and their stores."""

import contextlib
import datetime
import json
import os
import pickle
import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from raysgd._internal.runner import WorkerContext
from raysgd.backends import CollectiveBackend, create_backend
from raysgd.comm import torch as torch_backend
from raysgd.comm.network import LOOPBACK, listening_addresses
from raysgd.comm.torch import TorchRendezvous, TorchStore
from tests.conftest import Script, run_ranks


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    backend = create_backend("gloo", 30)
    yield backend
    backend.teardown()
    backend.close()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


def joined(backend):
    backend.setup(WorkerContext(has_process_group=True), backend.create_rendezvous(["127.0.0.1"]))
    return backend


def test_a_group_can_be_made_left_and_made_again(backend):
    for _ in range(2):
        joined(backend)
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
        assert dist.group.WORLD._gloo.options._timeout == datetime.timedelta(seconds=30)
        assert backend.current_collective() is None
        assert backend.link_speeds() == {}  # within one host
        backend._group._running.begin(1, print, is_collective=True)
        assert backend.current_collective() == 1
        backend._group._running.finish(1)
        backend.teardown()
        assert not dist.is_initialized()
        assert backend.current_collective() is None


def test_each_generation_has_a_store_of_its_own(backend):
    rendezvous = [backend.create_rendezvous(["127.0.0.1"]) for _ in range(3)]
    assert len({r.store for r in rendezvous}) == 3
    assert all(r.store.host == "127.0.0.1" for r in rendezvous)
    assert pickle.loads(pickle.dumps(rendezvous[0])) == rendezvous[0]
    with pytest.raises(dist.DistNetworkError):  # earlier stores are closed
        TorchStore(rendezvous[0].store, datetime.timedelta(seconds=30))


def test_nccl_has_a_second_store_on_the_same_interface(monkeypatch):
    created = {}
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **named: created.update(named))
    backend, before = create_backend("nccl", 30), listening_addresses()
    rendezvous = backend.create_rendezvous(["127.0.0.1"])
    ports = {rendezvous.store.port, rendezvous.tcp_store_port}
    assert listening_addresses() - before == {("127.0.0.1", port) for port in ports}
    for timeout in (datetime.timedelta(seconds=0.2), datetime.timedelta(minutes=30)):
        torch_backend._init_nccl(rendezvous, 0, 1, timeout)
        store = created["store"]
        assert store.timeout == timeout
        assert created["timeout"] == min(timeout, datetime.timedelta(seconds=5))
    store.set("a", "1")
    assert store.get("a") == b"1"
    backend.close()


def test_links_are_the_newest_rates_to_other_hosts(backend, monkeypatch):
    now, own, other, meshed = [100.0], ("10.0.0.1", 5), ("10.0.0.2", 5), ("10.0.0.1", 8)
    connections = [(own, ("10.0.0.2", 9)), (("10.0.0.1", 6), other), (meshed, ("10.0.0.0", 1))]
    ignored = [(own, None), (own, ("10.0.0.1", 7)), (("10.0.0.1", 9), ("10.0.0.4", 1))]
    sent = [(2**17, 0.5), (2**17, 1.5), (2**16, 0.25), *[(2**20, 1.0)] * 3]
    expected = {"10.0.0.2": 2.0**17, "10.0.0.0": 2.0**18}
    monkeypatch.setattr(torch_backend, "driver_address", lambda addresses: "127.0.0.2")
    backend.setup(
        WorkerContext(has_process_group=True, node_ip=LOOPBACK),
        backend.create_rendezvous([LOOPBACK]),
    )
    backend._listening = {own, other}
    backend._mesh = SimpleNamespace(local_addresses=lambda: {meshed}, close=int)
    monkeypatch.setattr(torch_backend, "time", SimpleNamespace(monotonic=lambda: now[0]))
    found = [
        SimpleNamespace(local=local, remote=remote, count_sent=lambda n=n: sent[n])
        for n, (local, remote) in enumerate([*connections, *ignored])
    ]
    monkeypatch.setattr(torch_backend, "tcp_sockets", lambda: found)
    assert backend.link_speeds() == expected
    for now[0], sent[2], rate in [
        (102.9, (2**17, 0.75), 2.0**18),  # too early
        (103.0, (2**17, 0.75), 2.0**17),
        (106.0, (2**17 + 2**16 - 1, 1.0), 2.0**17),  # too few bytes
        (109.0, (2**18, 1.0), 2.0**17),  # in no time
        (112.0, (2**18 + 2**16, 2.0), 2.0**16),
    ]:
        assert backend.link_speeds() == {**expected, "10.0.0.0": rate}


def test_a_backend_must_override_exactly_the_abstract_methods():
    names = ["create_rendezvous", "setup", "interrupt", "teardown", "is_communication_error"]
    assert CollectiveBackend.__abstractmethods__ == set(names)
    backend = type("Own", (CollectiveBackend,), dict.fromkeys(names, print))()
    assert (backend.advice_for(ValueError()), backend.current_collective()) == ("", None)
    assert backend.link_speeds() == {}


def test_a_group_of_the_users_own_is_neither_taken_over_nor_ended_by_leaving_twice(backend):
    joined(backend)
    backend.teardown()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(RuntimeError, match=r"already initialized.*destroy_process_group"):
        joined(backend)
    backend.teardown()
    assert dist.is_initialized()
    dist.destroy_process_group()


@pytest.mark.parametrize("wake", ["close", "interrupt"])
def test_a_worker_that_waits_for_the_others_can_be_woken(backend, wake):
    """If a worker is lost meanwhile, the driver closes the store or interrupts the others."""
    rendezvous = backend.create_rendezvous(["127.0.0.1"] * 2)
    observer = TorchStore(rendezvous.store, datetime.timedelta(seconds=30))
    assert observer.timeout == datetime.timedelta(seconds=30)
    with ThreadPoolExecutor(1) as pool:
        joins = pool.submit(backend.setup, WorkerContext(world_size=2), rendezvous)
        observer.wait(["here/0"])
        assert backend._mesh is not None  # a small group reduces small tensors by the mesh
        getattr(backend, wake)()
        with pytest.raises(dist.DistNetworkError, match="has ended") as caught:
            joins.result(10)
    assert backend.is_communication_error(caught.value)


@pytest.mark.parametrize(
    ("size", "interface", "is_meshed"),
    [(1, None, False), (2, None, True), (16, None, True), (17, None, False), (2, "none", False)],
)
def test_small_groups_reduce_by_a_mesh_on_the_interface_of_gloo(
    backend, monkeypatch, size, interface, is_meshed
):
    if interface is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    rendezvous = backend.create_rendezvous(["127.0.0.1"] * size)
    with ThreadPoolExecutor(1) as pool:
        joins = pool.submit(backend.setup, WorkerContext(world_size=size), rendezvous)
        store = TorchStore(rendezvous.store, datetime.timedelta(seconds=30))
        address = json.loads(store.get("here/0"))
        assert (address is not None) == is_meshed
        assert address is None or tuple(address) in listening_addresses()
        if size > 1:
            assert not joins.done()
            backend.interrupt()
        joins.exception(10)
    backend.teardown()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == interface  # the choice of the user is kept
    assert address is None or tuple(address) not in listening_addresses()


@pytest.mark.parametrize(("host", "address"), [(LOOPBACK, LOOPBACK), ("127.0.0.2", "10.1.2.3")])
def test_gloo_uses_the_interface_of_the_node(backend, monkeypatch, host, address):
    monkeypatch.setattr(torch_backend, "interface_of", lambda address: f"of {address}")
    store, _ = backend.create_rendezvous(["127.0.0.1"] * 2)
    rendezvous = TorchRendezvous(store._replace(host=host))
    backend.close()
    with pytest.raises(dist.DistNetworkError):
        backend.setup(WorkerContext(world_size=2, node_ip="10.1.2.3"), rendezvous)
    assert os.environ["GLOO_SOCKET_IFNAME"] == f"of {address}"
    backend.teardown()
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_workers_that_do_not_come_are_named(backend):
    backend._timeout = datetime.timedelta(seconds=0.1)
    with pytest.raises(dist.DistStoreError, match=r"here/1, here/2 within 0\.1 s") as caught:
        backend.setup(WorkerContext(world_size=3), backend.create_rendezvous(["127.0.0.1"] * 3))
    assert backend.is_communication_error(caught.value)


@pytest.mark.parametrize("is_of_group", [False, True])
def test_interrupting_shuts_down_only_the_sockets_of_the_group(backend, is_of_group):
    joined(backend)
    with socket.create_server(("127.0.0.1", 0)) as server:
        if is_of_group:
            backend._listening |= {server.getsockname()}
        client = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
        with client, peer:
            backend.interrupt()
            with contextlib.suppress(ConnectionError):
                client.sendall(b"still there")
            assert peer.recv(100) == (b"" if is_of_group else b"still there")


def test_communication_errors_are_distinguished_from_others(backend):
    yes = [
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed"),
        RuntimeError("NCCL communicator was aborted"),
        dist.DistNetworkError("gone"),
        dist.DistStoreError("timeout"),
    ]
    no = [RuntimeError("shapes do not match"), ValueError("gloo/"), KeyError("NCCL")]
    with pytest.raises(RuntimeError) as of_user:
        raise RuntimeError("Set NCCL_SOCKET_IFNAME first.")
    no.append(of_user.value)
    assert all(map(backend.is_communication_error, yes))
    assert not any(map(backend.is_communication_error, no))


STALE = """
import pytest, torch
from raysgd.backends import create_backend

backend = create_backend("gloo", 30)
join()
group = dist.new_group()
uses = [lambda: dist.broadcast(torch.ones(1), src=0, group=group)]
uses[0]()
dist.destroy_process_group()
join("again")
if rank == 0:  # it fails as rank 1 has ended
    uses.append(lambda: dist.all_reduce(torch.ones(1), group=group))
for use in uses:
    with pytest.raises(Exception) as caught:
        use()
    assert "on_world_change" in backend.advice_for(caught.value), repr(caught.value)
assert not backend.advice_for(ValueError("shapes do not match"))
print("good")
"""


@pytest.mark.slow("a process waits for the end of another")
def test_stale_process_group_error_names_the_hook():
    run_ranks(STALE, 2)


@pytest.mark.parametrize(("name", "expected"), [("gloo", 30), ("nccl", 7)])
def test_the_environment_bounds_the_collectives_of_nccl_alone(monkeypatch, name, expected):
    monkeypatch.setenv("NCCL_TIMEOUT_S", "7")
    assert create_backend(name, 30)._timeout == datetime.timedelta(seconds=expected)


PEER = """
import datetime, os, pickle, signal, sys
import torch, torch.distributed as dist
from raysgd.comm.gloo import GlooGroup
from raysgd.comm.network import LOOPBACK
from raysgd.comm.torch import TorchRendezvous, TorchStore

class Dying(TorchStore):
    def set(self, key, value):  # dies as it gives its address to the others
        if not key.startswith("here/"):
            os.kill(os.getpid(), signal.SIGKILL)
        super().set(key, value)

dies, rendezvous = sys.argv[1] == "dies", pickle.loads(bytes.fromhex(sys.argv[2]))
timeout = datetime.timedelta(seconds=20)
store = (Dying if dies else TorchStore)(rendezvous.store, timeout)
store.set("here/1", "null")
store.get("here/0")
GlooGroup.init(store, 1, 2, timeout)
store.set("listening/1", "[]")
store.get("listening/0")
dist.all_reduce(torch.ones(1))
os._exit(0)  # or the end of Python breaks in on gloo's threads
"""


def peer_of(rendezvous, conduct):
    return contextlib.closing(Script(PEER, conduct, pickle.dumps(rendezvous).hex()))


def test_a_peer_that_dies_before_it_connects_is_a_communication_error(backend, monkeypatch):
    monkeypatch.setattr(torch_backend, "_CONNECT", datetime.timedelta(seconds=0.5))
    context = WorkerContext(has_process_group=True, world_rank=0, world_size=2)
    rendezvous = backend.create_rendezvous(["127.0.0.1"] * 2)
    with peer_of(rendezvous, "dies"), pytest.raises(RuntimeError) as caught:
        backend.setup(context, rendezvous)
    assert backend.is_communication_error(caught.value)

    # the next group forms, although PyTorch has counted the failed one
    backend.teardown()
    rendezvous = backend.create_rendezvous(["127.0.0.1"] * 2)
    monkeypatch.setattr(torch_backend, "_CONNECT", datetime.timedelta(seconds=20))
    with peer_of(rendezvous, "lives") as peer:
        backend.setup(context, rendezvous)
        both = torch.ones(1)
        dist.all_reduce(both)
        assert both == 2
        assert peer.wait(60) == 0
