"""Buffers go back to what they were after the last step, and what stays as it is costs nothing."""

import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raysgd.torch.undo import BufferLog
from tests.conftest import run_ranks


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(2)
        self.register_buffer("table", torch.arange(6.0))
        self.register_buffer("average", torch.zeros(2))
        self.register_buffer("cache", torch.zeros(2))
        self.register_buffer("count", torch.tensor(0))


def batch_norm(model):
    model.norm(torch.randn(4, 2))


def in_place(model):
    model.count += 1


def replaced(model):
    model.cache = torch.zeros(2) if model.cache is None else model.cache + 1


def grown(model):
    model.cache = torch.ones(1 if model.cache is None else len(model.cache) + 1)


def through_data(model):
    model.average.data.add_(1)


def removed(model):
    model.cache = None


CHANGES = [batch_norm, in_place, replaced, grown, removed]


def values(model):
    return {name: None if b is None else b.clone() for name, b in model._buffers.items()} | {
        f"norm.{name}": buffer.clone() for name, buffer in model.norm.named_buffers()
    }


@given(
    steps=st.lists(st.lists(st.sampled_from(CHANGES), max_size=3), max_size=5),
    failing=st.lists(st.sampled_from(CHANGES), max_size=3),
    again=st.booleans(),
)
def test_what_a_failed_step_has_changed_is_taken_back(steps, failing, again):
    model = Model()
    log = BufferLog([model])
    for changes in steps:
        for change in changes:
            change(model)
        log.remember_step()
    for _ in range(1 + again):
        expected = values(model)
        for change in failing:
            change(model)
        log.restore()
        torch.testing.assert_close(values(model), expected, rtol=0, atol=0)


@pytest.mark.parametrize("first", [1, 2])
def test_what_torch_does_not_count_is_found_out_in_the_first_steps(first):
    model = Model()
    log = BufferLog([model])
    for step in range(1, 6):
        if step >= first:
            through_data(model)
        log.remember_step()
    expected = values(model)
    through_data(model)
    log.restore()
    torch.testing.assert_close(values(model), expected, rtol=0, atol=0)


def test_what_torch_does_not_count_is_found_out_where_buffers_are_broadcast_in_each_step():
    model = Model()
    log = BufferLog([model])
    slots = log.slots_of(model.modules())
    for _ in range(4):
        log.note_overwritten(slots)
        in_place(model)
        through_data(model)
        log.remember_step()
    expected = values(model)
    through_data(model)
    log.restore()
    torch.testing.assert_close(values(model), expected, rtol=0, atol=0)


def test_what_torch_does_not_count_later_on_stays_as_it_is():
    """To take it back to what it was at first would be worse than a step too much."""
    model = Model()
    log = BufferLog([model])
    for step in range(10):
        if step > 5:
            through_data(model)
        in_place(model)
        log.remember_step()
    expected = values(model)
    in_place(model)
    log.restore()
    torch.testing.assert_close(values(model), expected)


def test_buffers_of_other_layouts_and_views_are_taken_back():
    model = Model()
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    model.register_buffer("wide", torch.zeros(1).expand(5))
    model.register_buffer("part", model.table[:2])
    log = BufferLog([model])
    for _ in range(3):
        model.table += 1
        log.remember_step()
    model.table += 1
    model.sparse = model.sparse * 2
    log.restore()
    assert model.table.tolist() == [3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert model.part.tolist() == [3.0, 4.0]
    assert torch.equal(model.sparse.to_dense(), torch.eye(3))


def test_what_is_replaced_is_let_go_of():
    model = Model()
    log = BufferLog([model])
    before = weakref.ref(model.cache)
    replaced(model)
    assert before() is None
    log.remember_step()


def test_what_was_made_in_inference_mode_is_taken_back_too():
    model = Model()
    with torch.inference_mode():
        model.cache = torch.zeros(2)
    log = BufferLog([model])
    log.remember_step()
    with torch.inference_mode():
        model.cache += 1
    log.remember_step()
    model.cache = torch.ones(2) * 5
    log.restore()
    assert model.cache.tolist() == [1, 1]


def test_what_stays_as_it_is_is_not_copied():
    model = Model()
    log = BufferLog([model])
    copied = [copy._version for copy in log._copies]
    for _ in range(3):
        batch_norm(model)
        in_place(model)
        log.remember_step()
    times = [copy._version - before for copy, before in zip(log._copies, copied, strict=True)]
    names = [name for _, name in log._slots]
    assert {name for name, number in zip(names, times, strict=True) if number} == {
        "running_mean",
        "running_var",
        "num_batches_tracked",
        "count",
    }


def test_other_values_are_taken_over_and_remembered():
    model, other = Model(), Model()
    log = BufferLog([model])
    for change in (batch_norm, in_place, grown):
        change(other)
    log.set(BufferLog([other]).tensors())
    expected = values(other)
    torch.testing.assert_close(values(model), expected)
    in_place(model)
    log.restore()
    torch.testing.assert_close(values(model), expected)


def test_large_buffers_are_broadcast_when_a_rank_has_changed_one_and_only_then():
    run_ranks(LARGE, 2)


LARGE = """
import torch
from torch.nn.parallel import DistributedDataParallel
from raysgd.torch import ddp
from raysgd.torch.undo import BufferLog

join()
module = torch.nn.Linear(2, 2)
module.register_buffer("table", torch.zeros(2**19))
module.register_buffer("late", None)
model = ddp.ReplicatedModel(module)
log = BufferLog([model])
model.ask_before_broadcast(log)
broadcast, sent = DistributedDataParallel._sync_buffers, []
DistributedDataParallel._sync_buffers = lambda model: (sent.append(step), broadcast(model))
for step in range(5):
    if step == 3 and rank == 0:
        module.table[7] = 5.0
    model(torch.ones(1, 2)).sum().backward()
    log.remember_step()
    if step == 4:
        module.late = torch.full((3,), float(rank))
for step in range(5, 7):
    model(torch.ones(1, 2)).sum().backward()
    log.remember_step()
assert sent == [0, 3, 5, 6], sent
assert module.late.tolist() == [0.0] * 3
assert module.table[7] == 5.0
log.restore()
assert module.table[7] == 5.0
with model.join():
    for step in range(7, 9 + rank):
        model(torch.ones(1, 2)).sum().backward()
print("good")
"""
