"""How tensors, arrays, and functions travel to another process."""

import pickle
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from hypothesis import given
from hypothesis import strategies as st

from raysgd.cluster.serialization import dumps, pack
from raysgd.torch.options import TorchOptions

LARGE = 1 << 14
"""Smallest size in bytes of a buffer that is sent out of band."""


def same(a, b):
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)


def through_ray(packed):
    """Return what arrives through Ray: buffers are read-only memory."""
    return type(packed)(packed.data, [bytes(buffer) for buffer in packed.buffers])


dtypes = st.sampled_from(
    [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.float8_e5m2, torch.uint16]
)
shapes = st.lists(st.integers(0, 40), max_size=3)


@given(shape=shapes, dtype=dtypes, order=st.randoms(use_true_random=False))
def test_tensors_of_all_kinds_arrive_as_they_were(shape, dtype, order):
    tensor = torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)
    axes = list(range(len(shape)))
    order.shuffle(axes)
    value = {"t": tensor, "permuted": tensor.permute(axes), "array": np.ones(shape)}
    for arrived in (through_ray(pack(value)).unpack(), pickle.loads(dumps(value))):
        assert all(same(value[name], arrived[name]) for name in value)


@pytest.mark.parametrize("make", [torch.zeros, np.zeros])
def test_large_values_travel_without_a_copy(make):
    value = make(LARGE)
    packed = pack([value, value])
    assert len(packed.data) < 1000
    (buffer,) = packed.buffers
    value[0] = 7  # the buffer still shares the memory of the value
    assert bytes(buffer)[:4] != bytes(4) or bytes(buffer)[:8] != bytes(8)
    first, second = through_ray(packed).unpack()
    assert first is second
    first[1] = 3  # needs writable memory
    assert value[1] == 0


def test_read_only_arrays_stay_in_the_memory_of_ray():
    arrived = through_ray(pack(np.zeros(LARGE)))
    tracemalloc.start()
    try:
        value = arrived.unpack(copies=False)
        assert tracemalloc.get_traced_memory()[1] < LARGE
    finally:
        tracemalloc.stop()
    assert not value.any()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.nn.Parameter(torch.ones(LARGE)),
        torch.ones(LARGE, requires_grad=True),
        torch.ones(2 * LARGE)[:LARGE],
        torch.ones(LARGE, dtype=torch.complex64).conj(),
        torch.ones(4, LARGE).to_sparse(),
        torch.ones(8, 8, 16, 16).to(memory_format=torch.channels_last),
    ],
    ids=["parameter", "grad", "view", "conj", "sparse", "channels-last"],
)
def test_tensors_that_are_not_plain_keep_their_properties(tensor):
    arrived = through_ray(pack(tensor)).unpack()
    assert type(arrived) is type(tensor)
    assert arrived.requires_grad == tensor.requires_grad
    assert arrived.is_sparse == tensor.is_sparse
    if not tensor.is_sparse:
        assert arrived.stride() == tensor.stride()
    assert torch.equal(arrived.to_dense(), tensor.to_dense())


def test_functions_that_seem_to_use_torch_distributed_config_can_be_sent():
    """The names `distributed` and `config` make cloudpickle pickle `torch.distributed.config`."""
    pytest.importorskip("torch.distributed.config", reason="PyTorch has it since 2.10")
    there = through_ray(pack(lambda own: (torch.distributed.is_available(), own.config))).unpack()
    assert there(SimpleNamespace(config=3)) == (True, 3)


@pytest.fixture
def store(monkeypatch):
    """A fake Ray object store: values are pickled, and their buffers are read-only."""
    held = []

    def put(value):
        buffers = []
        data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        held.append((data, [bytes(buffer) for buffer in buffers]))
        return len(held) - 1

    monkeypatch.setattr(ray, "put", put)

    def get(place):
        data, buffers = held[place]
        return pickle.loads(data, buffers=buffers)

    monkeypatch.setattr(ray, "get", get)
    return held


def test_large_value_is_stored_once_without_a_copy_on_the_driver(store):
    packed = pack({"array": np.ones(2**18), "text": "x" * 2**20})
    reference = packed.store()
    assert packed.store() is reference
    assert len(store) == 1
    assert len(store[0][0]) < 1000
    assert (packed.data, packed.buffers) == (b"", ())
    assert packed.unpack()["array"].sum() == 2**18  # a worker in this process reads it this way


def test_workers_share_large_arrays_and_have_their_own_tensors(store):
    config = {"array": np.ones(2**18), "tensor": torch.ones(2**18)}
    options = TorchOptions(training_operator_cls=print, config=config, num_workers=2)
    sent = ray.get(pack(options).store())
    arrived = sent.unpack(copies=False)
    (_, first), (_, second) = arrived.unpack(), arrived.unpack()
    assert np.shares_memory(first["array"], second["array"])
    assert not first["array"].flags.writeable
    first["tensor"] += 1
    assert second["tensor"].max() == config["tensor"].max() == 1


def test_a_small_config_is_fresh_for_each_setup():
    config = {"array": np.ones(2**12), "tensor": torch.ones(2**12)}
    options = TorchOptions(training_operator_cls=print, config=config)
    arrived = through_ray(pack(options)).unpack(copies=False)
    (_, first), (_, second) = arrived.unpack(), arrived.unpack()
    for value in first.values():
        value += 1
    assert second["array"].max() == second["tensor"].max() == 1
