"""Collectives over torch.distributed and Horovod."""

import collections
import copy
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raysgd.torch import collectives
from raysgd.torch.collectives import TorchCollectives
from raysgd.torch.tensors import state_digest
from tests.conftest import import_horovod, run_ranks

GROUP = TorchCollectives(torch.device("cpu"))


@pytest.fixture(params=["torch", "horovod"])
def group(request):
    """Create a group with one worker, in PyTorch and in Horovod."""
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
    """Digests need up to 62 bits."""
    assert GROUP.all_reduce_min(value) == [value]


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
    """Buffers may have dtypes that gloo or Horovod does not support."""
    for shape in ((), (3,), (2, 2), (0,)):
        tensor = torch.ones(shape).to(dtype)
        GROUP.broadcast_tensors([tensor], 0)
        assert tensor.tolist() == torch.ones(shape).tolist()


# ---- states, with two ranks in one thread


@pytest.fixture
def link(monkeypatch):
    """Fake broadcasts: rank 0 queues its messages, and later calls as rank 1 receive them."""
    state = {"rank": 0, "messages": collections.deque()}

    def broadcast(tensor, src):
        if state["rank"] == src:
            state["messages"].append(tensor.clone())
        else:
            tensor.copy_(state["messages"].popleft())

    def broadcast_objects(box, src):
        if state["rank"] == src:
            state["messages"].append(pickle.dumps(box))
        else:
            box[:] = pickle.loads(state["messages"].popleft())

    monkeypatch.setattr(collectives.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(collectives.dist, "get_rank", lambda: state["rank"])
    monkeypatch.setattr(collectives.dist, "broadcast", broadcast)
    monkeypatch.setattr(collectives.dist, "broadcast_object_list", broadcast_objects)
    return state


def test_broadcast_state_keeps_structure_and_tensors(link):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    state = {
        "model": model.state_dict(),
        "list": [1, (torch.tensor(True), "text", None)],
        "empty": torch.empty(0, 4),
        "bfloat16": torch.ones(2, dtype=torch.bfloat16),
        3: {"deep": [{"x": torch.arange(3)}]},
    }
    assert GROUP.broadcast(lambda: state, 0) is state
    link["rank"] = 1
    # CPU tensors, such as the step counters of Adam, stay there.
    group = TorchCollectives(torch.device("meta"))
    got = group.broadcast(lambda: pytest.fail("only the source makes it"), 0)
    assert not link["messages"]
    assert state_digest(got) == state_digest(state)


def test_a_rank_that_has_the_state_receives_it_without_memory(link, monkeypatch):
    monkeypatch.setattr(collectives, "_MESSAGE_BYTES", 64)
    state = {"large": torch.rand(5, 11), "small": [torch.rand(3), torch.rand(2)], "step": 4}
    GROUP.broadcast(lambda: state, 0)
    sizes = [each.nbytes for each in link["messages"] if isinstance(each, torch.Tensor)]
    assert max(sizes) <= 64
    link["rank"] = 1
    got = GROUP.broadcast(dict, 0, wanted=False)
    assert not link["messages"]
    assert got["step"] == 4
    assert got["large"].is_meta


@pytest.mark.parametrize("message_bytes", [8, 64 * 2**20])
def test_broadcast_overwrites_tensors_in_place(link, monkeypatch, message_bytes):
    monkeypatch.setattr(collectives, "_MESSAGE_BYTES", message_bytes)

    def tensors(value):
        strided = torch.full((4, 3), value).t()
        return [
            torch.full((2, 2), value),
            torch.full((3,), value, dtype=torch.float64),
            torch.tensor(int(value)),
            torch.nn.Parameter(torch.full((5,), value)),
            strided,
            torch.full((1, 3), value)[:, 0],
            torch.full((3,), complex(0, value)).conj(),
            torch.full((3,), complex(0, value)).conj().imag,
            torch.empty(0),
        ]

    GROUP.broadcast_tensors(tensors(7.0), src=0)
    link["rank"] = 1
    mine = tensors(0.0)
    GROUP.broadcast_tensors(mine, src=0)
    assert not link["messages"]
    assert all(torch.equal(a, b) for a, b in zip(mine, tensors(7.0), strict=True))


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int16, torch.uint8]


@given(
    shape=st.lists(st.integers(0, 9), max_size=3),
    dtype=st.sampled_from(DTYPES),
    offset=st.integers(0, 9),
    where=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
)
def test_fingerprint_differs_for_one_bit(shape, dtype, offset, where, bit):
    size = math.prod(shape)
    held = torch.arange(offset + size).to(dtype)
    tensor = held[offset:].view(shape)
    state = {"a": [tensor, ("text", 0.1, None)], 3: collections.OrderedDict(b=tensor.clone())}
    expected = state_digest(state)
    other = copy.deepcopy({"a": [tensor.clone(), ("te" + "xt", 0.1, None)], 3: state[3]})
    assert state_digest(other) == expected
    if size:
        content = other["a"][0].reshape(-1).view(torch.uint8)
        content[int(where * content.numel())] ^= 1 << bit
        assert state_digest(other) != expected


@pytest.mark.parametrize(
    "other",
    [
        {"w": torch.zeros(4), "lr": 0.2},
        {"w": torch.zeros(2, 2), "lr": 0.1},
        {"w": torch.zeros(4, dtype=torch.int32), "lr": 0.1},
        {"v": torch.zeros(4), "lr": 0.1},
        {"w": [0.0] * 4, "lr": 0.1},
    ],
)
def test_fingerprint_covers_names_shapes_types_and_numbers(other):
    state = {"w": torch.zeros(4), "lr": 0.1}
    assert state_digest(state) == state_digest(copy.deepcopy(state))
    assert state_digest(state) != state_digest(other)


def test_fingerprint_is_that_of_the_values():
    whole = torch.tensor([[1 + 2j, 3 - 4j]])
    views = [whole.conj(), whole.conj().imag, torch.rand(1, 3)[:, 0]]
    for view in views:
        assert state_digest(view) == state_digest(view.clone().contiguous())
    assert state_digest(whole.conj()) != state_digest(whole)


STRIDED = """
import torch
from raysgd.torch import collectives

join()
group = collectives.TorchCollectives(torch.device("cpu"))
for limit in (8, 2**20):
    collectives._MESSAGE_BYTES = limit
    whole = torch.full((4, 6), float(rank))
    whole[1, 2] = float("nan") if rank == 0 else 5.0
    group.broadcast_tensors([whole[:, ::2], whole[0, 1::2]], src=0)
    expected = torch.full((4, 6), float(rank))
    expected[:, ::2], expected[0, 1::2], expected[1, 2] = 0.0, 0.0, float("nan")
    assert torch.equal(whole.nan_to_num(9.0), expected.nan_to_num(9.0)), whole
assert group.all_reduce_min(3 + rank) == [3]
value = float("nan") if rank else 1.0
assert torch.tensor(group.all_reduce_sum(value)).isnan()
print("good")
"""


def test_collectives_keep_nan_and_the_elements_between_those_of_a_view():
    """gloo itself loses some NaN in a maximum, and writes between the elements of a view."""
    run_ranks(STRIDED, 2)
