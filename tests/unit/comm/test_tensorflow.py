"""The environment for TensorFlow: TF_CONFIG, the choice of Keras, and errors."""

import json
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from raysgd._internal.runner import WorkerContext
from raysgd.backends import create_backend
from raysgd.comm import tensorflow as module
from raysgd.comm.network import LOOPBACK
from raysgd.comm.tensorflow import check_tensorflow, keras_environment
from tests.conftest import needs_tensorflow

THREADS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


@pytest.fixture
def environment(monkeypatch):
    for name in (*THREADS, "TF_CONFIG", "TF_USE_LEGACY_KERAS", "KERAS_BACKEND"):
        monkeypatch.setenv(name, "1")  # restores it
        del os.environ[name]
    monkeypatch.setattr(sys, "modules", {k: v for k, v in sys.modules.items() if k != "tensorflow"})
    return monkeypatch


@needs_tensorflow
def test_every_worker_knows_all_and_its_own_place(environment):
    driver = create_backend("tensorflow", 20)
    rendezvous = driver.create_rendezvous(["127.0.0.1"] * 2)
    seen = {}

    def setup(rank):
        backend = create_backend("tensorflow", 20)
        environment.setattr(module.os, "environ", Recorded(seen, rank))
        context = WorkerContext(world_rank=rank, world_size=2, num_cpus=1 + 2 * rank)
        backend.setup(context, rendezvous)
        assert backend._reserved_port is not None
        backend.teardown()
        assert backend._reserved_port is None

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(setup, (1, 0)))
    driver.close()
    configs = [json.loads(text) for text in seen["TF_CONFIG"]]
    workers = configs[0]["cluster"]["worker"]
    assert len(set(workers)) == 2
    assert [c["cluster"]["worker"] for c in configs] == [workers] * 2
    assert sorted(c["task"]["index"] for c in configs) == [0, 1]
    for name in THREADS:
        assert sorted(seen[name]) == ["1", "3"]


@needs_tensorflow
def test_a_worker_is_reached_over_loopback_on_one_machine(environment):
    driver = create_backend("tensorflow", 20)
    driver.setup(WorkerContext(node_ip="10.1.2.3"), driver.create_rendezvous([LOOPBACK]))
    (worker,) = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
    port = driver._reserved_port.getsockname()[1]
    driver.teardown()
    driver.close()
    assert worker == f"{LOOPBACK}:{port}"
    assert "TF_CONFIG" not in os.environ


@needs_tensorflow
def test_a_worker_that_does_not_come_is_named(environment):
    driver = create_backend("tensorflow", 0.1)
    rendezvous = driver.create_rendezvous(["127.0.0.1"] * 2)
    with pytest.raises(TimeoutError, match=r"did not set .*1 within 0\.1 s"):
        driver.setup(WorkerContext(world_size=2), rendezvous)
    driver.teardown()
    driver.close()


def test_the_open_server_of_tensorflow_causes_one_warning(environment, caplog):
    driver = create_backend("tensorflow", 20)
    for size in (1, 2, 2):
        driver.create_rendezvous(["127.0.0.1"] * size)
        assert caplog.text.count("Protect it with a firewall") == (size > 1)
    driver.close()


@needs_tensorflow
def test_errors_of_collectives_are_distinguished_from_others():
    from tensorflow import errors

    backend = create_backend("tensorflow", 20)
    yes = [
        ConnectionError("the store is closed"),
        errors.UnavailableError(None, None, "gone"),
        errors.DeadlineExceededError(None, None, "late"),
        errors.InternalError(None, None, "Connection reset by peer"),
    ]
    no = [errors.InvalidArgumentError(None, None, "shapes"), RuntimeError("Collective"), KeyError()]
    assert all(map(backend.is_communication_error, yes))
    assert not any(map(backend.is_communication_error, no))
    backend.interrupt()  # returns without a server


def test_without_tensorflow_no_error_is_one_of_its_collectives(environment):
    backend = create_backend("tensorflow", 20)
    assert not backend.is_communication_error(RuntimeError("Collective"))
    environment.delitem(sys.modules, "tensorflow.python.eager.context", raising=False)
    backend.interrupt()
    backend.teardown()


def test_the_error_of_keras_3_in_fit_comes_with_the_way():
    error = ValueError("Attempt to convert a value (PerReplica:{\n  0: ...}) to a Tensor.")
    assert "TF_USE_LEGACY_KERAS=1" in create_backend("tensorflow", 20).advice_for(error)


def test_a_port_is_kept_for_tensorflow_until_it_listens_there():
    reserved = module._reserve_port()
    port = reserved.getsockname()[1]
    for address in ("127.0.0.1", "127.0.0.2"):  # gRPC needs the port on all addresses
        with pytest.raises(OSError, match="in use"), socket.socket() as other:
            other.bind((address, port))  # like a process without SO_REUSEADDR
    with socket.create_server(("0.0.0.0", port)) as server:  # like gRPC
        assert server.getsockname()[1] == port
    reserved.close()


class Recorded(dict):
    def __init__(self, seen, rank):
        super().__init__(os.environ)
        self._seen = seen

    def __setitem__(self, name, value):
        self._seen.setdefault(name, []).append(value)


def test_the_drivers_choice_of_keras_holds_on_the_workers(environment):
    environment.setenv("TF_USE_LEGACY_KERAS", "1")
    assert create_backend("tensorflow", 20)._environment == {"TF_USE_LEGACY_KERAS": "1"}


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_keras_on_another_framework_is_refused(environment, framework):
    environment.setenv("KERAS_BACKEND", framework)
    with pytest.raises(ValueError, match=rf"KERAS_BACKEND='{framework}'.*with TensorFlow"):
        keras_environment()


@needs_tensorflow
def test_a_worker_that_is_alone_or_has_imported_tensorflow_too_early_is_refused(environment):
    backend = create_backend("tensorflow", 20)
    with pytest.raises(RuntimeError, match="cannot set up alone"):
        backend.setup(WorkerContext(), None)
    environment.setitem(sys.modules, "tensorflow", object())
    with pytest.raises(RuntimeError, match=r"before TF_CONFIG was set.*initialization_hook"):
        backend.setup(WorkerContext(), None)


def test_without_tensorflow_the_error_names_the_extra(environment):
    environment.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "raysgd\[tensorflow\]"'):
        check_tensorflow("TFTrainer")
