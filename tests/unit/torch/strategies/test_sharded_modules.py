"""The modules that ``fully_shard`` gathers separately, in a group of one."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from raysgd.torch.strategies.sharded_modules import ShardedModules
from tests.conftest import needs_full_sharding

pytestmark = needs_full_sharding

CPU = torch.device("cpu")


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, inputs):
        return inputs + self.inner(inputs)


def whole_parts(model):
    """Return whether the parameters of each part are gathered."""
    return [not isinstance(next(each.parameters()), DTensor) for each in model]


def sharded_modules(model):
    """Return whether each module is gathered separately."""
    return [
        type(module) not in (torch.nn.Linear, torch.nn.Sequential, Block)
        for module in model.modules()
    ]


def test_blocks_are_gathered_separately_and_the_same_modules_become_plain_again(process_group):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Block(), Block()).double()
    kinds = [type(module) for module in model.modules()]
    before, names = copy.deepcopy(model), [set(vars(module)) for module in model.modules()]
    inputs = torch.randn(2, 4, dtype=torch.float64)
    for wrap in (None, Block, [Block]):
        models = ShardedModules([model], wrap, None, CPU)
        values = [parameter.detach().clone() for parameter in model.parameters()]
        models.shard()
        assert sharded_modules(model) == [True, False, True, False, True, False]
        for number, value in enumerate(values):
            models.rows(number).copy_(value.view(-1))
        assert torch.equal(model(inputs), before(inputs))
        with pytest.raises(RuntimeError, match=r"Sequential is sharded and cannot be copied"):
            copy.deepcopy(model)
        there = []
        hook = model[2].inner.register_forward_hook(
            lambda *_, there=there: there.append(whole_parts(model))
        )
        with models.gathering_on_demand(), torch.no_grad():
            assert torch.equal(model(inputs), before(inputs))
            assert whole_parts(model) == [False, False, False]
        hook.remove()
        assert there == [[True, False, True]]
        models.unshard_with(values)
        assert [type(module) for module in model.modules()] == kinds
        assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())
        assert torch.equal(copy.deepcopy(model)(inputs), before(inputs))
        assert not any(module._forward_hooks for module in model.modules())
    assert [set(vars(module)) for module in model.modules()] == names


class Recomputed(Block):
    def forward(self, inputs):
        return torch.utils.checkpoint.checkpoint(super().forward, inputs, use_reentrant=False)


def test_hooks_and_recomputation_find_whole_parameters(process_group):
    model = torch.nn.Sequential(Recomputed(), Recomputed())
    before = copy.deepcopy(model)
    seen = []
    for block in model:
        block.register_forward_pre_hook(lambda block, _: seen.append(block.inner.weight.sum()))
    models = ShardedModules([model], None, None, CPU)
    values = [parameter.detach().clone() for parameter in model.parameters()]
    models.shard()
    for number, value in enumerate(values):
        models.rows(number).copy_(value.view(-1))
    inputs = torch.ones(1, 4)
    model(inputs).sum().backward()
    before(inputs).sum().backward()
    assert [each.item() for each in seen] == [block.inner.weight.sum() for block in before]
    for parameter, expected in zip(model.parameters(), before.parameters(), strict=True):
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.grad.to_local(), expected.grad)


def test_workers_that_evaluate_different_blocks_raise(process_group, monkeypatch):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Block(), Block())
    models = ShardedModules([model], None, None, CPU)
    models.shard()
    reduced = []

    def reduce(held, op):  # another rank is at the first block
        assert not reduced, "the ranks evaluated different blocks"
        reduced.append(held.tolist())
        held.copy_(torch.maximum(held, torch.tensor([0, 0])))

    monkeypatch.setattr(torch.distributed, "all_reduce", reduce)
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match="the same blocks in the same order on every worker"),
        models.gathering_on_demand(),
    ):
        model[1](torch.ones(2, 4))
    assert reduced == [[1, -1]]
    assert whole_parts(model) == [False, False, False]


def test_a_block_that_shares_a_parameter_is_gathered_with_the_rest(process_group):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Block(), Block())
    model[1].inner.weight = model[0].weight
    said = r"have no module of this class\. They have Block, Linear, Sequential"
    with pytest.raises(ValueError, match=said):
        ShardedModules([model], torch.nn.Conv2d, None, CPU)
    for wrap in (None, Block):
        models = ShardedModules([model], wrap, None, CPU)
        models.shard()
        assert sharded_modules(model) == [True, False, False, False, True, False]
        models.release()


def test_parameters_know_the_rank_in_the_newest_group():
    model = torch.nn.Linear(6, 6)
    models = ShardedModules([model], None, None, CPU)
    for rank in (1, 0):
        dist.init_process_group("fake", rank=rank, world_size=3, store=FakeStore())
        try:
            models.shard()
            assert model.weight.device_mesh.get_coordinate() == (rank,)
        finally:
            dist.destroy_process_group()
