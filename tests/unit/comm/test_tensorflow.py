"""The environment for TensorFlow: TF_CONFIG, the choice of Keras, and errors."""

import json
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from raysgd._internal.context import WorkerContext
from raysgd.backends import create_backend
from raysgd.comm import tensorflow as module
from raysgd.comm.tensorflow import check_tensorflow, keras_environment
from tests.conftest import needs_tensorflow


@pytest.fixture
def environment(monkeypatch):
    for name in ("TF_CONFIG", "TF_USE_LEGACY_KERAS", "KERAS_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "modules", {k: v for k, v in sys.modules.items() if k != "tensorflow"})
    return monkeypatch


@needs_tensorflow
def test_every_worker_knows_all_and_its_own_place(environment):
    driver = create_backend("tensorflow", 20)
    rendezvous = driver.prepare(["127.0.0.1"] * 2)
    seen = {}

    def setup(rank):
        backend = create_backend("tensorflow", 20)
        environment.setattr(module.os, "environ", Recorded(seen, rank))
        backend.setup(WorkerContext(world_rank=rank, world_size=2), rendezvous)
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


def test_tensorflow_imported_too_early_is_refused(environment):
    environment.setitem(sys.modules, "tensorflow", object())
    backend = create_backend("tensorflow", 20)
    with pytest.raises(RuntimeError, match=r"before TF_CONFIG was set.*initialization_hook"):
        backend.setup(WorkerContext(), None)


def test_without_tensorflow_the_error_names_the_extra(environment):
    environment.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "raysgd\[tensorflow\]"'):
        check_tensorflow("TFTrainer")
