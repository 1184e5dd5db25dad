"""Losses and metrics, as plain means over the batch of a worker."""

import functools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

from raysgd.metrics import is_numeric  # noqa: E402
from raysgd.tf.losses import BatchLosses  # noqa: E402
from tests.conftest import examples  # noqa: E402

RNG = np.random.default_rng(0)
CLASSES = RNG.integers(0, 3, 12)
SCORES = RNG.normal(size=(12, 3)).astype("float32")
BITS = RNG.integers(0, 2, (12, 1)).astype("float32")
CHANCES = RNG.uniform(0.1, 0.9, (12, 1)).astype("float32")


def mean_loss(criterion, model=None):
    return BatchLosses(model or keras.Model(), criterion, None, {}).criterion


def measured(losses, target, output):
    """Return the metrics of a batch."""
    values = losses.compute_metrics("val", 0.0, (None, target, None), output)
    return {n[4:]: v for n, v in values.items() if n not in ("val_loss", "num_samples")}


def test_a_loss_may_be_a_sum():
    total = mean_loss(keras.losses.MeanSquaredError(reduction="sum"))(BITS, CHANCES)
    assert float(total) == pytest.approx(((BITS - CHANCES) ** 2).sum(), rel=1e-5)


def squares_of(kind):
    """Return squared errors as a loss, a name, or a function."""
    return {
        "loss": keras.losses.MeanSquaredError(),
        "no reduction": keras.losses.MeanSquaredError(reduction="none"),
        "name": "mse",
        "function": lambda target, output: (tf.cast(target, output.dtype) - output) ** 2,
    }[kind]


@pytest.mark.parametrize("kind", ["loss", "no reduction", "name", "function"])
def test_a_loss_can_be_called_for_one_of_several_outputs(kind):
    inputs = keras.Input((1,))
    model = keras.Model(inputs, [keras.layers.Dense(1, name=name)(inputs) for name in "ab"])
    for loss in (mean_loss(squares_of(kind)), mean_loss(squares_of(kind), model)):
        found = float(loss(BITS, CHANCES))
        assert found == pytest.approx(np.mean((BITS - CHANCES) ** 2), rel=1e-5)


@pytest.mark.parametrize("kind", ["loss", "name", "function"])
def test_a_loss_of_a_narrow_output_is_computed_in_float32(kind):
    found = mean_loss(squares_of(kind))
    assert float(found(np.zeros((2, 1), "float32"), tf.constant([[300.0]] * 2, tf.float16))) == 9e4
    assert float(found(np.ones((2, 1), "float32"), tf.constant([[3.0]] * 2, tf.bfloat16))) == 4


@examples(5)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5))
@pytest.mark.parametrize(
    "name", ["MeanAbsoluteError", "RootMeanSquaredError", "AUC", "Precision", "BinaryIoU"]
)
def test_a_metric_does_not_depend_on_how_samples_are_batched(name, sizes):
    metric = getattr(keras.metrics, name)()
    total = sum(sizes)
    target, output = np.resize(BITS, (total, 1)), np.resize(CHANCES, (total, 1))
    ends = np.cumsum(sizes)[:-1]
    parts = zip(np.split(target, ends), np.split(output, ends), strict=True)
    found = merged(metric, parts).compute()
    metric.reset_state()
    metric.update_state(target, output)
    assert found == pytest.approx(float(metric.result()), rel=1e-4)


def merged(metric, parts):
    """Measure a metric batch by batch, send the values to another process, and merge them."""
    metrics = BatchLosses(keras.Model(), None, [metric], {})
    values = [value for part in parts for value in measured(metrics, *part).values()]
    return functools.reduce(lambda a, b: a.merge(b), pickle.loads(pickle.dumps(values)))


KINDS = np.eye(3, dtype="float32")[CLASSES]
LIKELY = np.exp(SCORES) / np.exp(SCORES).sum(axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("F1Score", {"average": "macro"}),
        ("F1Score", {}),  # one for each class
        ("FBetaScore", {"beta": 2.0}),
        ("R2Score", {}),
        ("AUC", {"multi_label": True}),
    ],
)
def test_a_metric_may_build_its_variables_late_and_give_several_numbers(name, arguments):
    metric = getattr(keras.metrics, name)(**arguments)
    found = merged(metric, [(KINDS[:5], LIKELY[:5]), (KINDS[5:], LIKELY[5:])]).compute()
    metric.reset_state()
    metric.update_state(KINDS, LIKELY)
    expected = np.asarray(metric.result())
    assert found == pytest.approx(expected, rel=1e-4)


def test_metric_names_do_not_depend_on_earlier_metrics_of_the_process():
    kinds = keras.metrics
    for _ in range(2):
        given = [kinds.AUC(), kinds.Precision(), kinds.AUC(), kinds.Recall(name="recall_at_2")]
        names = list(measured(BatchLosses(keras.Model(), None, given, {}), BITS, CHANCES))
        assert names == ["auc", "precision", "auc_1", "recall_at_2"]


@pytest.mark.parametrize("adds_up", [True, False])
def test_a_metric_of_users_must_have_a_state_that_adds_up(adds_up):
    class Own(keras.metrics.Metric):
        def __init__(self, name="own", **named):
            super().__init__(name=name, **named)
            self.value = self.add_weight(name="value", shape=(), initializer="zeros")

        def update_state(self, target, output, sample_weight=None):
            if adds_up:
                self.value.assign_add(tf.reduce_sum(output))
            else:
                self.value.assign(tf.reduce_max(output))

        def result(self):
            return tf.convert_to_tensor(self.value)

    metrics = BatchLosses(keras.Model(), None, [Own()], {})
    if not adds_up:
        measured(metrics, BITS, 0 * CHANCES)  # a state of zero hides the problem
        with pytest.raises(TypeError, match=r"'own', a Own, is not a sum .*MergeableMetric"):
            measured(metrics, BITS, CHANCES)
        return
    first, second = (measured(metrics, BITS[i], CHANCES[i])["own"] for i in ([0, 1], [2]))
    assert first.merge(second).compute() == pytest.approx(float(CHANCES[:3].sum()), rel=1e-5)


def test_a_text_tensor_is_no_number():
    assert not is_numeric(tf.constant("text"))
    assert is_numeric(tf.constant(1.5))
