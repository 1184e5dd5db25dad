"""The environment of Horovod, its rendezvous, and the error if Horovod is missing."""

import contextlib
import os
import pickle
import socket
import threading
import urllib.request

import pytest

from raysgd._internal.runner import WorkerContext
from raysgd.backends import create_backend
from raysgd.comm import horovod as module
from raysgd.comm.horovod import (
    HorovodBackend,
    HorovodRendezvous,
    check_dtypes,
    horovod_environment,
)
from raysgd.comm.network import listening_addresses
from tests.conftest import Script, import_horovod


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.setattr(module, "interface_of", lambda address: f"interface of {address}")


ALONE = {"RANK": "0", "SIZE": "1"}
SLOTS = [{"rank": rank, "size": 2} for rank in range(2)]


@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", "127.0.0.1"), ("10.0.0.9", "a")])
def test_a_worker_has_its_rank_and_the_interface_of_its_node(environment, host, address):
    context = WorkerContext(world_rank=1, world_size=2, node_ip="a")
    place = horovod_environment(context, HorovodRendezvous(host, 777, SLOTS), 1800)
    assert (place["HOROVOD_RANK"], place["HOROVOD_SIZE"]) == ("1", "2")
    assert place["HOROVOD_GLOO_IFACE"] == f"interface of {address}"
    assert place["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "777"
    assert place["HOROVOD_CONTROLLER"] == place["HOROVOD_CPU_OPERATIONS"] == "gloo"


def test_ranks_are_counted_by_host(monkeypatch):
    import_horovod()
    monkeypatch.setattr(module, "driver_address", lambda addresses: "127.0.0.1")
    backend = HorovodBackend("horovod", 30)
    found = backend.create_rendezvous(["a", "a", "b"]).slots
    backend.close()
    assert [slot["rank"] for slot in found] == [0, 1, 2]
    assert [slot["local_rank"] for slot in found] == [0, 1, 0]
    assert [slot["cross_size"] for slot in found] == [2, 1, 2]


@pytest.mark.parametrize(("timeout_s", "expected"), [(0.5, "1"), (5.7, "5"), (1800, "30")])
def test_a_worker_alone_has_a_timeout_up_to_half_a_minute(environment, timeout_s, expected):
    ranks = {f"{kind}{name}": n for kind in ("", "LOCAL_", "CROSS_") for name, n in ALONE.items()}
    others = {"CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo", "GLOO_TIMEOUT_SECONDS": expected}
    expected = {"HOSTNAME": "127.0.0.1", **ranks, **others}
    found = horovod_environment(WorkerContext(), None, timeout_s)
    assert found == {f"HOROVOD_{name}": value for name, value in expected.items()}


@pytest.fixture
def without_framework(monkeypatch):
    """A backend for functions that call ``hvd.init()`` themselves."""
    import_horovod()
    monkeypatch.setattr(os, "environ", {"HOROVOD_X": "own"})
    return HorovodBackend("horovod", 30, framework=None)


def test_the_environment_of_a_group_is_set_and_removed(environment, without_framework):
    backend = without_framework
    rendezvous = HorovodRendezvous("10.0.0.9", 777, SLOTS)
    backend.setup(WorkerContext(world_rank=1, world_size=2, node_ip="a"), rendezvous)
    assert os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "10.0.0.9"
    assert (os.environ["HOROVOD_RANK"], os.environ["HOROVOD_SIZE"]) == ("1", "2")
    os.environ["HOROVOD_SIZE"] = "changed by the user"
    backend.teardown()
    left = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD")}
    assert left == {"HOROVOD_SIZE": "changed by the user", "HOROVOD_X": "own"}
    os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = "of an earlier group"
    backend.setup(WorkerContext(), None)
    assert "HOROVOD_GLOO_RENDEZVOUS_ADDR" not in os.environ
    assert os.environ["HOROVOD_SIZE"] == "1"


def test_functions_can_reach_the_rendezvous_until_it_is_closed(without_framework):
    rendezvous = without_framework.create_rendezvous(["127.0.0.1"])
    place = (rendezvous.host, rendezvous.port)
    without_framework.release_rendezvous()
    assert place in listening_addresses()
    without_framework.create_rendezvous(["127.0.0.1"])  # of the next generation
    assert place not in listening_addresses()
    without_framework.close()


def test_only_workers_of_torch_operators_join_a_second_group():
    import_horovod()
    backends = [HorovodBackend("horovod", 30, name) for name in ("torch", "tensorflow", None)]
    assert [each.process_can_rejoin for each in backends] == [True, False, False]


def test_bfloat16_is_refused_by_name():
    check_dtypes(["float32", "torch.float16"])
    with pytest.raises(TypeError, match=r"averages no bfloat16.*backend=\"gloo\""):
        check_dtypes(["float32", "torch.bfloat16"])


RANK = """
import os, pickle, sys
import horovod.torch as hvd, pytest, torch
from raysgd._internal.runner import WorkerContext
from raysgd.backends import create_backend

rank, rendezvous = int(sys.argv[1]), pickle.loads(bytes.fromhex(sys.argv[2]))
backend = create_backend("horovod", 10)  # 1 of 20 interruptions is noticed after this timeout
context = WorkerContext(world_rank=rank, world_size=2, has_process_group=True)
backend.setup(context, rendezvous)
assert (hvd.rank(), hvd.size()) == (rank, 2)
assert hvd.allreduce(torch.tensor([2.0 * rank]), op=hvd.Average).item() == 1
# Each rank waits for a tensor that the other does not have. A tensor that is added while Horovod
# ends would be forgotten.
handle = hvd.allreduce_async(torch.ones(1), name=f"of {rank}")
print("joined", flush=True)
sys.stdin.readline()  # the driver has stopped the rendezvous
backend.interrupt()
with pytest.raises(Exception) as caught:
    hvd.synchronize(handle)
assert backend.is_communication_error(caught.value), repr(caught.value)
for error in (RuntimeError("shapes do not match"), KeyError("gloo")):
    assert not backend.is_communication_error(error)
assert backend.is_communication_error(RuntimeError("Horovod has been shut down"))
backend.teardown()
assert "HOROVOD_RANK" not in os.environ
print("good", flush=True)
os._exit(0)
"""


def test_two_workers_form_a_group_that_the_driver_can_interrupt():
    import_horovod("horovod.torch")
    driver = create_backend("horovod", 30)
    rendezvous = pickle.dumps(driver.create_rendezvous(["127.0.0.1"] * 2)).hex()
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(contextlib.closing(Script(RANK, r, rendezvous))) for r in (0, 1)
        ]
        assert [rank.stdout.readline() for rank in ranks] == ["joined\n"] * 2
        driver.release_rendezvous()
        for rank in ranks:
            print(file=rank.stdin, flush=True)
        assert [rank.stdout.read() for rank in ranks] == ["good\n"] * 2


def test_rendezvous_listens_on_loopback_and_ignores_strangers():
    import_horovod()
    backend, before = create_backend("horovod", 1800), listening_addresses()
    rendezvous = backend.create_rendezvous(["127.0.0.1"] * 2)
    place = (rendezvous.host, rendezvous.port)
    assert listening_addresses() - before == {place} == {("127.0.0.1", rendezvous.port)}
    assert next(t for t in threading.enumerate() if t.name == "raysgd-horovod").daemon
    with contextlib.ExitStack() as strangers:
        for said in [b"", b"G", b"\xff" * 100, b"PUT / HTTP/1.1\r\n"] * 10:
            strangers.enter_context(socket.create_connection(place)).sendall(said)
        url = f"http://{place[0]}:{place[1]}/global/0"
        urllib.request.urlopen(urllib.request.Request(url, b"here", method="PUT"), timeout=10)
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert answer.read() == b"here"
        backend.release_rendezvous()
    assert place not in listening_addresses()


def test_without_horovod_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "raysgd\[horovod\]".*docs/horovod.md'):
        create_backend("horovod", 1800)
