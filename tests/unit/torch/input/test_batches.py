"""Formats of batches and model outputs that the default train and validate methods accept."""

import dataclasses
from collections import UserDict, namedtuple
from types import SimpleNamespace

import pytest
import torch

from raysgd import TrainingOperator
from raysgd.testing import run_operator
from raysgd.torch.losses import logits_of
from tests.operators import register_with_sgd

FEATURES, TARGET = (
    torch.randn(6, 4, generator=torch.Generator().manual_seed(0)),
    torch.arange(6) % 3,
)


class Model(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        torch.nn.init.constant_(self.weight, 0.5)
        torch.nn.init.zeros_(self.bias)
        with torch.no_grad():
            self.weight[1] = 1.0


class TwoInputs(Model):
    def forward(self, x, mask):
        return super().forward(x * mask)


class WithLogits(Model):
    def forward(self, x):
        return SimpleNamespace(loss=None, logits=super().forward(x))


class WithLoss(Model):
    def forward(self, x, labels):
        logits = super().forward(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class TupleWithLoss(WithLoss):
    def forward(self, x, labels):
        return tuple(super().forward(x, labels).values())


class Divided(Model):
    def forward(self, x, mask):
        return super().forward(x / mask)


class MayMask(Model):
    def forward(self, x, mask=None):
        return super().forward(x)


class AnyNames(Model):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class Takes(Model):
    def forward(self, pair):
        return super().forward(pair[0] * pair[1])


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    mask: torch.Tensor
    truth: torch.Tensor


class Trained(TrainingOperator):
    def setup(self, config):
        criterion = config.get("criterion", torch.nn.CrossEntropyLoss())
        register_with_sgd(self, config["model"](), criterion=criterion)


ONES = torch.ones(6, 1)
Named = namedtuple("Named", ["x", "y"])
Masked = namedtuple("Masked", ["mask", "truth", "x"])
Unlike = namedtuple("Unlike", ["image", "mask", "truth"])
Labeled = namedtuple("Labeled", ["labels", "x"])
Image = namedtuple("Image", ["image", "mask"])
KINDS = {
    "tuple": (Model, (FEATURES, TARGET)),
    "list": (Model, [FEATURES, TARGET]),
    "named tuple": (Model, Named(FEATURES, TARGET)),
    "named tuple, by name": (Divided, Masked(ONES, TARGET, FEATURES)),
    "named tuple, one name unknown": (Divided, Unlike(FEATURES, ONES, TARGET)),
    "named tuple with all of forward's": (WithLoss, Labeled(TARGET, FEATURES)),
    "named tuple, an input has another name": (MayMask, Image(FEATURES, TARGET)),
    "named tuple, any names": (AnyNames, Named(FEATURES, TARGET)),
    "two inputs": (TwoInputs, (FEATURES, ONES, TARGET)),
    "nested, taken whole": (Takes, ((FEATURES, ONES), TARGET)),
    "dict": (TwoInputs, {"truth": TARGET, "x": FEATURES, "mask": ONES}),
    "mapping": (TwoInputs, UserDict(x=FEATURES, mask=ONES, y=TARGET)),
    "data class": (TwoInputs, Sample(FEATURES, ONES, TARGET)),
    "output with logits": (WithLogits, (FEATURES, TARGET)),
    "output with loss": (WithLoss, {"x": FEATURES, "labels": TARGET}),
    "output that begins with the loss": (TupleWithLoss, {"x": FEATURES, "labels": TARGET}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_batch_formats(kind):
    model, batch = KINDS[kind]
    plain = run_operator(Trained, {"model": Model})
    operator = run_operator(Trained, {"model": model})
    for trained in (plain, operator):
        trained.train_mode(True)
    expected = plain.train_batch((FEATURES, TARGET), {})
    assert operator.train_batch(batch, {}) == expected
    assert torch.equal(operator.model.weight, plain.model.weight)
    expected = plain.validate_batch((FEATURES, TARGET), {})
    found = operator.validate_batch(batch, {})
    assert {**expected, **found} == expected
    assert found["num_samples"] == 6


class WithAuxiliary(Model):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        logits = super().forward(x)
        return self.kind(logits, logits * 2) if self.training else logits


Inception = namedtuple("Inception", "logits aux_logits")
AUXILIARY = {
    "named tuple": Inception,
    "dict": lambda logits, aux: {"logits": logits, "aux_loss": aux.mean()},
    "like logits": lambda logits, aux: {"logits": logits, "deep": aux},
    "object": lambda logits, aux: SimpleNamespace(logits=logits, aux_logits1=aux, aux_logits2=None),
}


@pytest.mark.parametrize("kind", AUXILIARY)
def test_auxiliary_output_that_no_loss_uses_is_an_error(kind):
    operator = run_operator(Trained, {"model": lambda: WithAuxiliary(AUXILIARY[kind])})
    operator.train_mode(True)
    with pytest.raises(TypeError, match=r"has logits and (aux_lo|deep).*Register a criterion"):
        operator.train_batch((FEATURES, TARGET), {})
    operator.validate(iter([(FEATURES, TARGET)]))
    operator.train_mode(True)
    losses = torch.nn.functional.cross_entropy
    operator.criterion = lambda output, target: losses(logits_of(output), target)
    operator.train_batch((FEATURES, TARGET), {})


def test_loss_that_is_no_number_is_an_error():
    operator = run_operator(Trained, {"model": Model})
    operator.criterion = torch.nn.CrossEntropyLoss(reduction="none")
    methods = operator.train_batch, operator.validate_batch, lambda *_: operator.backward(0.5)
    for method in methods:
        with pytest.raises(ValueError, match=r"loss is float(32\[6\])?\. .* such as loss.mean\(\)"):
            method((FEATURES, TARGET), {})


def test_sample_with_a_scalar_target_counts_once():
    operator = run_operator(Trained, {"model": Model})
    operator.train_mode(True)
    for method in (operator.train_batch, operator.validate_batch):
        assert method((FEATURES[0], TARGET[0]), {})["num_samples"] == 1


@pytest.mark.parametrize(
    ("model", "batch", "said"),
    [
        (Model, FEATURES, r"The batch is float32\[6, 4\], and forward of Model takes \(input\)"),
        (Model, (FEATURES,), r"The batch is \(float32\[6, 4\]\), and"),
        (
            TwoInputs,
            {"x": FEATURES, "mask": ONES, "id": TARGET, "label": TARGET},
            r"label: int64\[6\]}, and forward of TwoInputs takes \(x, mask\)",
        ),
        (WithLogits, {"x": FEATURES}, r"has no loss, and the batch has no target"),
    ],
    ids=["a tensor", "no target", "two left over", "no loss"],
)
def test_error_shows_the_batch_and_the_arguments(model, batch, said):
    operator = run_operator(Trained, {"model": model})
    with pytest.raises(TypeError, match=said):
        operator.train_batch(batch, {})
