"""Models travel with what their layers keep in addition to variables, and with the user's code."""

from pathlib import Path

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

from raysgd import TFTrainer  # noqa: E402
from raysgd.cluster.serialization import pack  # noqa: E402
from raysgd.errors import CheckpointError  # noqa: E402
from raysgd.tf import TrainingOperator  # noqa: E402
from raysgd.tf.keras import from_portable, to_portable  # noqa: E402
from raysgd.tf.layer_state import layer_states  # noqa: E402
from raysgd.tf.state_access import KerasStateAccess  # noqa: E402

L = keras.layers
RNG = np.random.default_rng(0)
NUMBERS = RNG.normal(3, 2, (16, 3)).astype("float32")
WORDS = np.array(["a", "b", "c\nd", "é"], object)[RNG.integers(0, 4, (16, 1))]
TEXTS = np.array([f"x{n % 5} y{n % 3} z" for n in range(16)], object)[:, None]
TARGETS = RNG.normal(size=(16, 1)).astype("float32")


class Centers(keras.Layer):
    mean = 0.0

    def adapt(self, data):
        self.mean = float(np.mean(data))

    def call(self, inputs):
        return inputs - self.mean


class Keeps(Centers):
    """Saves and loads a number that is not a variable."""

    def save_own_variables(self, store):
        store["mean"] = np.array(self.mean)

    def load_own_variables(self, store):
        self.mean = float(store["mean"])


class KeepsFile(Centers):
    """Saves and loads files with a number that is not a variable."""

    def save_assets(self, dir_path):
        (Path(dir_path) / "inner").mkdir()
        (Path(dir_path) / "inner" / "mean.txt").write_text(repr(self.mean))

    def load_assets(self, dir_path):
        self.mean = float((Path(dir_path) / "inner" / "mean.txt").read_text())


PADDED = {"max_tokens": 12, "pad_to_max_tokens": True}
LAYERS = {
    "normalization": (L.Normalization, NUMBERS),
    "discretization": (lambda: L.Discretization(num_bins=4), NUMBERS),
    "string lookup": (L.StringLookup, WORDS),
    "integer lookup": (lambda: L.IntegerLookup(num_oov_indices=2), RNG.integers(0, 9, (16, 1))),
    "text": (lambda: L.TextVectorization(output_sequence_length=3), TEXTS),
    "tf-idf": (lambda: L.TextVectorization(output_mode="tf_idf", **PADDED), TEXTS),
    "own state": (Keeps, NUMBERS),
    "own files": (KeepsFile, NUMBERS),
}


class Adapted(TrainingOperator):
    """Adapts a layer of an inner model to part of the data, or not."""

    def setup(self, config):
        make, features = LAYERS[config["layer"]]
        layer = make()
        if config["num_adapted"]:
            layer.adapt(features[: config["num_adapted"]])
        kind = "string" if features.dtype == object else features.dtype.name
        inputs = keras.Input(features.shape[1:], dtype=kind)
        inner = keras.Model(inputs, layer(inputs))
        outputs = L.Dense(1)(keras.ops.cast(inner(inputs), "float32"))
        model = keras.Model(inputs, outputs)
        self.model, *_ = self.register(model, keras.optimizers.SGD(0.01), "mse")
        self.register_data(train_loader=(features, TARGETS), batch_size=8)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("num_adapted", [0, 3])
def test_a_loaded_state_has_what_its_layers_were_adapted_to(layer, num_adapted, tmp_path):
    data = tf.data.Dataset.from_tensor_slices(LAYERS[layer][1]).batch(8)

    def make(number):
        config = {"layer": layer, "num_adapted": number}
        return TFTrainer(training_operator_cls=Adapted, config=config, use_local=True)

    with make(16) as trainer:
        trainer.train()
        model = trainer.get_local_operator().model
        expected = np.concatenate([model(batch) for batch in data])
        path = trainer.save(tmp_path / "state")
    with make(num_adapted) as trainer:
        if num_adapted:
            assert np.abs(trainer.predict(data) - expected).max() > 1e-3  # traces the model
        trainer.load(path)
        np.testing.assert_allclose(trainer.predict(data), expected, rtol=1e-6)
        sent = trainer.get_model()
        np.testing.assert_array_equal(np.concatenate([sent(batch) for batch in data]), expected)


def test_a_state_whose_layers_do_not_fit_changes_nothing(build):
    train_state = build(Adapted, {"layer": "own state", "num_adapted": 16})._train_state
    train_state.models *= 2
    state_access = KerasStateAccess(train_state)
    state, before = state_access.read(), layer_states(train_state.models[0])
    with pytest.raises(CheckpointError, match="0 layers that keep more than variables, not 1"):
        state_access.check({**state, "layers": [{}, {}]})
    with pytest.raises(CheckpointError, match=r"layers\[1\] cannot be loaded: .*KeyError"):
        state_access.load({**state, "layers": [{"0": {"mean": 5.0}}, {"0": {}}]})
    assert layer_states(train_state.models[0]) == before


def own_objects():
    """Return a compiled model with classes and functions of the user in each place."""

    class Scale(keras.Layer):
        def __init__(self, inner=None, **named):
            super().__init__(**named)
            self.inner = inner or keras.layers.Dense(2, activation=bent)

        def call(self, inputs):
            return self.inner(2 * inputs)

        def get_config(self):
            inner = keras.saving.serialize_keras_object(self.inner)
            return {**super().get_config(), "inner": inner}

        @classmethod
        def from_config(cls, config):
            return cls(keras.saving.deserialize_keras_object(config.pop("inner")), **config)

    class Ones(keras.initializers.Initializer):
        def __call__(self, shape, dtype=None):
            return tf.ones(shape)

    class Model(keras.Model):
        pass

    class Squares(keras.losses.Loss):
        def call(self, target, output):
            return tf.square(target - output)

    class Halves(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.5

        def get_config(self):
            return {}

    def bent(values):
        return tf.nn.relu(values) - 0.1 * values

    def error(target, output):
        return tf.abs(target - output)

    inputs = keras.Input((3,))
    hidden = keras.Sequential([keras.Input((3,)), Scale()])(inputs)
    model = Model(inputs, L.Dense(1, bent, kernel_initializer=Ones())(hidden))
    model.compile(keras.optimizers.SGD(Halves()), Squares(), metrics=[error])
    return model


def test_a_model_travels_with_the_classes_and_functions_of_its_script():
    model = own_objects()
    found = from_portable(pack(to_portable(model)).unpack())
    assert type(found).__name__ == "Model"
    data = (NUMBERS, TARGETS)
    np.testing.assert_array_equal(found(NUMBERS), model(NUMBERS))
    assert found.evaluate(*data, verbose=0) == model.evaluate(*data, verbose=0)


def scaled(factor):
    def scale(values):
        return values * factor

    return scale


def test_functions_of_equal_names_stay_apart():
    offset = 3.0
    layers = [L.Dense(3, scaled(2.0)), L.Dense(3, scaled(-3.0)), L.Lambda(lambda x: x + offset)]
    model = keras.Sequential([keras.Input((3,)), *layers, L.Dense(1, lambda x: tf.nn.relu(x))])
    found = from_portable(pack(to_portable(model)).unpack())
    np.testing.assert_array_equal(found(NUMBERS), model(NUMBERS))
