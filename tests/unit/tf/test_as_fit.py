"""One worker matches ``fit()`` and ``evaluate()`` in Keras for all arguments of ``compile()``."""

import contextlib

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

from raysgd.metrics import merge_worker_metrics  # noqa: E402
from raysgd.tf import TrainingOperator  # noqa: E402
from raysgd.tf.keras import arrays_of  # noqa: E402

RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(24, 4)).astype("float32")
BITS = (FEATURES.sum(axis=1, keepdims=True) > 0).astype("float32")
CLASSES = RNG.integers(0, 3, 24)
WEIGHTS = RNG.uniform(0, 3, 24).astype("float32")
SIZE = 8


def squares(target, output):
    return tf.square(target - output)


class Counting(keras.layers.Dense):
    """Keeps metrics of its own."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.spread = keras.metrics.Mean(name="spread_loss")
        self.precision = keras.metrics.Precision(name="own_precision")

    def call(self, inputs):
        output = super().call(inputs)
        self.spread.update_state(tf.abs(output))
        self.precision.update_state(inputs[:, :1] > 0, tf.sigmoid(output[:, :1]))
        return output


def network(num_outputs):
    """Return a small network with the same weights each time."""
    init, inputs = keras.initializers.GlorotUniform, keras.Input((4,))
    heads = [
        keras.layers.Dense(1, "sigmoid", kernel_initializer=init(seed=1), name="a"),
        keras.layers.Dense(3, "softmax", kernel_initializer=init(seed=2), name="b"),
    ]
    outputs = [head(inputs) for head in heads]
    return keras.Model(inputs, outputs if num_outputs == 2 else outputs[0])


ONE = {
    "a name": {"loss": "binary_crossentropy"},
    "an object": {"loss": keras.losses.Huber()},
    "a function": {"loss": squares},
    "a list": {"loss": ["mse"]},
    "a dict": {"loss": {"a": "mse"}},
    "values of samples": {"loss": keras.losses.MeanSquaredError(reduction=None)},
    "a weighted loss": {"loss": "mse", "loss_weights": [0.3]},
    "metrics": {
        "loss": "mse",
        "metrics": ["mae", "acc", "accuracy", keras.metrics.AUC(name="area"), squares],
        "weighted_metrics": ["mse", "mae"],
    },
    "averages": {
        "loss": "mse",
        "optimizer": {"class_name": "adam", "config": {"use_ema": True, "ema_momentum": 0.9}},
    },
    "averages that overwrite": {
        "loss": "mse",
        "optimizer": {
            "class_name": "sgd",
            "config": {"use_ema": True, "ema_overwrite_frequency": 2},
        },
    },
}
TWO = {
    "one loss for both": {"loss": "mse"},
    "a list with weights": {
        "loss": ["mse", "sparse_categorical_crossentropy"],
        "loss_weights": [2.0, 0.5],
    },
    "dicts": {
        "loss": {"a": "mse", "b": keras.losses.SparseCategoricalCrossentropy()},
        "loss_weights": {"a": 2.0, "b": 0.5},
        "metrics": {"a": ["mae", keras.metrics.AUC(name="area")], "b": "acc"},
        "weighted_metrics": {"a": ["mae"], "b": ["acc"]},
    },
}
CASES = [pytest.param(1, make, id=name) for name, make in ONE.items()]
CASES += [pytest.param(2, make, id=f"two outputs, {name}") for name, make in TWO.items()]


def compiled(model, *arguments, **named):
    model.compile(*arguments, **named)
    return model


class Compiled(TrainingOperator):
    """Registers the compiled model that ``config["make"]`` returns."""

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


def compared(build, make, data, class_weight=None, operator_cls=Compiled):
    """Train and evaluate with Keras and with an operator, and compare the results."""
    fitted = make()
    fitted.run_eagerly = True  # graphs take longer to trace than a few batches
    logs = fitted.fit(in_batches(data), class_weight=class_weight, verbose=0, shuffle=False)
    operator = build(operator_cls, {"make": make, "class_weight": class_weight})
    found = operator.train_epoch(iter(in_batches(data)), num_steps=3)
    names = {"train_loss", *(f"train_{name}" for name in logs.history)}
    assert {name for name in found if name.startswith("train_")} == names
    for name, (value,) in logs.history.items():
        assert found[f"train_{name}"] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    parts = list(in_batches(data, 10))
    with operator._train_state.evaluating():
        for name, array in arrays_of(operator.model.weights).items():
            np.testing.assert_allclose(array, arrays_of(fitted.weights)[name], atol=1e-5)
        merged = merge_worker_metrics([operator.validate(iter([part])) for part in parts])
    expected = fitted.evaluate(in_batches(data), return_dict=True, verbose=0)
    for name, value in expected.items():
        assert merged[f"val_{name}"] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert merged["num_samples"] == 24


@pytest.mark.parametrize(("num_outputs", "arguments"), CASES)
def test_an_epoch_matches_fit_and_evaluate(build, num_outputs, arguments):
    def make():
        optimizer = keras.optimizers.SGD(0.1)
        return compiled(network(num_outputs), **{"optimizer": optimizer, **arguments})

    compared(build, make, (FEATURES, targets(num_outputs, arguments), WEIGHTS))


def test_gradients_of_a_row_of_an_embedding_are_added_up(build):
    def make():
        rows = keras.layers.Embedding(3, 1, embeddings_initializer="ones")
        return compiled(keras.Sequential([keras.Input((1,)), rows]), "adam", "mse")

    operator = build(Compiled, {"make": make})
    operator.train_epoch(iter(in_batches((CLASSES[:, None], BITS[:, None]))), num_steps=3)
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    fitted = compiled(keras.Sequential([keras.Input((3,)), dense]), "adam", "mse")
    fitted.fit(in_batches((np.eye(3)[CLASSES], BITS)), verbose=0, shuffle=False)
    np.testing.assert_allclose(operator.model.get_weights(), fitted.get_weights(), atol=1e-6)


class Given(TrainingOperator):
    """Registers the model, the loss, and the metrics separately."""

    def setup(self, config):
        self.register(config["make"](), "sgd", config["loss"], config["metrics"])


@pytest.mark.parametrize("kind", ["lists", "dicts"])
def test_losses_and_metrics_of_several_outputs_need_no_compile(build, kind):
    loss, metrics = ["mse", "sparse_categorical_crossentropy"], [["mae"], ["acc"]]
    if kind == "dicts":
        loss, metrics = (dict(zip("ab", each, strict=True)) for each in (loss, metrics))

    def make():
        return network(2)

    def make_compiled():
        return compiled(make(), "sgd", loss, metrics=metrics)

    config = {"make": make, "loss": loss, "metrics": metrics}
    batches = list(in_batches((FEATURES, (BITS, CLASSES))))
    operators = build(Given, config), build(Compiled, {"make": make_compiled})
    operators[0].run(operators[0]._forward, *batches[1], None, True)  # like a step of users
    found, expected = (merge_worker_metrics([each.validate(iter(batches))]) for each in operators)
    assert found == pytest.approx(expected, rel=1e-4)


def test_losses_of_layers_count_in_addition_to_a_registered_loss(build):
    def make():
        layer = keras.layers.Dense(1, kernel_initializer="ones", kernel_regularizer="l2")
        return keras.Sequential([keras.Input((4,)), layer])

    config = {"make": make, "loss": "mse", "metrics": []}
    found = build(Given, config).validate_batch((FEATURES, BITS), {})
    expected = np.mean((FEATURES.sum(axis=1, keepdims=True) - BITS) ** 2) + 0.01 * 4
    assert float(found["val_loss"]) == pytest.approx(expected, rel=1e-5)


def test_class_weights_are_those_of_fit(build):
    def make():
        return compiled(network(1), keras.optimizers.SGD(0.1), "mse", weighted_metrics=["mae"])

    compared(build, make, (FEATURES, BITS), class_weight={0: 0.2, 1: 3.0})


def test_a_loss_of_the_model_itself_is_called(build):
    class Own(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
            return tf.reduce_mean(tf.square(y - y_pred)) + 0.1 * tf.reduce_mean(y_pred * x[:, :1])

    def make():
        inner = network(1)
        model = Own(inner.inputs, inner.outputs[0])
        return compiled(model, keras.optimizers.SGD(0.1), metrics=["mae"])

    compared(build, make, (FEATURES, BITS, WEIGHTS))


def test_metrics_of_layers_and_of_the_model_are_in_the_results(build):
    def make():
        inputs, init = keras.Input((4,)), keras.initializers.GlorotUniform(seed=1)
        counting = Counting(3, kernel_initializer=init, name="counting")
        inner = keras.Sequential([keras.Input((4,)), counting], name="inner")
        head = keras.layers.Dense(1, kernel_initializer=init, name="head")
        model = keras.Model(inputs, head(inner(inputs)))
        return compiled(model, keras.optimizers.SGD(0.1), "mse", metrics=["mae"])

    class Predicts(Compiled):
        def train_batch(self, batch, batch_info):
            self.predict_batch(batch, {})  # updates the metrics too
            return super().train_batch(batch, batch_info)

    compared(build, make, (FEATURES, BITS), operator_cls=Predicts)


def test_eager_models_run_without_graphs(build):
    class Eager(keras.layers.Layer):
        def call(self, inputs):
            return inputs * float(np.max(inputs.numpy()))

        def compute_output_shape(self, shape):
            return shape

    def make():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1), Eager()])
        return compiled(model, "sgd", "mse", run_eagerly=True)

    try:
        operator = build(Compiled, {"make": make})
        batch = next(iter(in_batches((FEATURES, BITS))))
        assert float(operator.train_batch(batch, {})["train_loss"]) > 0
        expected = operator.model.test_on_batch(*batch)
        found = float(operator.validate_batch(batch, {})["val_loss"])
        assert found == pytest.approx(expected, rel=1e-5)
    finally:
        tf.config.run_functions_eagerly(False)


def test_masked_steps_are_left_out(build):
    steps = RNG.integers(0, 5, (24, 6))
    steps[:, 0] = 1

    def make():
        rows = keras.layers.Embedding(5, 2, mask_zero=True, embeddings_initializer="ones")
        dense = keras.layers.Dense(1, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((6,)), rows, dense])
        return compiled(model, keras.optimizers.SGD(0.0), "mse", weighted_metrics=["mae"])

    target = RNG.normal(size=(24, 6, 1)).astype("float32")
    found = build(Compiled, {"make": make}).validate(iter(in_batches((steps, target))))
    expected = make().evaluate(in_batches((steps, target)), return_dict=True, verbose=0)
    for name in ("mae", "loss"):
        assert found[f"val_{name}"] == pytest.approx(expected[name], rel=1e-5)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["sum", None, "masks", "layer", "mean"])
def test_several_workers_warn_of_losses_that_are_no_means(build, workers, kind, caplog):
    def make():
        zero = {"mean": lambda weights: np.float32(0)}.get(kind)
        dense = keras.layers.Dense(1, kernel_regularizer=zero)
        layers = [keras.layers.Embedding(5, 2, mask_zero=kind == "masks"), dense]
        if kind == "layer":
            call = {"call": lambda self, inputs: self.add_loss(inputs[:, 0, 0]) or inputs}
            layers.append(type("AddsLosses", (keras.layers.Layer,), call)())
        model = keras.Sequential([keras.Input((6,)), *layers])
        reduction = kind if kind in ("sum", None) else "sum_over_batch_size"
        return compiled(model, keras.optimizers.SGD(), [keras.losses.MeanSquaredError(reduction)])

    operator = build(Compiled, {"make": make}, workers=workers)
    for _ in range(2):
        operator.train_batch((np.ones((3, 6)), np.ones((3, 6, 1), "float32")), {})
    warnings = [each for each in caplog.messages if "2 workers weight their losses" in each]
    assert len(warnings) == (workers == 2 and kind != "mean")
    said = {"sum": "(reduction='sum') is not a mean", "masks": "masks its output"}
    assert all(said.get(kind, "a value for each sample") in warning for warning in warnings)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (
            keras.losses.SparseCategoricalCrossentropy(ignore_class=0),
            "SparseCategoricalCrossentropy(ignore_class=0)",
        ),
        ({"a": keras.losses.Dice()}, "Dice"),
        ("dice", "dice"),
        (keras.losses.tversky, "tversky"),
        (keras.losses.Circle(), "Circle"),
        ([keras.losses.Tversky(alpha=0.3)], "Tversky"),
        (keras.losses.SparseCategoricalCrossentropy(), None),
    ],
)
def test_several_workers_warn_of_losses_that_weight_samples(build, loss, said, caplog):
    build(Given, {"make": lambda: network(1), "loss": loss, "metrics": []}, workers=2)
    assert [f"The loss {said} is not a mean" in each for each in caplog.messages] == [True] * bool(
        said
    )


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (lambda: keras.layers.BatchNormalization(synchronized=True, name="norm"), "synchronize"),
        (lambda: keras.layers.LSTM(4, stateful=True, name="norm"), "stateful=False"),
    ],
)
def test_layers_that_connect_workers_or_batches_need_one_worker(build, workers, layer, said):
    def make():
        norm = layer()
        shape = (8, 2, 4) if said.startswith("stateful") else (None, 4)
        inner = keras.Sequential([keras.Input(batch_shape=shape), norm])
        return keras.Sequential([keras.Input(batch_shape=shape), inner, keras.layers.Dense(1)])

    refused = pytest.raises(NotImplementedError, match=f"(?s)'norm'.*{said}|{said}.*'norm'")
    with refused if workers == 2 else contextlib.nullcontext():
        operator = build(Given, {"make": make, "loss": "mse", "metrics": []}, num_workers=workers)
    if said.startswith("stateful") and workers == 1:
        with pytest.raises(ValueError, match="'norm' keeps states of 8 rows, but the batch has 1"):
            operator.train_batch((np.zeros((1, 2, 4)), np.zeros((1, 1))), {})


def test_layers_that_build_leaves_unbuilt_are_built(build):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, inputs):
            return self.dense(inputs)

    class Built(TrainingOperator):
        def setup(self, config):
            model = Own()
            with pytest.warns(UserWarning, match="not being actually built"):
                model.build((None, 4))
            self.model, *_ = self.register(model, "sgd", "mse")
            self.register_data(train_loader=(FEATURES, BITS))

    assert len(build(Built).model.trainable_variables) == 2


@pytest.mark.parametrize("step", ["train_step", "test_step", "compute_metrics"])
def test_a_step_of_the_model_is_refused_unless_the_operator_has_its_own(build, step):
    kind = type("Own", (keras.Model,), {step: lambda self, *given, **named: {}})

    def make():
        inner = network(1)
        model = kind(inner.inputs, inner.outputs[0])
        return compiled(model, keras.optimizers.SGD(0.1), "mse")

    class OwnSteps(Compiled):
        def train_batch(self, batch, batch_info):
            return {}

        def validate_batch(self, batch, batch_info):
            return {}

    with pytest.raises(NotImplementedError, match=rf"Own overrides {step}\(\), .* self\.minimize"):
        build(Compiled, {"make": make})
    build(OwnSteps, {"make": make})
