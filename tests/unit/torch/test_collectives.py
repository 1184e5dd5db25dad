"""What workers tell each other, in groups of one: by torch.distributed or by Horovod."""

import pytest
import torch

from raysgd.torch import collectives
from tests.conftest import import_horovod, run_ranks

CPU = torch.device("cpu")


@pytest.fixture(params=["torch", "horovod"])
def group(request):
    """A group of one, of either kind."""
    if request.param == "torch":
        request.getfixturevalue("process_group")
        yield request.param
        return
    horovod = import_horovod("horovod.torch")
    horovod.init()
    yield request.param
    horovod.shutdown()


@pytest.mark.parametrize("value", [0, -7, 2**40, 2**62 - 1, 1 - 2**62])
def test_minimum_of_large_numbers(group, value):
    """Also beyond what 32 bits hold."""
    found = collectives.minimum(value, CPU)
    assert (found, type(found)) == (value, int)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.int16,
        torch.uint16,
        torch.int64,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float32,
        torch.complex64,
    ],
    ids=str,
)
def test_broadcast_supports_all_dtypes(group, dtype):
    """Buffers are of types that gloo, or Horovod, knows nothing of."""
    for shape in ((), (3,), (2, 2), (0,)):
        tensor = torch.ones(shape).to(dtype)
        collectives.broadcast(tensor, 0)
        assert tensor.tolist() == torch.ones(shape).tolist()


def test_broadcast_object(group):
    thing = {"names": ("a", None), "tensor": torch.ones(2)}
    found = collectives.broadcast_object(thing, 0)
    assert found["names"] == ("a", None)
    assert found["tensor"].tolist() == [1, 1]


RANK_OF_THREE = """
import sys
import torch, torch.distributed as dist
from raysgd.torch import collectives
from raysgd.torch.collectives import broadcast_state

join()
cpu = torch.device("cpu")
assert collectives.mean(rank + 0.5, cpu) == 1.5
if rank != 1:  # who neither has nor wants it need not know of it
    state = {"a": [torch.arange(5) if rank == 0 else None, "text"]}
    state = broadcast_state(lambda: state, 0, cpu, [2])
    assert state["a"][0].tolist() == [0, 1, 2, 3, 4] and state["a"][1] == "text"
dist.barrier()
dist.destroy_process_group()
print("good")
"""


def test_broadcast_state_to_some_ranks():
    run_ranks(RANK_OF_THREE, 3)
