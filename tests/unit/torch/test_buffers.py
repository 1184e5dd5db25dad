"""A failed step leaves buffers as they were after the step before."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from raysgd.torch.features.rollback import BufferCopies


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(2)
        self.register_buffer("table", torch.arange(6.0))
        self.register_buffer("average", torch.zeros(2))
        self.register_buffer("cache", torch.zeros(2))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("late", None)
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("wide", torch.zeros(1).expand(5))
        self.register_buffer("part", self.table[:2])


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


def of_other_forms(model):
    model.table += 1  # also those of its view
    model.sparse = model.sparse * 2


def removed(model):
    model.cache = None


def filled(model):
    model.late = torch.ones(3)


CHANGES = [of_other_forms, filled, batch_norm, in_place, replaced, grown, through_data, removed]


def values(model):
    return {name: None if b is None else b.clone() for name, b in model._buffers.items()} | {
        f"norm.{name}": buffer.clone() for name, buffer in model.norm.named_buffers()
    }


@given(
    steps=st.lists(st.lists(st.sampled_from(CHANGES), max_size=3), max_size=5),
    failing=st.lists(st.sampled_from(CHANGES), max_size=3),
    again=st.booleans(),
)
def test_restore_undoes_every_change_of_a_failed_step(steps, failing, again):
    model = Model()
    copies = BufferCopies([model])
    for changes in steps:
        for change in changes:
            change(model)
        copies.commit()
    for _ in range(1 + again):
        expected = values(model)
        for change in failing:
            change(model)
        copies.roll_back()
        torch.testing.assert_close(values(model), expected, rtol=0, atol=0)
