"""TorchMetrics metrics equal those of one pass, however the data are divided among workers."""

import functools
import pickle
import sys

import numpy as np
import pytest
import torch
import torchmetrics
from torchmetrics import MetricCollection
from torchmetrics.classification import (
    BinaryAUROC,
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)
from torchmetrics.regression import MeanSquaredError, PearsonCorrCoef, R2Score
from torchmetrics.wrappers import ClasswiseWrapper, MultioutputWrapper

from raysgd import TrainingOperator
from raysgd.metrics import merge_worker_metrics
from raysgd.operators import ImageClassifier, WithMetrics
from raysgd.testing import run_operator
from tests.operators import Classifier
from tests.unit.operators.samples import digits
from tests.unit.operators.test_image_classifier import make_model


class Digits(WithMetrics, ImageClassifier):
    def build_metrics(self, config):
        return {"f1": MulticlassF1Score(num_classes=10, average="macro")}


class Direct(WithMetrics, TrainingOperator):
    """Passes its batches to the metrics unchanged."""

    def setup(self, config):
        model = torch.nn.Linear(1, 1)
        self.register(models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1))

    def validate_batch(self, batch, batch_info):
        self.update_metrics(*batch)
        return {"num_samples": len(batch[0])}


draw = torch.Generator().manual_seed(0)
CLASSES = (torch.randn(60, 4, generator=draw), torch.randint(4, (60,), generator=draw))
BINARY = (torch.rand(60, generator=draw), torch.randint(2, (60,), generator=draw))
NUMBERS = (torch.randn(60, generator=draw), torch.randn(60, generator=draw))
PAIRS = (torch.randn(60, 2, generator=draw), torch.randn(60, 2, generator=draw))


METRICS = {
    "f1": (lambda: MulticlassF1Score(num_classes=4, average="macro"), CLASSES),
    "vector": (lambda: MulticlassAccuracy(num_classes=4, average=None), CLASSES),
    "matrix": (lambda: MulticlassConfusionMatrix(num_classes=4), CLASSES),
    "dict": (lambda: ClasswiseWrapper(MulticlassAccuracy(num_classes=4, average=None)), CLASSES),
    "list": (lambda: BinaryAUROC(), BINARY),
    "bins": (lambda: BinaryAUROC(thresholds=20), BINARY),
    "mse": (lambda: MeanSquaredError(), NUMBERS),
    "r2": (lambda: R2Score(), NUMBERS),
    "pearson": (lambda: PearsonCorrCoef(), NUMBERS),
    "wrapper": (lambda: MultioutputWrapper(MeanSquaredError(), num_outputs=2), PAIRS),
    "composed": (lambda: torchmetrics.MaxMetric() + 1, None),
}


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("cuts", [[60], [1, 30, 60]], ids=len)
def test_parts_give_what_one_pass_gives(name, cuts):
    """Each part goes to one worker, in batches of up to 16 samples."""
    metric, data = METRICS[name]

    def update(metric, *columns):
        metric.update(*(columns if data is not None else columns[:1]))

    columns = NUMBERS if data is None else data
    whole = metric()
    update(whole, *columns)
    parts, start = [], 0
    for stop in cuts:
        config = {"metrics": lambda config: {"it": metric()}}
        operator = run_operator(Direct, config)
        operator.update_metrics = functools.partial(update, operator.validation_metrics["it"])
        batches = [
            tuple(column[a : min(a + 16, stop)] for column in columns)
            for a in range(start, stop, 16)
        ]
        parts.append(pickle.loads(pickle.dumps(operator.validate(iter(batches)))))
        start = stop
    idle = run_operator(Direct, config).validate(iter([]))
    found = merge_worker_metrics([*parts, idle])
    expected = whole.compute()
    if isinstance(expected, dict):
        expected = {f"val_it_{key}": value.item() for key, value in expected.items()}
    else:
        indexed = np.ndenumerate(expected.numpy())
        expected = {"_".join(["val_it", *map(str, index)]): value for index, value in indexed}
    assert {k: v for k, v in found.items() if k.startswith("val_")} == pytest.approx(
        expected, abs=1e-6
    )
    assert all(type(found[key]) is float for key in expected)


def test_each_validation_resets_its_metrics_but_keeps_earlier_results():
    operator = run_operator(Direct, {"metrics": BinaryAUROC()})
    first = operator.validate(iter([BINARY]))
    again = operator.validate(iter([BINARY]))
    half = operator.validate(iter([tuple(column[:30] for column in BINARY)]))
    assert first["val_BinaryAUROC"] == again["val_BinaryAUROC"] != half["val_BinaryAUROC"]
    assert merge_worker_metrics([first])["val_BinaryAUROC"] == again["val_BinaryAUROC"]


def test_a_collection_has_its_prefix():
    collection = MetricCollection({"a": MeanSquaredError(), "b": R2Score()}, prefix="my_")
    found = run_operator(Direct, {"metrics": collection}).validate(iter([NUMBERS]))
    assert {"val_my_a", "val_my_b"} <= found.keys()


def test_the_default_validation_feeds_the_metrics():
    class Measured(WithMetrics, Classifier):
        pass

    config = {"metrics": MulticlassAccuracy(num_classes=2, average="micro")}
    operator = run_operator(Measured, config)
    batches = [{"input": x, "label": y} for x, y in operator.validation_loader]
    found = operator.validate(iter([*operator.validation_loader, *batches]))
    assert found["val_MulticlassAccuracy"] == pytest.approx(found["val_accuracy"], abs=1e-6)


def test_a_wrong_order_of_base_classes_is_an_error():
    class Wrong(ImageClassifier, WithMetrics):
        def build_metrics(self, config):
            return MulticlassAccuracy(num_classes=10)

    train, _ = digits()
    operator = run_operator(Wrong, {"model": make_model, "validation_data": train})
    with pytest.raises(RuntimeError, match="list WithMetrics first among the bases of Wrong"):
        operator.validate(iter(operator.validation_loader))


@pytest.mark.parametrize("given", [None, {}, "f1", {"f1": "macro"}, lambda config: 3])
def test_what_is_no_metric_is_refused(given):
    class Measured(WithMetrics, Classifier):
        pass

    with pytest.raises(ValueError, match=r"config\['metrics'\]|MetricCollection|Value"):
        run_operator(Measured, {"metrics": given})


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    config = {"model": make_model, "metrics": {"f1": None}}
    with pytest.raises(ImportError, match=r'needs torchmetrics.*"raysgd\[operators\]"'):
        run_operator(Digits, config)
