"""Warm-up of a replacement worker whose model user code compiles."""

import pytest
import torch
from torch.utils.data import DataLoader

from raysgd import TrainingOperator
from tests.operators import local, make_data, parameters, register_all

GRAPHS = []


def count(graph, inputs):
    """Record a graph and return it unchanged, as a backend of torch.compile."""
    GRAPHS.append(graph)
    return graph.forward


@pytest.fixture(autouse=True)
def graphs():
    torch._dynamo.reset()
    GRAPHS.clear()
    yield
    torch._dynamo.reset()
    GRAPHS.clear()


class Noisy(torch.nn.Module):
    """A model with running statistics and dropout, which a warm-up must not affect."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.drop = torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5)
        self.head = torch.nn.Linear(8, 2)

    def forward(self, features):
        return self.head(self.drop(self.norm(features)))


def in_place(model):
    model.compile(backend=count)
    return model


class Remembering(TrainingOperator):
    def setup(self, config):
        self.seen = []
        model = Noisy()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        register_all(self, models=config["compile"](model), optimizers=optimizer)
        self.register_data(train_loader=DataLoader(make_data(64), batch_size=16))

    def train_batch(self, batch, batch_info):
        self.seen.append(len(batch[0]))
        return super().train_batch(batch, batch_info)


@pytest.mark.parametrize("compile", [in_place, lambda model: torch.compile(model, backend=count)])
def test_warm_up_compiles_and_changes_nothing_else(compile):
    learnt = []
    for warms_up in (False, True):
        with local(Remembering, {"compile": compile}) as trainer:
            operator = trainer.get_local_operator()
            if warms_up:
                trainer._controller.members[0].worker.runner.warm_up()
                num_graphs = len(GRAPHS)
                assert num_graphs > 0
                assert operator.seen == []
            trainer.train()
            assert len(operator.seen) == 4
            learnt.append(parameters(operator))
            assert not warms_up or len(GRAPHS) == num_graphs
            assert type(trainer.get_model()) is Noisy
            state = trainer.state_dict()
            assert list(state["models"][0]) == list(Noisy().state_dict())
            with local(Remembering, {"compile": lambda model: model}) as plain:
                start, other = plain.state_dict(), plain.get_local_operator()
                plain.load_state_dict(state)
                assert torch.equal(parameters(other), learnt[-1])
                trainer.load_state_dict(start)
                assert not torch.equal(parameters(operator), learnt[-1])
        torch._dynamo.reset()
        GRAPHS.clear()
    assert torch.equal(*learnt)
