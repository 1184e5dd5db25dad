"""Sharded optimizers and models: shards, transfers, recovery, and arguments."""

import contextlib
import copy
import itertools
import re
from dataclasses import replace

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from raysgd import ElasticConfig, TrainingOperator
from raysgd._internal.nested import map_leaves
from raysgd._internal.runner import WorkerContext
from raysgd.backends import create_backend
from raysgd.checkpoint.shards import collect_shards, merge_shards
from raysgd.cluster import large_values, serialization
from raysgd.errors import CheckpointError
from raysgd.loop.requests import TrainRequest
from raysgd.loop.update import Update
from raysgd.torch.options import TorchOptions, TorchSettings
from raysgd.torch.precision import PRECISIONS, Precision
from raysgd.torch.runner import build_operator
from raysgd.torch.state_access import TorchStateAccess
from raysgd.torch.strategies.sharded_optimizer import OptimizerShards
from raysgd.torch.strategies.shards import ShardLayout, plan_transfers
from raysgd.torch.train_state import TorchTrainState
from tests.conftest import (
    HAS_FULL_SHARDING,
    IN_SOAK,
    SHARDINGS,
    needs_full_sharding,
    needs_horovod,
)
from tests.operators import register_all
from tests.unit.torch.rounds import Round, check_equal

MOMENTS = ("forward", "backward", "step", "barrier", "passed", "update", "gathered", "after 0")
"""In the order of a step. From "passed" on, only some workers may have updated their shares."""


# ---- shards and transfers


@st.composite
def histories(draw):
    """Return the number of elements, and the workers of each generation."""
    total = draw(st.integers(1, 50))
    groups = [list(range(draw(st.integers(3, 6))))]
    for _ in range(draw(st.integers(1, 6))):
        group = list(groups[-1])
        if len(group) > 3 and draw(st.booleans()):
            group.remove(draw(st.sampled_from(group)))
        if draw(st.booleans()):
            group.insert(draw(st.integers(0, len(group))), max(itertools.chain(*groups)) + 1)
        groups.append(group)
    return total, groups


@given(histories(), st.booleans())
def test_one_copy_survives_one_loss_at_a_time(history, by_rows):
    total, groups = history
    parameters = [torch.empty(total, 2), torch.empty(3)]
    layout = ShardLayout(parameters, [0, 1], 1, by_rows)
    everything = {(which, n) for which, p in enumerate(parameters) for n in range(p.numel())}
    held = {groups[0][0]: [(which, 0, p.numel(), 0) for which, p in enumerate(parameters)]}
    for group in groups:
        shards = [layout.shard(rank, len(group)) for rank in range(len(group))]
        assert sorted(n for shard in map(elements, shards) for n in shard) == sorted(everything)
        planned = plan_transfers(shards, 1, 0, [held.get(worker, []) for worker in group])
        assert planned is not None
        for which, start, stop, _, source, _ in planned:  # each source holds what it sends
            has = [(a, b) for n, a, b, _ in held[group[source]] if n == which]
            assert any(a <= start and stop <= b for a, b in has)
        held = {
            worker: [t[:4] for t in planned if rank in t.dst] for rank, worker in enumerate(group)
        }
        for rank, worker in enumerate(group):
            has = {(which, n) for which, a, b, _ in held[worker] for n in range(a, b)}
            assert has == elements(shards[rank]) | elements(shards[rank - 1])


def elements(share):
    return {(which, n) for which, part in share.items() for n in range(*part)}


# ---- workers that leave and join


FULL_ROUND = Round(sharding="full", register={"max_grad_norm": 0.05})
CHOSEN = [
    # some workers commit the step in which others fail
    Round(leaves=[(2, 5, "fail gathered"), (1, 5, "fail gathered")]),
    # two workers without a common share fail together
    replace(FULL_ROUND, leaves=[(1, 3, "update"), (3, 3, "backward")], joins_at=6),
    # one worker remains
    Round(copies=3, leaves=[(1, 3, "update"), (2, 3, "update"), (3, 5, "step")], joins_at=6),
    # two updates of one optimizer are undone with the step of the other
    Round(leaves=[(2, 4, "after 1")], joins_at=6, num_optimizers=2, register=FULL_ROUND.register),
    replace(FULL_ROUND, copies=0, leaves=[(1, 3, "update")], is_lost=True),
    Round(leaves=[(1, 3, "update"), (2, 3, "update")], is_lost=True),
    # a worker without copies leaves after a notice
    Round(copies=0, moves=1, joins_at=6),
    replace(FULL_ROUND, copies=0, moves=1, joins_at=6),
    # memory runs out: before, within, and after the update
    replace(FULL_ROUND, leaves=[(1, 3, "fail passed")], joins_at=6),
    Round(leaves=[(1, 3, "fail within")], joins_at=6),
    replace(FULL_ROUND, leaves=[(1, 3, "fail within")], joins_at=6),
    Round(copies=0, leaves=[(1, 3, "fail within")], is_lost=True),
    # before the first forward pass
    replace(FULL_ROUND, leaves=[(1, 0, "fail forward")]),
    replace(FULL_ROUND, leaves=[(1, 3, "update"), (2, None, "validate")]),
]


CHOSEN += [
    Round(sharding=sharding, leaves=[(n % 4, 4, moment)], joins_at=6 if n % 2 else None)
    for n, moment in enumerate(MOMENTS)
    for kind, sharding in enumerate(["optimizer", "full"])
    if IN_SOAK or n // 2 % 2 == kind
]
if not HAS_FULL_SHARDING:
    CHOSEN = [each for each in CHOSEN if each.sharding != "full"]


@pytest.mark.slow("four processes train and leave at each moment of a step")
@pytest.mark.parametrize("given", CHOSEN)
def test_losses_and_errors_give_the_result_of_one_process(workers, given):
    workers(given)


@st.composite
def rounds(draw):
    """Return a round that loses one worker, and later perhaps another."""
    steps = st.integers(0, 3)
    first, second = draw(st.permutations(range(4)))[:2]
    leaves = [(first, draw(steps), draw(st.sampled_from(MOMENTS)))]
    if draw(st.booleans()):
        leaves.append(
            (second, leaves[0][1] + draw(st.integers(1, 2)), draw(st.sampled_from(MOMENTS)))
        )
    sharding = draw(st.sampled_from(["optimizer", *["full"] * HAS_FULL_SHARDING]))
    return Round(
        sharding=sharding,
        optimizer=draw(st.sampled_from(["AdamW", "SGD"])),
        num_optimizers=1 if sharding == "full" else draw(st.integers(1, 2)),
        register={
            "gradient_accumulation_steps": draw(st.sampled_from([1, 2])),
            "max_grad_norm": draw(st.sampled_from([None, 0.05])),
        },
        leaves=leaves,
        joins_at=draw(st.sampled_from([None, 6])),
    )


@pytest.mark.slow("four processes train and leave at each moment of a step")
@pytest.mark.timeout(900 if IN_SOAK else 300)
@settings(
    max_examples=100 if IN_SOAK else 3,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # no shrinking: processes may hang
    suppress_health_check=list(HealthCheck),
    deadline=None,
)
@given(rounds())
def test_random_losses_give_the_result_of_one_process(workers, given):
    workers(given)


# ---- in this process


def divided(optimizer, copies=None):
    each = OptimizerShards(optimizer, copies, TorchTrainState(TorchSettings()))
    each.begin_sharding()
    return each


def test_each_worker_holds_and_loads_only_its_share_of_the_state(process_group, monkeypatch):
    model = with_parameter(weight=torch.randn(30, 70), bias=torch.randn(11))
    optimizer, own = (torch.optim.AdamW(model.parameters()) for _ in "12")
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    state = optimizer.state_dict()
    arguments = {"models": model, "optimizers": own, **ON, "sharding_args": {"num_copies": 0}}
    train_state = build(lambda: arguments, ALONE)._train_state
    loaded = []
    own.register_load_state_dict_pre_hook(lambda _, given: loaded.extend(given["state"]))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    shards = []
    for rank in range(4):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        fresh = torch.optim.AdamW(model.parameters())
        fresh.load_state_dict(state)
        shards.append(divided(fresh, copies=0).pieces_to_save())
        assert fresh.state_dict()["state"] == {}
        held = sum(v.nbytes for part in shards[-1] for v in part["values"].values() if v.dim())
        assert held <= 1.15 / 4 * sum(8 * parameter.numel() for parameter in model.parameters())
        old = map_leaves(state, lambda x: x.item() if getattr(x, "shape", 0) == () else x)
        for load in (TorchStateAccess(train_state).load, train_state.placement.load_shards):
            load({"models": [model.state_dict()], "optimizers": [old]})
        check_equal(train_state.placement.shards_to_save(), [shards[-1]])
        assert not loaded  # whole tensors, which would be on the device
    parts = {"optimizers": [{**state, "state": {}}], "shards": [[each] for each in shards]}
    check_equal(merge_shards(parts)["optimizers"], [state])
    with pytest.raises(CheckpointError, match="gaps or overlap"):
        merge_shards({**parts, "shards": parts["shards"][:3]})


def test_schedulers_and_hooks_see_the_parameters_in_the_optimizer(process_group):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    each = divided(optimizer)
    seen = []
    optimizer.register_step_post_hook(lambda o, *_: seen.append(o.param_groups[0]["params"]))
    parameter.grad = torch.ones(3)
    optimizer.step()
    scheduler.step()
    each.commit(Update())
    assert seen[0][0] is parameter
    assert parameter.tolist() == [0, 0, 0]
    with torch.no_grad():
        parameter.fill_(5.0)  # changes by user code stay
    optimizer.step()
    assert parameter.tolist() == [4.5, 4.5, 4.5]


def test_direct_steps_keep_gradients_and_refuse_closures_and_added_parameters(process_group):
    operator = build(lambda: ON, ALONE)
    for step in (operator.optimizer_step, torch.optim.SGD.step):
        operator.backward(operator.model(torch.ones(1, 8)).sum())
        step(operator.optimizer)
    assert all(p.grad is not None for p in operator.model.parameters())
    with pytest.raises(RuntimeError, match="without a closure"):
        operator.optimizer.step(lambda: None)
    operator.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(RuntimeError, match="Call add_param_group before register"):
        operator.optimizer.step()


@contextlib.contextmanager
def group_of_one():
    """Yield a function that leaves the process group and enters a new one."""
    backend = create_backend("gloo", 30)

    def enter():
        if torch.distributed.is_initialized():
            backend.teardown()
        backend.setup(ALONE, backend.create_rendezvous(["127.0.0.1"]))

    enter()
    try:
        yield enter
    finally:
        backend.teardown()
        backend.close()


ALONE = WorkerContext(has_process_group=True)


def start(given, context=ALONE):
    runner = given.make_runner()
    runner.setup(context)
    return runner


def whole_state(runner):
    return merge_shards(collect_shards([runner.state_dict()]))


def load_late(runner, state):
    """Load a state whose arrays arrive late, as those of large states do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_values, "_SMALL_BYTES", 0)
        patch.setattr(serialization, "_LARGE_BYTES", 0)
        packed = serialization.pack(state)
        with large_values.serve_value(packed, ["127.0.0.1"]) as address:
            large = large_values.IncomingValue(address)
            runner.load_state_dict(large.value, large)
            large.close()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # about operations in place
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("is_new", [False, True])
def test_a_state_can_be_loaded_before_the_worker_enters_a_group(sharding, is_new):
    with group_of_one() as enter:
        runner = start(Round(sharding=sharding))
        runner.handle(TrainRequest(call_number=0, until_step=3))
        state = copy.deepcopy(whole_state(runner))  # it shares memory with the runner
        shards = copy.deepcopy(collect_shards([runner.state_dict()]))
        runner.handle(TrainRequest(call_number=0, until_step=5))
        later = copy.deepcopy(whole_state(runner))
        if is_new:  # as after a restart of all workers
            runner.teardown()
            runner = start(Round(sharding=sharding), replace(ALONE, is_alone=True))
        load_late(runner, shards if is_new else copy.deepcopy(state))
        enter()
        runner.rejoin(replace(ALONE, generation=1), 0)
        check_equal(whole_state(runner), state)
        runner.handle(TrainRequest(call_number=1, until_step=5))
        check_equal(whole_state(runner)["models"], later["models"])
        runner._hosted_loop.state_access.unsharded_models()
        runner.teardown()


# ---- errors


class Refused(TrainingOperator):
    def setup(self, config):
        register_all(self, **config["register"]())


def with_sgd(model, *others, kind=torch.optim.SGD, **more):
    optimizer = kind([*model.parameters(), *others], lr=0.1)
    return {"models": model, "optimizers": optimizer, **more}


def linear():
    return torch.nn.Linear(2, 2)


def with_parameter(**parameters):
    model = linear()
    for name, value in parameters.items():
        setattr(model, name, torch.nn.Parameter(value))
    return model


ON = {"sharding": "optimizer"}
FULL = {"sharding": "full"}
REFUSED = {
    'must be "optimizer", "full", or None': {"sharding": "all"},
    "has no effect without sharding": {"sharding_args": {"num_copies": 1}},
    "must be a dict": {**ON, "sharding_args": [1]},
    "takes only 'num_copies'": {**ON, "sharding_args": {"wrap_classes": 1}},
    "'num_copies', 'wrap_classes'": {**FULL, "sharding_args": {"unload": 1}},
    r"with register\(ddp_args": {**FULL, "ddp_args": {"bucket_cap_mb": 1}},
    "amp_dtype=torch.bfloat16": FULL,
    "got 2 optimizers": lambda: {k: [v, v] for k, v in with_sgd(linear()).items()} | FULL,
    r"Linear\.scale has no contiguous rows": lambda: with_sgd(
        with_parameter(scale=torch.ones(())), **FULL
    ),
    "does not work with torch.compile": lambda: with_sgd(torch.compile(linear()), **FULL),
    "does not work with DistributedDataParallel": lambda: with_sgd(
        DistributedDataParallel(linear()), **FULL
    ),
    "mapping of shares": FULL,
    'does not work with backend="horovod"': FULL,
    "at least 0": {**ON, "sharding_args": {"num_copies": -1}},
    "does not work with wrap_ddp=False": ON,
    "cannot shard Muon": lambda: with_sgd(torch.nn.Linear(2, 2, bias=False), kind=torch.optim.Muon),
    "sparse gradients": lambda: with_sgd(torch.nn.Embedding(4, 2, sparse=True)),
    "1 parameters that are in no registered model": lambda: with_sgd(
        linear(), torch.nn.Parameter(torch.ones(2))
    ),
    "is not contiguous": lambda: with_sgd(with_parameter(weight=torch.ones(2, 4)[:, ::2])),
}
"""Arguments of ``register``, by the error that they cause."""
OPTIONS = {
    "amp_dtype=torch.bfloat16": {"use_fp16": True, "amp_dtype": torch.float16},
    "mapping of shares": {"elastic": ElasticConfig(shares="measured")},
    'does not work with backend="horovod"': {"backend": "horovod"},
    "does not work with wrap_ddp=False": {"wrap_ddp": False},
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`")  # by torch.compile
@pytest.mark.parametrize(
    "said", [pytest.param(s, marks=[needs_horovod] * ("horovod" in s)) for s in REFUSED]
)
def test_register_refuses_what_cannot_be_sharded(process_group, said):
    found = REFUSED[said]
    given = (lambda: {**ON, **found()}) if callable(found) else (lambda: found)
    with pytest.raises((TypeError, ValueError), match=said):
        build(given, WorkerContext(), **OPTIONS.get(said, {}))


def build(register, context, **options):
    options = TorchOptions(training_operator_cls=Refused, **options)
    settings = TorchSettings(options=options, context=context)
    return build_operator(Refused, {"register": register}, settings)


def test_full_sharding_names_the_pytorch_that_it_needs(process_group, monkeypatch):
    monkeypatch.delattr(FSDPModule, "reset_iter_state", raising=False)
    with pytest.raises(ImportError, match=rf"needs PyTorch 2\.13 .*{re.escape(torch.__version__)}"):
        build(lambda: FULL, ALONE)


@needs_full_sharding
def test_full_sharding_computes_in_the_dtype_of_an_added_precision(process_group, monkeypatch):
    class Lower(Precision):
        takes_dtype = True

    monkeypatch.setitem(PRECISIONS, "lower", Lower)
    arguments = {"use_fp16": "lower", "amp_dtype": torch.bfloat16}
    operator = build(lambda: FULL, ALONE, **arguments)
    assert operator.model(torch.ones(1, 8)).dtype == torch.bfloat16


@needs_full_sharding
def test_later_changes_that_sharding_does_not_support_raise(process_group):
    operator = build(lambda: {**FULL, "gradient_accumulation_steps": 2}, ALONE)
    train_state, model = operator._train_state, operator.model
    with pytest.raises(ValueError, match="does not work with averages of the weights"):
        operator._update_features.averaging.start(0.9, start_epoch=0)
    model[0].weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="Set requires_grad earlier"):
        train_state.exchange.check_parameters()
    model[0].weight.requires_grad_(True)
