"""A Keras operator in this process: registration, updates, precision, and state."""

from types import SimpleNamespace

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

from raysgd.tf import TrainingOperator  # noqa: E402
from raysgd.tf.communication import KerasCollectives  # noqa: E402
from raysgd.tf.features import ReplicaSync  # noqa: E402
from raysgd.tf.keras import arrays_of, policy_name  # noqa: E402
from raysgd.tf.state_access import KerasStateAccess  # noqa: E402
from tests.conftest import import_horovod  # noqa: E402
from tests.tf_operators import Digits, digits, make_model, weights  # noqa: E402


def batches(operator, name="train"):
    return operator._train_state.data.source(name).batches(0, 0)


def test_the_seed_decides_what_an_operator_draws(build):
    class Drawing(Digits):
        def setup(self, config):
            self.drawn = tf.random.uniform([3]).numpy().tolist()
            super().setup(config)

    large = 2**40 + 3  # larger than the seeds that TensorFlow accepts
    first, again, other = (build(Drawing, seed=seed) for seed in (large, large, 4))
    assert first.drawn == again.drawn != other.drawn
    np.testing.assert_array_equal(weights(first), weights(again))

    class Seeded(Digits):
        def setup(self, config):
            keras.utils.set_random_seed(7)
            super().setup(config)

    np.testing.assert_array_equal(*(next(batches(build(Seeded, seed=n)))[1] for n in (3, 4)))


@pytest.mark.parametrize(
    ("use_fp16", "gpus", "policy"),
    [
        (False, ["GPU:0"], None),
        (True, ["GPU:0"], "mixed_float16"),
        (True, [], "mixed_bfloat16"),
        ("mixed_bfloat16", ["GPU:0"], "mixed_bfloat16"),
        ("mixed_float16", [], "mixed_float16"),
    ],
)
def test_the_precision_follows_the_device(use_fp16, gpus, policy, monkeypatch):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
    assert policy_name(use_fp16) == policy


def test_mixed_precision_is_a_policy_of_keras(build):
    try:
        for use_fp16, dtype in ((True, "bfloat16"), ("mixed_float16", "float16")):
            operator = build(Digits, use_fp16=use_fp16)
            assert operator.model.layers[0].compute_dtype == dtype
            scales = hasattr(operator._train_state.optimizers[0], "dynamic_scale")
            assert scales == (dtype == "float16")
            losses = [operator.train_batch(b, {})["train_loss"] for b in batches(operator)]
            assert float(losses[-1]) < float(losses[0])
    finally:
        keras.mixed_precision.set_global_policy("float32")


def test_an_override_may_leave_out_the_epoch(build):
    operator = build(Digits)
    operator._train_state.position.epoch = 2
    operator.train_batch = lambda batch, batch_info: {"epoch": batch_info["epoch_idx"]}
    assert operator.train_epoch([None])["epoch"] == 2


class TwoHeads(TrainingOperator):
    """Two heads of equal shapes on one body, and one optimizer for all variables."""

    def setup(self, config):
        features = keras.Input((64,))
        body = keras.layers.Dense(8, name="body")(features)  # linear, so that no unit dies
        heads = [keras.layers.Dense(10, name=name)(body) for name in "ab"]
        self.model, self.optimizer = self.register(
            keras.Model(features, heads), getattr(keras.optimizers, config["optimizer"])(0.1)
        )

    def loss_of(self, images, labels, place):
        output = self.model(images, training=True)[place]
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, output))

    def loss_a(self, images, labels):
        return self.loss_of(images, labels, 0)

    def loss_b(self, images, labels):
        return self.loss_of(images, labels, 1)

    def loss_by_name(self, images, labels):
        ((name, features),) = images.items()
        return self.loss_of(features, labels, "ab".index(name))

    def changed(self, loss, batch):
        """Return the layers that a step changes."""
        layers = [self.model.get_layer(name) for name in ("body", "a", "b")]
        before = [layer.get_weights()[0] for layer in layers]
        self.minimize(loss, *batch)
        after = [layer.get_weights()[0] for layer in layers]
        pairs = zip(layers, before, after, strict=True)
        return [layer.name for layer, old, new in pairs if np.abs(old - new).max() > 0]


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_each_loss_of_an_optimizer_changes_the_variables_that_it_depends_on(build, optimizer):
    operator = build(TwoHeads, {"optimizer": optimizer})
    (images, labels), _ = digits()
    batch = (images[:32], labels[:32])
    for _ in range(2):
        assert operator.changed(operator.loss_a, batch) == ["body", "a"]
        assert operator.changed(operator.loss_b, batch) == ["body", "b"]
    for name in "aba":  # the graph of "a" is reused after that of "b"
        named = ({name: images[:32]}, labels[:32])
        assert operator.changed(operator.loss_by_name, named) == ["body", name]
    operator.model.get_layer("body").trainable = False
    assert operator.changed(operator.loss_a, batch) == ["a"]
    assert operator.changed(operator.loss_b, batch) == ["b"]


class OneForTwo(TrainingOperator):
    """An encoder, a classifier of its output, and one optimizer for both."""

    def setup(self, config):
        encoder = keras.Sequential([keras.Input((64,)), keras.layers.Dense(8)])
        classifier = keras.Sequential([keras.Input((8,)), keras.layers.Dense(10)])
        for model in (encoder, classifier):
            model.set_weights([np.full(w.shape, 0.1, "float32") for w in model.get_weights()])
        self.models, self.optimizer = self.register(
            [encoder, classifier], getattr(keras.optimizers, config["optimizer"])(0.1)
        )

    def loss_of(self, images, labels):
        encoder, classifier = self.models
        output = tf.cast(classifier(encoder(images)), tf.float32)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, output))

    def change(self, images, labels):
        """Return by how much a step changes each variable."""
        variables = [variable for model in self.models for variable in model.trainable_variables]
        before = arrays_of(variables)
        self.minimize(self.loss_of, images, labels, model=self.models)
        return [after - before[name] for name, after in arrays_of(variables).items()]


def test_a_new_worker_can_take_over_the_optimizer_of_several_models(build):
    first, second = (build(OneForTwo, {"optimizer": "Adam"}) for _ in range(2))
    (images, labels), _ = digits()
    first.change(images[:32], labels[:32])
    KerasStateAccess(second._train_state).load(KerasStateAccess(first._train_state).read())
    changes = [each.change(images[32:64], labels[32:64]) for each in (first, second)]
    for mine, other in zip(*changes, strict=True):
        np.testing.assert_array_equal(mine, other)


def loss_scale(operator):
    return float(operator._train_state.optimizers[0].dynamic_scale)


def test_an_overflow_does_not_change_the_size_of_updates(build):
    config = {"optimizer": "SGD"}
    (images, labels), _ = digits()
    try:
        first, second = (build(OneForTwo, config, use_fp16="mixed_float16") for _ in range(2))
        for change in second.change(images[:32] + np.inf, labels[:32]):
            assert not change.any()
        changes = [each.change(images[:32], labels[:32]) for each in (first, second)]
        joined = build(OneForTwo, config, use_fp16="mixed_float16")
        KerasStateAccess(joined._train_state).load(KerasStateAccess(second._train_state).read())
    finally:
        keras.mixed_precision.set_global_policy("float32")
    for mine, other in zip(*changes, strict=True):
        np.testing.assert_allclose(mine, other, rtol=0.01, atol=1e-5)
    assert loss_scale(joined) == loss_scale(second) == loss_scale(first) / 2


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"models": object()}, TypeError, "Keras 3 models"),
        ({"models": []}, ValueError, "is empty"),
        ({"optimizers": object()}, ValueError, "optimizer identifier"),
        ({"optimizers": None}, ValueError, "compiled"),
        ({"class_weight": {0: 1.0, "1": 5.0}}, TypeError, "'1' is text"),
        ({"batch_size": 0}, ValueError, "batch_size=0.*at least 1"),
        ({"shuffle": "no"}, TypeError, "shuffle='no'.*True or False"),
    ],
)
def test_wrong_arguments_of_register_and_register_data_are_errors(build, given, error, text):
    class Wrong(TrainingOperator):
        def setup(self, config):
            data = {name: given[name] for name in given.keys() & {"batch_size", "shuffle"}}
            if data:
                self.register_data(train_loader=np.ones((8, 4)), **data)
            parts = {"models": make_model(), "optimizers": "sgd", "criterion": "mse"}
            self.register(**{**parts, **given})

    with pytest.raises(error, match=text):
        build(Wrong)


def test_a_list_of_arrays_has_batches_of_any_size_without_targets(build, caplog):
    class Batched(TrainingOperator):
        def setup(self, config):
            self.register_data(train_loader=[np.ones((4, 64))], batch_size=8)
            self.register(make_model(), "sgd", "mse")

    operator = build(Batched)
    assert "register_data(batch_size=8) does nothing" in caplog.text
    with pytest.raises(ValueError, match="A batch has no target"):
        operator.train_batch(np.ones((4, 64)), {})


def test_register_refuses_optimizers_of_horovod(build):
    horovod = import_horovod("horovod.tensorflow.keras")
    horovod.init()
    wrapped = horovod.DistributedOptimizer(keras.optimizers.SGD())
    horovod.shutdown()

    class Wrong(TrainingOperator):
        def setup(self, config):
            self.register(make_model(), wrapped, "mse")

    with pytest.raises(TypeError, match=r"Pass the inner optimizer"):
        build(Wrong)


def test_mean_of_equal_weights_and_integers_changes_no_bit():
    class OfThree(KerasCollectives):
        def all_reduce_mean(self, tensors):
            self.number = len(tensors)
            return [(tensor + tensor + tensor) / 3 for tensor in tensors]

    frozen, norm = keras.layers.Dense(64, trainable=False), keras.layers.BatchNormalization()
    model = keras.Sequential([keras.Input((2,)), frozen, norm, keras.layers.Dropout(0.5)])
    before = [variable.numpy() for variable in model.non_trainable_variables]
    state = SimpleNamespace(models=[model], optimizers=[], collectives=OfThree(3, 0))
    ReplicaSync(state).sync_buffers()
    for variable, value in zip(model.non_trainable_variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert state.collectives.number == 4  # without the integers of the dropout layer
