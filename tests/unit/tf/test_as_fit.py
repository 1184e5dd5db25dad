"""One worker gives what ``fit()`` and ``evaluate()`` of Keras give, whatever ``compile()`` took."""

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from raysgd.metrics import merge_workers  # noqa: E402
from raysgd.tf import TrainingOperator  # noqa: E402
from raysgd.tf.keras import named_arrays  # noqa: E402
from tests.tf_operators import keras_of  # noqa: E402

both = pytest.mark.parametrize("keras", ["keras", "tf_keras"])
RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(24, 4)).astype("float32")
BITS = (FEATURES.sum(axis=1, keepdims=True) > 0).astype("float32")
CLASSES = RNG.integers(0, 3, 24)
WEIGHTS = RNG.uniform(0, 3, 24).astype("float32")
SIZE = 8


def squares(target, output):
    return tf.square(target - output)


def network(keras, num_outputs):
    """Return a small network with the same weights each time."""
    init, inputs = keras.initializers.GlorotUniform, keras.Input((4,))
    heads = [
        keras.layers.Dense(1, "sigmoid", kernel_initializer=init(seed=1), name="a"),
        keras.layers.Dense(3, "softmax", kernel_initializer=init(seed=2), name="b"),
    ]
    outputs = [head(inputs) for head in heads]
    return keras.Model(inputs, outputs if num_outputs == 2 else outputs[0])


ONE = {
    "a name": lambda keras: {"loss": "binary_crossentropy"},
    "an object": lambda keras: {"loss": keras.losses.Huber()},
    "a function": lambda keras: {"loss": squares},
    "a list": lambda keras: {"loss": ["mse"]},
    "a dict": lambda keras: {"loss": {"a": "mse"}},
    "a weighted loss": lambda keras: {"loss": "mse", "loss_weights": [0.3]},
    "names of metrics": lambda keras: {"loss": "mse", "metrics": ["mae", "acc", "accuracy"]},
    "an object and a function": lambda keras: {
        "loss": "mse",
        "metrics": [keras.metrics.AUC(name="area"), squares],
    },
    "weighted metrics": lambda keras: {
        "loss": "mse",
        "metrics": ["mae"],
        "weighted_metrics": ["mse", "mae"],
    },
    "averages": lambda keras: {
        "loss": "mse",
        "optimizer": keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.9),
    },
    "averages that overwrite": lambda keras: {
        "loss": "mse",
        "optimizer": keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    },
}
TWO = {
    "one loss for both": lambda keras: {"loss": "mse"},
    "a list": lambda keras: {"loss": ["mse", "sparse_categorical_crossentropy"]},
    "a list with weights": lambda keras: {
        "loss": ["mse", "sparse_categorical_crossentropy"],
        "loss_weights": [2.0, 0.5],
    },
    "dicts": lambda keras: {
        "loss": {"a": "mse", "b": keras.losses.SparseCategoricalCrossentropy()},
        "loss_weights": {"a": 2.0, "b": 0.5},
        "metrics": {"a": ["mae", keras.metrics.AUC(name="area")], "b": "acc"},
        "weighted_metrics": {"a": ["mae"], "b": ["acc"]},
    },
}
CASES = [pytest.param(1, make, id=name) for name, make in ONE.items()]
CASES += [pytest.param(2, make, id=f"two outputs, {name}") for name, make in TWO.items()]


class Compiled(TrainingOperator):
    """Registers what the config's functions make."""

    def setup(self, config):
        model = config["make"]()
        self.model, *_ = self.register(model, class_weight=config.get("class_weight"))


def targets(num_outputs, make):
    if num_outputs == 1:
        return BITS
    if make is TWO["one loss for both"]:
        return BITS, np.eye(3, dtype="float32")[CLASSES]
    return BITS, CLASSES


def in_batches(data, size=SIZE):
    return tf.data.Dataset.from_tensor_slices(data).batch(size)


def compared(build, make, data, class_weight=None):
    """Train and evaluate as ``fit()`` does and as an operator does, and compare everything."""
    fitted = make()
    logs = fitted.fit(in_batches(data), class_weight=class_weight, verbose=0, shuffle=False)
    operator = build(Compiled, {"make": make, "class_weight": class_weight})
    found = operator.train_epoch(iter(in_batches(data)), num_steps=3)
    names = {f"train_{name}" for name in logs.history}
    assert {name for name in found if name.startswith("train_")} == names
    for name, (value,) in logs.history.items():
        assert found[f"train_{name}"] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    parts = list(in_batches(data, 10))
    with operator._registration.validating():
        for name, array in named_arrays(operator.model.weights).items():
            np.testing.assert_allclose(array, named_arrays(fitted.weights)[name], atol=1e-5)
        merged = merge_workers([operator.validate(iter([part])) for part in parts])
    expected = fitted.evaluate(in_batches(data), return_dict=True, verbose=0)
    for name, value in expected.items():
        assert merged[f"val_{name}"] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert merged["num_samples"] == 24


@both
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(("num_outputs", "arguments"), CASES)
def test_an_epoch_is_that_of_fit(build, keras, num_outputs, arguments, weights):
    module = keras_of({"keras": keras})

    def make():
        model = network(module, num_outputs)
        model.compile(**{"optimizer": module.optimizers.SGD(0.1), **arguments(module)})
        return model

    data = (FEATURES, targets(num_outputs, arguments))
    compared(build, make, (*data, WEIGHTS) if weights else data)
