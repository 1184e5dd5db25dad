"""Models, loaders, and optimizers that a training function prepares, in this process."""

import copy
import pickle
from collections import namedtuple

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import train
from raysgd.torch.precision.native import NativeAmp
from raysgd.train import worker_session
from raysgd.train.torch import TorchAccelerator


@pytest.fixture(autouse=True)
def one_run(run):
    run(size=1)


def test_a_prepared_loader_has_the_attributes_of_the_loader():
    data = TensorDataset(torch.arange(20))
    loader = train.torch.prepare_data_loader(DataLoader(data, batch_size=4, drop_last=True))
    assert isinstance(loader, DataLoader)
    assert (loader.batch_size, loader.dataset, loader.drop_last) == (4, data, True)
    assert [batch.tolist() for (batch,) in loader] == torch.arange(20).reshape(5, 4).tolist()


@pytest.mark.parametrize(
    ("loader", "arguments", "said"),
    [
        ([1, 2], {}, r"list\): must be a PyTorch DataLoader"),
        (DataLoader([1, 2]), {"move_to_device": "cpu"}, "move_to_device='cpu'"),
        (
            DataLoader([1, 2]),
            {"add_dist_sampler": "auto"},
            "'auto'.*one of True, False, 'always'",
        ),
    ],
)
def test_wrong_arguments_of_loaders_are_errors(loader, arguments, said):
    with pytest.raises((TypeError, ValueError), match=said):
        train.torch.prepare_data_loader(loader, **arguments)


def test_a_frozen_model_is_not_wrapped(monkeypatch):
    monkeypatch.setattr("raysgd.train.torch.accelerator.world_size", lambda: 2)
    model = torch.nn.Linear(1, 1).requires_grad_(False)
    with pytest.raises(ValueError, match="Pass wrap_ddp=False"):
        train.torch.prepare_model(model)
    assert train.torch.prepare_model(model, wrap_ddp=False) is model
    with pytest.raises(TypeError, match=r"prepare_model\(wrap_ddp='fsdp'"):
        train.torch.prepare_model(model, wrap_ddp="fsdp")


@pytest.mark.parametrize(
    "prepare",
    [
        train.torch.accelerate,
        lambda: train.torch.prepare_model(torch.nn.Linear(1, 1)),
        lambda: TorchAccelerator(amp=True).get_device(),
    ],
)
def test_accelerate_is_called_once_and_first(prepare):
    prepare()
    with pytest.raises(RuntimeError, match="has to be called once"):
        train.torch.accelerate(amp=True)


def test_in_mixed_precision_a_model_computes_in_bfloat16_and_returns_float32():
    train.torch.accelerate(amp=True)
    seen = []

    class Model(torch.nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            seen.append(y.dtype)
            return {"y": y, "pair": namedtuple("Pair", "y n")(y, 1)}

        def __init_subclass__(cls):
            raise TypeError("prepare_model works without a subclass that users would see")

    model = train.torch.prepare_model(Model(2, 2))
    assert model.forward.func.__name__ == "_in_autocast"  # files with whole models contain it
    found = model(torch.ones(1, 2))
    assert seen == [torch.bfloat16]
    assert found["y"].dtype == found["pair"][0].dtype == torch.float32


@pytest.mark.parametrize("is_first", [True, False])
def test_a_scheduler_and_a_prepared_optimizer_work_together(is_first):
    train.torch.accelerate(amp=True)
    model = train.torch.prepare_model(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    if is_first:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    assert train.torch.prepare_optimizer(optimizer) is optimizer
    if not is_first:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    before = model.weight.detach().clone()
    optimizer.zero_grad()
    train.torch.backward(model(torch.ones(4, 2)).sum())
    optimizer.step()
    scheduler.step()
    assert not torch.equal(model.weight, before)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: 1)


class Scaling(torch.optim.SGD):
    """Divides the gradients itself, as fused optimizers do."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, *, grad_scaler=None):
        for parameter in self.param_groups[0]["params"] if grad_scaler else ():
            parameter.grad /= grad_scaler.get_scale()
        return super().step()


@pytest.mark.parametrize(
    ("optimizer_cls", "options"),
    [(torch.optim.SGD, {}), (Scaling, {}), (torch.optim.SGD, {"fused": True})],
)
def test_a_prepared_optimizer_steps_with_a_scaler(optimizer_cls, options):
    train.torch.accelerate(amp=True)
    precision = NativeAmp(torch.device("cpu"), torch.float16)
    worker_session.process_state.accelerator.precision = precision
    model = torch.nn.Linear(2, 1).to(torch.float16 if options else None)
    optimizer = train.torch.prepare_optimizer(optimizer_cls(model.parameters(), 1.0, **options))
    before = model.bias.item()
    train.torch.backward(model(model.weight).float().sum() / 2)
    optimizer.step()
    assert model.bias.item() == pytest.approx(before - 0.5, abs=1e-3)


def test_a_model_of_one_worker_has_the_attribute_of_a_wrapper():
    plain = torch.nn.Linear(2, 1)
    model = train.torch.prepare_model(plain)
    assert model.module is plain
    assert not hasattr(plain, "module")  # or code that unwraps models would not end
    assert not model.eval().module.training
    assert sorted(model.state_dict()) == ["bias", "weight"]
    twin = copy.deepcopy(model)
    assert twin.module.weight is twin.weight is not model.weight
    assert type(pickle.loads(pickle.dumps(model))) is torch.nn.Linear
    with model.no_sync(), model.join(True, enable=False):
        model(torch.ones(1, 2)).backward()
    own = type("Own", (torch.nn.Module,), {"join": abs, "forward": lambda self, x: self.join(x)})
    own.to = lambda self, device: self  # this machine may have no GPU
    assert train.torch.prepare_model(own(), torch.device("cuda"))(-3) == 3


@pytest.mark.parametrize("wrap", [torch.nn.Module.eval, torch.optim.swa_utils.AveragedModel])
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 2)])
def test_a_state_fits_groups_with_and_without_a_wrapper(sizes, wrap, process_group, monkeypatch):
    models = []
    for size in sizes:
        monkeypatch.setattr("raysgd.train.torch.accelerator.world_size", lambda size=size: size)
        models.append(wrap(train.torch.prepare_model(torch.nn.BatchNorm1d(2), "cpu")))
    next(models[0].parameters()).data += 1
    models[1].load_state_dict(models[0].state_dict())
    assert next(models[1].parameters()).tolist() == [2, 2]


def test_without_mixed_precision_an_optimizer_stays_as_it_is():
    model = train.torch.prepare_model(torch.nn.Linear(2, 1))
    plain = torch.optim.SGD(model.parameters(), lr=0.5)
    assert train.torch.prepare_optimizer(plain) is plain
    train.torch.backward(model(torch.ones(1, 2)).sum())
    assert model.weight.grad is not None


def test_the_same_seed_gives_the_same_numbers(monkeypatch):
    deterministic = torch.are_deterministic_algorithms_enabled()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    for name in ("deterministic", "benchmark"):
        monkeypatch.setattr(torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))
    try:
        drawn = []
        for _ in range(2):
            train.torch.enable_reproducibility(seed=3)
            drawn.append(torch.rand(3).tolist())
        assert drawn[0] == drawn[1]
    finally:
        torch.use_deterministic_algorithms(deterministic)
