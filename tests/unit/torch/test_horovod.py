"""Horovod's exchange of gradients, in a group of one."""

import pytest
import torch

from raysgd.torch.horovod import HorovodExchange
from tests.conftest import import_horovod


@pytest.fixture
def group(monkeypatch):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")  # or one alone would exchange nothing
    horovod = import_horovod("horovod.torch")
    horovod.init()
    yield
    horovod.shutdown()


def test_a_graph_of_a_failed_step_that_is_still_held_exchanges_nothing(group):
    """An exception's traceback may hold it; its hooks would take the names of the new ones."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = HorovodExchange(optimizer, [model], {}, 1)
    held = model(torch.ones(1, 3)).sum()
    exchange.abandon()
    exchange.rebuild()
    for _ in range(50):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert held.grad_fn is not None
