"""Losses and metrics of both Kerases, as plain means over a worker's own batch."""

import functools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

tf = pytest.importorskip("tensorflow")

from raysgd.tf.losses import BatchMetrics, MeanLoss, accuracy  # noqa: E402
from tests.conftest import examples  # noqa: E402
from tests.tf_operators import keras_of  # noqa: E402

both = pytest.mark.parametrize("keras", ["keras", "tf_keras"])
RNG = np.random.default_rng(0)
CLASSES = RNG.integers(0, 3, 12)
SCORES = RNG.normal(size=(12, 3)).astype("float32")
BITS = RNG.integers(0, 2, (12, 1)).astype("float32")
CHANCES = RNG.uniform(0.1, 0.9, (12, 1)).astype("float32")


@both
def test_a_loss_may_be_a_name_a_class_a_function_or_have_another_reduction(keras):
    module = keras_of({"keras": keras})
    squares = (BITS - CHANCES) ** 2
    total = MeanLoss(module, module.losses.MeanSquaredError(reduction="sum"))(BITS, CHANCES)
    assert float(total) == pytest.approx(squares.sum(), rel=1e-5)
    for criterion in (
        "mse",
        module.losses.MeanSquaredError,
        module.losses.MeanSquaredError(reduction="none"),
        lambda target, output: (target - output) ** 2,
    ):
        found = MeanLoss(module, criterion)(BITS, CHANCES)
        assert float(found) == pytest.approx(squares.mean(), rel=1e-5)


def squares_of(module, kind):
    """Return squared errors as a loss, a name, or a function."""
    return {
        "loss": module.losses.MeanSquaredError(),
        "name": "mse",
        "function": lambda target, output: (tf.cast(target, output.dtype) - output) ** 2,
    }[kind]


@both
@pytest.mark.parametrize("kind", ["loss", "name", "function"])
def test_a_loss_takes_sample_weights(keras, kind):
    module = keras_of({"keras": keras})
    weights = np.arange(len(BITS), dtype="float32")
    found = MeanLoss(module, squares_of(module, kind))(BITS, CHANCES, sample_weight=weights)
    expected = np.mean((BITS - CHANCES)[:, 0] ** 2 * weights)
    assert float(found) == pytest.approx(expected, rel=1e-5)


@both
@pytest.mark.parametrize("kind", ["loss", "name", "function"])
def test_a_loss_can_be_called_for_one_of_several_outputs(keras, kind):
    module = keras_of({"keras": keras})
    inputs = module.Input((1,))
    model = module.Model(inputs, [module.layers.Dense(1, name=name)(inputs) for name in "ab"])
    found = MeanLoss(module, squares_of(module, kind), model)(BITS, CHANCES)
    assert float(found) == pytest.approx(np.mean((BITS - CHANCES) ** 2), rel=1e-5)


@both
@pytest.mark.parametrize("kind", ["loss", "name", "function"])
def test_a_loss_of_a_narrow_output_is_computed_in_float32(keras, kind):
    module = keras_of({"keras": keras})
    found = MeanLoss(module, squares_of(module, kind))
    assert float(found(np.zeros((2, 1), "float32"), tf.constant([[300.0]] * 2, tf.float16))) == 9e4
    assert float(found(np.ones((2, 1), "float32"), tf.constant([[3.0]] * 2, tf.bfloat16))) == 4


@both
@pytest.mark.parametrize("kind", ["loss", "name", "function"])
def test_a_loss_leaves_out_what_the_output_masks(keras, kind):
    module = keras_of({"keras": keras})
    layers = [module.layers.Embedding(5, 2, mask_zero=True), module.layers.Dense(1)]
    model = module.Sequential([module.Input((4,)), *layers])
    steps = tf.constant([[1, 2, 0, 0], [3, 0, 0, 0]])
    target, output = tf.ones((2, 4, 1)), model(steps)
    criterion = {
        "loss": module.losses.MeanSquaredError(),
        "name": "mse",
        "function": module.losses.mean_squared_error,
    }[kind]
    found = MeanLoss(module, criterion)(target, output)
    expected = np.mean((1 - output.numpy()[steps.numpy() > 0]) ** 2)
    assert float(found) == pytest.approx(expected, rel=1e-5)


@given(st.integers(1, 6), st.integers(2, 4), st.sampled_from([(), (1,)]), st.randoms())
def test_accuracy_is_the_share_of_largest_entries_at_the_target(samples, classes, tail, random):
    output = np.array([[random.random() for _ in range(classes)] for _ in range(samples)])
    target = np.array([random.randrange(classes) for _ in range(samples)])
    right = sum(int(np.argmax(row)) == label for row, label in zip(output, target, strict=True))
    assert accuracy(target.reshape(samples, *tail), output) == pytest.approx(right / samples)


@pytest.mark.parametrize(
    ("target", "output"),
    [
        (np.zeros(3), np.zeros((3, 2))),  # real targets
        (np.zeros((3, 2), int), np.zeros((3, 2))),  # one of several
        (np.zeros(3, int), np.zeros(3)),  # one score a sample
        (np.zeros(0, int), np.zeros((0, 2))),
        (np.zeros(4, int), np.zeros((3, 2))),
    ],
)
def test_accuracy_is_given_only_where_the_shapes_allow(target, output):
    assert accuracy(target, output) is None


@both
@examples(5)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5))
@pytest.mark.parametrize(
    "name", ["MeanAbsoluteError", "RootMeanSquaredError", "AUC", "Precision", "BinaryAccuracy"]
)
def test_a_metric_does_not_depend_on_how_samples_are_batched(keras, name, sizes):
    metric = getattr(keras_of({"keras": keras}).metrics, name)()
    total = sum(sizes)
    target, output = np.resize(BITS, (total, 1)), np.resize(CHANCES, (total, 1))
    ends = np.cumsum(sizes)[:-1]
    parts = zip(np.split(target, ends), np.split(output, ends), strict=True)
    found = merged(keras, metric, parts).compute()
    metric.reset_state()
    metric.update_state(target, output)
    assert found == pytest.approx(float(metric.result()), rel=1e-4)


def merged(keras, metric, parts):
    """Measure a metric batch by batch, send the values to another process, and merge them."""
    metrics = BatchMetrics(keras_of({"keras": keras}), None, [metric])
    values = [value for part in parts for value in metrics.measure(*part, None).values()]
    return functools.reduce(lambda a, b: a.merge(b), pickle.loads(pickle.dumps(values)))


KINDS = np.eye(3, dtype="float32")[CLASSES]
LIKELY = np.exp(SCORES) / np.exp(SCORES).sum(axis=1, keepdims=True)


@both
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
def test_a_metric_may_build_its_variables_late_and_give_several_numbers(keras, name, arguments):
    metric = getattr(keras_of({"keras": keras}).metrics, name)(**arguments)
    found = merged(keras, metric, [(KINDS[:5], LIKELY[:5]), (KINDS[5:], LIKELY[5:])]).compute()
    metric.reset_state()
    metric.update_state(KINDS, LIKELY)
    expected = np.asarray(metric.result())
    assert found == pytest.approx(expected, rel=1e-4)


def measured(keras, given, target=BITS, output=CHANCES):
    """What metrics say about one batch, by name."""
    return BatchMetrics(keras_of({"keras": keras}), None, given).measure(target, output, None)


@both
def test_metrics_may_be_objects_names_and_functions(keras):
    mine = keras_of({"keras": keras}).metrics.AUC(num_thresholds=7, name="mine")

    def share(target, output):
        return tf.reduce_mean(output)

    found = measured(keras, [mine, "mae", share])
    assert list(found) == ["mine", "mae", "share"]
    assert found["share"].compute() == pytest.approx(CHANCES.mean())


@both
def test_names_do_not_count_the_metrics_of_the_process(keras):
    kinds = keras_of({"keras": keras}).metrics
    for _ in range(2):
        given = [kinds.AUC(), kinds.Precision(), kinds.AUC(), kinds.Recall(name="recall_at_2")]
        assert list(measured(keras, given)) == ["auc", "precision", "auc_1", "recall_at_2"]


@both
@pytest.mark.parametrize("adds_up", [True, False])
def test_a_metric_of_users_must_have_a_state_that_adds_up(keras, adds_up):
    class Own(keras_of({"keras": keras}).metrics.Metric):
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

    metrics = BatchMetrics(keras_of({"keras": keras}), None, [Own()])
    if not adds_up:
        metrics.measure(BITS, 0 * CHANCES, None)  # a state of zero does not tell
        with pytest.raises(TypeError, match=r"'own', a Own, is not a sum .*MergeableMetric"):
            metrics.measure(BITS, CHANCES, None)
        return
    first, second = (metrics.measure(BITS[i], CHANCES[i], None)["own"] for i in ([0, 1], [2]))
    assert first.merge(second).compute() == pytest.approx(float(CHANCES[:3].sum()), rel=1e-5)
