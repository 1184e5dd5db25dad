"""The runner of a Keras operator: random numbers, copies of the state, and failed steps."""

import importlib
import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

from raysgd import TFTrainer  # noqa: E402
from raysgd._internal.runner import WorkerContext  # noqa: E402
from raysgd.elastic.config import ElasticConfig  # noqa: E402
from raysgd.loop.requests import TrainRequest  # noqa: E402
from raysgd.tf import TrainingOperator, private_keras  # noqa: E402
from raysgd.tf.options import KerasOptions  # noqa: E402
from raysgd.tf.runner import KerasRunner  # noqa: E402
from raysgd.tf.train_state import KerasRandomGenerators  # noqa: E402
from tests.tf_operators import Digits, digits, make_model  # noqa: E402


def make_runner(lr=0.1):
    """Return a runner that takes a snapshot at the start of each epoch. An epoch has 45 steps."""
    config = {"data": "tf", "shuffle": False, "lr": lr, "batch_norm": True}
    elastic = ElasticConfig(snapshot_every="epoch")
    options = KerasOptions(training_operator_cls=Digits, config=config, seed=3, elastic=elastic)
    runner = KerasRunner(options)
    runner.setup(WorkerContext(is_in_driver=True))
    runner.operator._train_state.settings.context = WorkerContext()  # takes snapshots
    return runner


def arrays_of(state):
    """Return the arrays of models and optimizers. Keras numbers their names within a process."""
    return [a for part in (*state["models"], *state["optimizers"]) for a in part.values()]


def assert_same(state, other):
    for array, expected in zip(arrays_of(state), arrays_of(other), strict=True):
        np.testing.assert_array_equal(array, expected)


def test_setup_may_set_the_float_type_of_layers():
    class Double(Digits):
        def setup(self, config):
            keras.config.set_floatx("float64")
            super().setup(config)

    keras.utils.clear_session()  # Keras then has no policy, as in a new process
    with TFTrainer(training_operator_cls=Double, config={"data": "tf"}, use_local=True) as trainer:
        assert trainer.get_model().weights[0].dtype == "float64"
    assert keras.config.floatx() == keras.config.dtype_policy().name == "float32"


def test_training_continues_equally_from_a_snapshot():
    runner = make_runner()
    runner.handle(TrainRequest(call_number=0, until_step=45))
    then = runner.state_dict()
    runner.handle(TrainRequest(call_number=1, until_step=50))
    held, now = runner.acquire_snapshot(), runner.state_dict()
    assert (held["epoch"], held["global_step"]) == (1, 45)
    assert_same(held, then)
    with pytest.raises(AssertionError):
        assert_same(held, now)
    other = make_runner()
    other.load_state_dict(held)
    other.handle(TrainRequest(call_number=1, until_step=50))
    assert_same(other.state_dict(), now)


class TwoUpdates(TrainingOperator):
    """Updates two models in each step. It can fail once, between the updates."""

    def setup(self, config):
        models = [make_model() for _ in range(2)]
        optimizers = [keras.optimizers.Adam(0.01) for _ in models]
        for optimizer in optimizers:
            optimizer.build([v for model in models for v in model.trainable_variables])
        self.pairs = [(models[0], optimizers[config["first"]]), (models[1], optimizers[1])]
        *_, self.criterion = self.register(
            models,
            optimizers[-config["num_registered"] :],
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        self.losses = [partial(self.loss_of, model) for model in models]
        self.register_data(train_loader=digits()[0], shuffle=False)

    def loss_of(self, model, images, labels):
        return self.criterion(labels, model(images, training=True))

    def train_batch(self, batch, batch_info):
        for place, (model, optimizer) in enumerate(self.pairs):
            if place and batch_info.get("global_step") == self.config.get("fail_at", ""):
                raise ValueError(f"bad batch {self.config.pop('fail_at')}")
            loss = self.minimize(self.losses[place], *batch, optimizer=optimizer, model=model)
        return {"train_loss": loss}


@pytest.mark.parametrize(("first", "num_registered", "fail_at"), [(0, 2, 2), (1, 1, 2), (0, 2, 0)])
def test_a_failed_step_restores_the_first_of_two_updates(first, num_registered, fail_at):
    runners = []
    for config in ({}, {"fail_at": fail_at}):
        config |= {"first": first, "num_registered": num_registered}
        options = KerasOptions(training_operator_cls=TwoUpdates, config=config, seed=3)
        runners.append(KerasRunner(options))
        runners[-1].setup(WorkerContext(is_in_driver=True))
        runners[-1].operator.train_batch(tuple(part[:32] for part in digits()[0]), {})  # no loop
    undisturbed, failing = runners
    undisturbed.handle(TrainRequest(call_number=0, until_step=4))
    with pytest.raises(ValueError, match=f"bad batch {fail_at}"):
        failing.handle(TrainRequest(call_number=0, until_step=4))
    failing.handle(TrainRequest(call_number=0, until_step=4))
    assert_same(failing.state_dict(), undisturbed.state_dict())


class Halving(Digits):
    def train_batch(self, batch, batch_info):
        self.optimizer.learning_rate = self.optimizer.learning_rate.numpy() / 2
        return super().train_batch(batch, batch_info)


def test_a_failed_step_restores_the_learning_rate():
    config = {"shuffle": False, "fail_at": (0, 2)}
    runner = KerasRunner(KerasOptions(training_operator_cls=Halving, config=config, seed=3))
    runner.setup(WorkerContext(is_in_driver=True))
    with pytest.raises(ValueError, match="bad batch"):
        runner.handle(TrainRequest(call_number=0, until_step=4))
    rate = runner.operator.optimizer.learning_rate
    rate.assign(rate.numpy() * 8)  # as user code may do between two calls
    runner.handle(TrainRequest(call_number=0, until_step=4))
    assert float(rate.numpy()) == pytest.approx(0.01 * 8 / 2**4)


class FailsHalfway(keras.optimizers.SGD):
    """Raises after it has changed a variable."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)
        if len(variable.shape) == 1:
            tf.debugging.assert_less(self.iterations, tf.cast(2, self.iterations.dtype))


class HalfUpdated(Digits):
    def setup(self, config):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.register(make_model(), FailsHalfway(0.1), loss)
        self.register_data(train_loader=digits()[0], shuffle=False)


@pytest.mark.parametrize(
    ("operator_cls", "config"),
    [(HalfUpdated, {}), (TwoUpdates, {"first": 0, "num_registered": 1, "fail_at": 2})],
)
def test_workers_do_not_restart_from_a_state_that_is_half_updated(operator_cls, config):
    runner = KerasRunner(KerasOptions(training_operator_cls=operator_cls, config=config, seed=3))
    runner.setup(WorkerContext(is_in_driver=True))
    runner.handle(TrainRequest(call_number=0, until_step=2))
    assert runner.restart_state() is not None
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError)):
        runner.handle(TrainRequest(call_number=0, until_step=4))
    assert runner.status().state_status.condition == "damaged"
    assert runner.restart_state() is None


class Noise(keras.layers.Layer):
    """Adds noise of generators in a list and a dict, and of the generator of Keras itself."""

    def __init__(self):
        super().__init__()
        self.seeds = [keras.random.SeedGenerator(4)]
        self.named = {"a": keras.random.SeedGenerator(5)}

    def call(self, inputs):
        shape = (inputs.shape[-1],)
        noise = keras.random.normal(shape)
        for seed in (self.seeds[0], self.named["a"]):
            noise += keras.random.normal(shape, seed=seed)
        return inputs + 0.01 * noise


class Drawing(TrainingOperator):
    """Trains with layers that draw random numbers, in two models and outside of them."""

    def setup(self, config):
        init = keras.initializers.GlorotUniform
        inner = keras.Sequential([keras.layers.GaussianNoise(0.1), Noise()])
        first = [keras.Input((64,)), keras.layers.Dropout(0.5, seed=1), inner]
        second = [keras.Input((64,)), keras.layers.Dropout(0.5)]
        heads = [keras.layers.Dense(10, kernel_initializer=init(seed=s)) for s in (1, 2)]
        models = [
            keras.Sequential([*layers, head])
            for layers, head in zip((first, second), heads, strict=True)
        ]
        self.models, _, self.criterion = self.register(
            models,
            keras.optimizers.SGD(0.1),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        self.augmenting = [keras.layers.Dropout(0.1), keras.random.SeedGenerator(7)]
        self.register_data(train_loader=digits()[0], shuffle=False)

    def loss_of(self, images, labels):
        layer, seed = self.augmenting
        images = layer(images, training=True) + keras.random.normal((64,), seed=seed)
        return self.criterion(labels, sum(model(images, training=True) for model in self.models))

    def train_batch(self, batch, batch_info):
        loss = self.minimize(self.loss_of, *batch, model=self.models)
        return {"train_loss": loss, "num_samples": len(batch[-1])}


def test_a_new_generator_of_keras_does_not_change_that_of_python():
    generators = KerasRandomGenerators(SimpleNamespace(models=[], attributes={}))
    keras.random.normal((1,))
    state = generators.state()
    keras.utils.clear_session()  # Keras then has no generator, as in a new process
    generators.set(state)
    assert random.getstate() == state["python"]


def test_a_loaded_state_draws_the_same_numbers(tmp_path, caplog):
    def make():
        return TFTrainer(training_operator_cls=Drawing, use_local=True)

    with make() as trainer:
        trainer.train(num_steps=2)
        path = trainer.save(tmp_path / "state")
        expected = trainer.train(num_steps=2)["train_loss"]
        keras.random.normal((1,))
    with make() as trainer:
        trainer.load(path)
        assert trainer.train(num_steps=2)["train_loss"] == expected
        trainer.load(path)
        assert trainer.train(num_steps=2)["train_loss"] == expected
        state = trainer.state_dict()
        # A layer that a step created adds a seed, which a new operator lacks.
        (saved,) = state["data"]["rng"]
        saved["keras_others"] = [*saved["keras_others"], np.zeros(2, "uint32")]
        trainer.train(num_steps=1)
        trainer.load_state_dict(state)
        assert "3 random seeds in keras_others, but the operator has 2" in caplog.text
        (loaded,) = trainer.state_dict()["data"]["rng"]
        assert np.array_equal(loaded["keras_models"], saved["keras_models"])
        for generators in state["data"]["rng"]:  # as an old version saved it
            del generators["keras_models"], generators["keras_global"]
        trainer.load_state_dict(state)


def test_an_error_names_the_version_of_keras_that_lacks_a_private_function(monkeypatch):
    monkeypatch.delattr("keras.src.utils.rng_utils.get_random_seed")
    with pytest.raises(ImportError, match=rf"Keras {keras.__version__}: .*get_random_seed"):
        importlib.reload(private_keras)
