"""Precisions, alone and in an operator: formats, loss scale, overflows, and state."""

import math
import sys
from itertools import islice

import pytest
import torch

from raysgd import TorchTrainer
from raysgd.errors import CheckpointError
from raysgd.loop.update import Update
from raysgd.metrics import AverageMeterCollection
from raysgd.testing import run_operator
from raysgd.torch.precision import PRECISIONS, Precision
from tests.operators import Classifier, no_synchronization, on_gpu, parameters
from tests.unit.torch import fake_apex

CPU = torch.device("cpu")
BATCH = (torch.randn(4, 8), torch.tensor([0, 1, 0, 1]))
HALF = {"use_fp16": True, "amp_dtype": torch.float16}
START = 2.0**16
"""The initial scale of the PyTorch GradScaler."""


class Overflowing(Classifier):
    """Overflows in the global steps that the config lists."""

    def train_batch(self, batch, batch_info):
        features, target = self.to_device(batch)
        with self.autocast():
            loss = self.criterion(self.model(features), target)
        if batch_info["global_step"] in self.config["overflow_at"]:
            loss = loss * float("inf")
        self.backward(loss, num_items=len(target))
        self.optimizer_step(self.optimizer)
        return {"train_loss": loss.detach(), "num_samples": len(target)}


def scaler_of(trainer):
    return trainer.get_local_operator()._train_state.precision.scaler


def one_layer(precision, count=1):
    """Return models with one weight of 1 and their optimizers, prepared by a precision."""
    models = [torch.nn.Linear(1, 1, bias=False) for _ in range(count)]
    for model in models:
        torch.nn.init.ones_(model.weight)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    precision.prepare(models, optimizers, None)
    return models, optimizers


# ---- formats


@pytest.mark.parametrize(
    ("use_fp16", "dtype", "computes_in"),
    [
        (False, None, torch.float32),
        (True, None, torch.bfloat16),
        (True, torch.bfloat16, torch.bfloat16),
        (True, torch.float16, torch.float16),
    ],
)
def test_forward_passes_compute_in_the_dtype(use_fp16, dtype, computes_in):
    operator = run_operator(Classifier, use_fp16=use_fp16, amp_dtype=dtype)
    seen = []
    operator.model[0].register_forward_hook(lambda *given: seen.append(given[-1].dtype))
    operator.train_batch(BATCH, {})
    operator.validate(iter([BATCH]))
    assert seen == [computes_in] * 2
    assert operator._train_state.precision.scales_loss == (dtype is torch.float16)
    # the weights stay in float32
    assert {p.dtype for p in operator.model.parameters()} == {torch.float32}


def test_custom_precision_needs_one_class_and_one_entry(monkeypatch):
    class Doubled(Precision):
        name = "twice"

        def backward(self, loss, is_last):
            (2 * loss).backward()

        def step(self, optimizer):
            optimizer.step()

    monkeypatch.setitem(PRECISIONS, "twice", Doubled)
    with pytest.raises(ValueError, match="amp_dtype is for native AMP"):
        run_operator(Classifier, use_fp16="twice", amp_dtype=torch.bfloat16)
    Doubled.takes_dtype = True
    operator = run_operator(Classifier, use_fp16="twice", amp_dtype=torch.bfloat16)
    plain = run_operator(Classifier, {"lr": 0.2})
    operator.train_batch(BATCH, {})
    plain.train_batch(BATCH, {})
    torch.testing.assert_close(parameters(operator), parameters(plain))


def test_missing_apex_is_an_error_before_setup(monkeypatch):
    monkeypatch.setitem(sys.modules, "apex", None)
    built = []

    class Noting(Classifier):
        def setup(self, config):
            built.append(1)

    with pytest.raises(ImportError, match=r"every worker.*github.com/NVIDIA/apex.*use_fp16=True"):
        TorchTrainer(training_operator_cls=Noting, use_local=True, use_gpu=False, use_fp16="apex")
    assert not built


# ---- the scale


def test_optimizer_without_gradients_steps():
    native = PRECISIONS[True](CPU, torch.float16)
    (first, second), optimizers = one_layer(native, 2)
    native.backward(first(torch.ones(1, 1)).sum(), True)
    for optimizer in optimizers:
        native.unscale(optimizer)
        native.step(optimizer)
    native.commit(Update())
    assert (first.weight.item(), second.weight.item()) == (0.0, 1.0)
    native.step(optimizers[0].zero_grad() or optimizers[0])
    native.commit(Update())
    assert native.scaler.get_scale() == START


# ---- overflows


def fused(models):
    """Return an optimizer that applies the loss scale within its step."""
    return torch.optim.Adam(models.parameters(), fused=True)


@pytest.mark.parametrize("make", [None, fused])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_overflow_skips_its_step(make_trainer, clip, make):
    largest = []

    class Clipping(Overflowing):
        def register(self, *, models, optimizers, **given):
            optimizers = make(models) if make else optimizers
            optimizers.register_step_pre_hook(
                lambda *_: largest.extend(p.grad.abs().max().item() for p in models.parameters())
            )
            return super().register(
                models=models, optimizers=optimizers, max_grad_norm=clip, **given
            )

    trainer = make_trainer(Clipping, {"overflow_at": [1, 2, 6]}, **HALF)
    before = trainer.train(num_steps=1) and parameters(trainer.get_local_operator()).clone()
    metrics = trainer.train(num_steps=1)
    assert torch.equal(parameters(trainer.get_local_operator()), before)
    assert scaler_of(trainer).get_scale() == START / 2
    # the skipped step counts, and so do its samples
    assert (metrics["num_samples"], trainer.global_step) == (8, 2)
    trainer.train(num_steps=6)
    assert scaler_of(trainer).get_scale() == START / 8
    assert not torch.equal(parameters(trainer.get_local_operator()), before)
    # hooks see unscaled gradients
    assert 0 < max(filter(math.isfinite, largest)) < 100


# ---- state


def test_states_load_with_and_without_scaler(make_trainer):
    half, full = make_trainer(**HALF), make_trainer()
    half.train()
    full.train()
    scale = half.state_dict()["amp_native"]
    half.load_state_dict(full.state_dict())
    assert half.state_dict()["amp_native"] == scale  # a state without scaler keeps the scale
    full.load_state_dict(half.state_dict())
    full.train()
    half.train()


@pytest.mark.parametrize(
    "scaler",
    [7, {}, {"scale": None}],
)
def test_damaged_scaler_is_an_error_before_anything_changes(make_trainer, scaler):
    trainer = make_trainer(**HALF)
    state = trainer.state_dict()
    if scaler and isinstance(scaler, dict):
        scaler = {**state["amp_native"], **scaler}
    trainer.train()
    before = parameters(trainer.get_local_operator()).clone()
    with pytest.raises(CheckpointError, match="is not a dict with the numbers of a GradScaler"):
        trainer.load_state_dict({**state, "amp_native": scaler})
    assert torch.equal(parameters(trainer.get_local_operator()), before)


# ---- Apex, with a stand-in


def test_apex_saves_its_state(monkeypatch, make_trainer):
    amp = fake_apex.install(monkeypatch)
    trainer = make_trainer(Overflowing, {"overflow_at": [1]}, use_fp16="apex")
    trainer.train()
    state = trainer.state_dict()
    assert state["amp_apex"] == {"loss_scaler0": {"loss_scale": START / 2, "unskipped": 3}}
    amp.scale = 1.0
    trainer.load_state_dict(state)
    assert amp.scale == START / 2


def test_apex_leaves_gradients_scaled_until_the_last_batch_of_a_group(monkeypatch, make_trainer):
    amp = fake_apex.install(monkeypatch)

    class Accumulating(Classifier):
        def register(self, **given):
            return super().register(
                **given,
                gradient_accumulation_steps=2,
                max_grad_norm=0.1,
                apex_args={"opt_level": "O1"},
            )

    trainer = make_trainer(Accumulating, {"shuffle": False}, use_fp16="apex")
    trainer.train()
    assert amp.models == [trainer.get_local_operator().model]
    assert trainer.get_local_operator().use_fp16_apex
    assert amp.calls[0] == ("initialize", {"opt_level": "O1"})
    assert amp.calls[1:] == [("scale_loss", delay) for delay in (True, False) * 2 + (False,)]
    plain = make_trainer(Accumulating, {"shuffle": False})
    plain.train()
    torch.testing.assert_close(
        parameters(trainer.get_local_operator()), parameters(plain.get_local_operator())
    )


# ---- on a GPU


@on_gpu
def test_on_a_gpu_float16_is_the_default_and_the_scaler_is_there(make_trainer):
    trainer = make_trainer(use_fp16=True, use_gpu=True)
    operator = trainer.get_local_operator()
    seen = []
    operator.model[0].register_forward_hook(lambda *given: seen.append(given[-1].dtype))
    trainer.train()
    assert set(seen) == {torch.float16}
    precision = operator._train_state.precision
    assert precision.scaler.scale(torch.ones((), device="cuda")).is_cuda


@on_gpu
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_on_a_gpu_the_default_loop_never_synchronizes(make_trainer, dtype):
    """The optimizer is fused. With other optimizers, GradScaler itself synchronizes.

    The steps 1, 2, 4, 8, ... look for ignored targets, and wait.
    """

    class Fused(Classifier):
        def register(self, *, models, optimizers, **given):
            optimizer = fused(models.cuda())
            return super().register(models=models, optimizers=optimizer, max_grad_norm=1, **given)

    arguments = {} if dtype is None else {"use_fp16": True, "amp_dtype": dtype}
    trainer = make_trainer(Fused, use_gpu=True, **arguments)
    trainer.train(num_steps=9)
    operator = trainer.get_local_operator()
    meters = operator._train_state.meters = AverageMeterCollection()
    batches = [operator.to_device(batch) for batch in islice(operator.train_loader, 6)]
    torch.cuda.synchronize()
    with no_synchronization():
        for index, batch in enumerate(batches):
            metrics = operator.train_batch(batch, {"batch_idx": index})
            meters.update(metrics, metrics["num_samples"])
            operator._train_state.commit(1, 0)


@on_gpu
def test_a_state_goes_from_a_gpu_to_the_cpu_and_back(make_trainer):
    trainer = make_trainer(Overflowing, {"overflow_at": [0]}, use_gpu=True, **HALF)
    trainer.train()
    other = make_trainer(Overflowing, {"overflow_at": []}, **HALF)
    other.load_state_dict(trainer.state_dict())
    assert scaler_of(other).get_scale() == START / 2
    trainer.load_state_dict(other.state_dict())
    trainer.train()
