"""Models wrapped in ReplicatedModel or DistributedDataParallel, in a group of one."""

import copy
import pickle
import re
from types import SimpleNamespace

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from raysgd import TrainingOperator
from raysgd._internal.runner import WorkerContext
from raysgd.torch.modules import has_only_running_statistics
from raysgd.torch.options import TorchSettings
from raysgd.torch.strategies import replicated_model
from raysgd.torch.strategies.replicated_exchange import DDPExchange, UserDDPExchange
from raysgd.torch.strategies.replicated_model import ReplicatedModel
from raysgd.torch.train_state import TorchTrainState


def test_validation_does_not_communicate(process_group, monkeypatch):
    wrapped = ReplicatedModel(torch.nn.BatchNorm1d(2))
    calls = []
    monkeypatch.setattr(
        DistributedDataParallel,
        "forward",
        lambda self, *inputs: calls.append(1) or self.module(*inputs),
    )
    with torch.no_grad():
        wrapped(torch.ones(2, 2))
    with torch.inference_mode():
        wrapped(torch.ones(2, 2))
    assert not calls
    wrapped(torch.ones(2, 2))
    assert calls
    wrapped = DistributedDataParallel(torch.nn.BatchNorm1d(2))
    exchange = UserDDPExchange(SimpleNamespace(models=[wrapped], accumulation_steps=1))
    exchange.wrap({}, {})

    def validate():
        with exchange.evaluating():
            assert not wrapped.require_forward_param_sync
            raise KeyError

    with pytest.raises(KeyError):
        validate()
    assert wrapped.require_forward_param_sync


def test_an_error_names_the_private_method_that_a_version_of_pytorch_lacks(
    process_group, monkeypatch
):
    monkeypatch.delattr(DistributedDataParallel, "_post_forward")
    with pytest.raises(
        RuntimeError, match=rf"PyTorch {re.escape(torch.__version__)}: .*no _post_f"
    ):
        ReplicatedModel(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("static", [False, True])
def test_rebuild_keeps_the_wrapper_and_its_module(process_group, static):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    settings = {
        "find_unused_parameters": not static,
        "gradient_as_bucket_view": True,
        "static_graph": static,
    }
    wrapped = ReplicatedModel(module, bucket_cap_mb=3, **settings)
    wrapped.broadcast_buffers = settings["broadcast_buffers"] = False
    wrapped(torch.ones(2, 2)).sum().backward()
    wrapped.eval()
    before = copy.deepcopy(module.state_dict())
    reducer = wrapped.reducer
    replicated_model.rebuild_reducer(wrapped, replicated_model.averaged_parameters(wrapped))
    assert wrapped.module is module
    assert wrapped.reducer is not reducer
    assert not wrapped.training
    assert {name: getattr(wrapped, name) for name in settings} == settings
    assert wrapped.bucket_bytes_cap == 3 * 2**20
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    module.train()
    wrapped(torch.ones(2, 2)).sum().backward()


def test_parameters_that_are_frozen_later_stay_frozen_and_are_averaged(process_group):
    def fail(state, bucket):
        raise RuntimeError("the connection is broken")

    module = torch.nn.Linear(2, 2)
    wrapped = ReplicatedModel(module)
    wrapped.register_comm_hook(None, fail)
    module.bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match="connection"):
        wrapped(torch.ones(2, 2)).sum().backward()
    assert not module.bias.requires_grad
    wrapped = DistributedDataParallel(torch.nn.Linear(1, 1))
    wrapped.module.bias.requires_grad_(False)
    assert replicated_model.averaged_parameters(wrapped) == {"weight": True, "bias": True}


@pytest.mark.parametrize("wrapper", [ReplicatedModel, DistributedDataParallel])
def test_rebuild_averages_parameters_that_were_frozen_meanwhile(process_group, wrapper):
    """The parameters stay frozen. GAN code freezes the discriminator between batches."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].bias.requires_grad_(False)
    wrapped = wrapper(model)
    required = replicated_model.averaged_parameters(wrapped)
    for frozen in (["0.weight"], list(required), []):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        replicated_model.rebuild_reducer(wrapped, required)
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad == (name not in frozen)
        assert wrapped._get_ddp_logging_data()["num_parameter_tensors"] == 3


def test_rebuilt_wrapper_equals_that_of_a_new_worker(process_group):
    """A surviving worker may rebuild between two micro-batches of a step."""
    wrapped = ReplicatedModel(torch.nn.Linear(2, 2))
    with wrapped.no_sync():
        wrapped(torch.ones(1, 2)).sum().backward()
    assert not wrapped.require_forward_param_sync
    replicated_model.rebuild_reducer(wrapped, replicated_model.averaged_parameters(wrapped))
    assert wrapped.require_forward_param_sync
    assert wrapped.require_backward_grad_sync
    exchange = DDPExchange(SimpleNamespace(models=[wrapped], accumulation_steps=1))
    exchange.use_wrappers(())
    wrapped(torch.ones(1, 2)).sum().backward()
    exchange.roll_back(None)
    assert wrapped._passes.first_pass is None


def test_rebuild_keeps_hooks_unless_their_state_differs_between_workers(process_group):
    def hook(state, bucket):
        states.append(state)
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    wrapped = ReplicatedModel(torch.nn.Linear(2, 2))
    seen = []
    wrapped.register_forward_pre_hook(lambda *_: seen.append("before"))
    wrapped.register_forward_hook(lambda *_, **__: seen.append("after"), with_kwargs=True)
    wrapped.register_full_backward_hook(lambda *_: seen.append("backward"))
    wrapped.register_state_dict_pre_hook(lambda *_: seen.append("saved"))
    replicated_model.rebuild_reducer(wrapped, replicated_model.averaged_parameters(wrapped))
    wrapped(torch.ones(1, 2, requires_grad=True)).sum().backward()
    wrapped.state_dict()
    assert seen == ["before", "after", "backward", "saved"]
    for state_of in (lambda wrapped: None, lambda wrapped: wrapped.process_group):
        wrapped = ReplicatedModel(torch.nn.Linear(2, 2))
        wrapped.register_comm_hook(state_of(wrapped), hook)
        states = []
        required = replicated_model.averaged_parameters(wrapped)
        for _ in range(2):
            replicated_model.rebuild_reducer(wrapped, required)
        wrapped(torch.ones(1, 2)).sum().backward()
        assert states == [state_of(wrapped)]
    wrapped = ReplicatedModel(torch.nn.Linear(2, 2))
    wrapped.register_comm_hook({}, hook)
    warning = replicated_model.rebuild_reducer(wrapped, required)
    assert re.search("removed the communication hook 'hook'.*a dict", warning)
    states.clear()
    wrapped(torch.ones(1, 2)).sum().backward()
    assert not states


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([torch.nn.Linear(2, 2)], True),
        ([torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)], True),
        ([torch.nn.BatchNorm1d(2), Counting()], False),
        ([torch.nn.SyncBatchNorm(2)], False),
    ],
)
def test_only_running_statistics(layers, expected):
    assert has_only_running_statistics(torch.nn.Sequential(*layers)) is expected


# ---- a wrapped model behaves like its module


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 2))
        self.temperature = 1.0

    def encode(self, x):
        return x @ self.weight

    def forward(self, x):
        return self.encode(x) / self.temperature


def test_wrapper_has_the_attributes_of_its_module(process_group):
    model = Encoder()
    wrapped = ReplicatedModel(model)
    wrapped.temperature, wrapped.epoch = 2.0, 1  # the module lacks the second
    assert wrapped.weight is model.weight
    assert (model.temperature, vars(model)["epoch"]) == (2.0, 1)
    del wrapped.epoch
    assert torch.equal(wrapped.encode(torch.eye(2)), model.weight)
    assert not hasattr(model, "epoch")
    compiled = ReplicatedModel(torch.compile(model, backend="eager"))
    for each in (model, wrapped, compiled):
        assert TrainingOperator.unwrapped(None, each) is model
    with pytest.raises(AttributeError, match="tempperature"):
        _ = wrapped.tempperature
    copied = pickle.loads(pickle.dumps(wrapped))
    assert copied.temperature == 2.0


class Nested(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        self.scale = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("shift", torch.zeros(2))

    def train(self, mode=True):
        super().train(mode)
        self.body[1].eval()
        return self

    def forward(self, x):
        return self.body(x) * self.scale + self.shift


@pytest.mark.parametrize(
    "names",
    [
        lambda m: [name for name, _ in m.named_parameters()],
        lambda m: [name for name, _ in m.named_buffers()],
        lambda m: [name for name, _ in m.named_modules()],
        lambda m: [name for name, _ in m.named_children()],
        lambda m: [type(each) for each in m.modules()],
        lambda m: [type(each) for each in m.children()],
        lambda m: [*m.state_dict()],
        lambda m: [*torch.nn.ModuleDict({"a": m}).state_dict()],
        lambda m: [name for name, _ in torch.nn.ModuleDict({"a": m}).named_parameters()],
    ],
)
def test_wrapper_has_the_names_of_its_module(process_group, names):
    model = Nested()
    assert names(ReplicatedModel(model)) == names(model)


class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.module = Nested()


@pytest.mark.parametrize("make", [Nested, Outer])
@pytest.mark.parametrize("place", [lambda m: m, lambda m: torch.nn.ModuleDict({"a": m})])
def test_wrapper_loads_the_state_of_its_module(process_group, place, make):
    source, target = make(), make()
    state = place(source).state_dict()
    result = place(ReplicatedModel(target)).load_state_dict(state, strict=False)
    assert result == ([], [])
    torch.testing.assert_close(target.state_dict(), source.state_dict(), rtol=0, atol=0)


def test_wrapper_has_the_mode_dtype_and_new_modules_of_its_module(process_group):
    model = Nested()
    wrapped = ReplicatedModel(model)
    assert wrapped.eval() is wrapped
    assert not model.training
    model.train()
    assert wrapped.training
    wrapped.train()
    assert not model.body[1].training
    assert wrapped.double() is wrapped
    dtypes = {tensor.dtype for tensor in (*model.parameters(), *model.buffers())}
    assert dtypes <= {torch.float64, torch.int64}
    wrapped.head = torch.nn.Linear(2, 1)
    wrapped.register_buffer("seen", torch.zeros(1))
    assert {"head.weight", "seen"} <= {*model.state_dict()} == {*wrapped.state_dict()}


def test_wrapper_has_the_items_of_its_module(process_group):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    wrapped = replicated_model.wrap(model, torch.device("cpu"), {})
    assert (len(wrapped), [*wrapped], wrapped[0]) == (2, [*model], model[0])
    wrapped[1] = torch.nn.Tanh()
    assert isinstance(model[1], torch.nn.Tanh)
    del wrapped[1]
    assert len(model) == 1
    assert wrapped
    assert len(pickle.loads(pickle.dumps(wrapped))) == 1
    assert replicated_model.wrap(Encoder(), torch.device("cpu"), {})


def test_a_sanity_check_restores_attributes_of_a_wrapper(process_group):
    state = TorchTrainState(TorchSettings(context=WorkerContext(has_process_group=True)))
    model = replicated_model.wrap(torch.nn.Linear(1, 1), torch.device("cpu"), {})
    model.calls, state.models = 0, [model]
    with state.preserving_models():
        model.calls += 1
    assert model.calls == 0
