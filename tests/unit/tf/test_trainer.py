"""TFTrainer with its only worker in this process, and the arguments that it refuses."""

import functools
import itertools

import numpy as np
import pytest

from raysgd import TFTrainer
from raysgd._internal import step_timing
from raysgd.callbacks import EMA, Callback
from raysgd.errors import CallbackError, CheckpointError
from raysgd.tf import TrainingOperator
from raysgd.tf.trainer import fit_limits
from tests.tf_operators import Digits, digits, make_model

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")


@pytest.fixture(scope="module")
def shared():
    with TFTrainer(training_operator_cls=Digits, config={"data": "tf"}, use_local=True) as made:
        yield made, made.state_dict()


@pytest.fixture
def trainer(shared):
    """A trainer in its initial state."""
    made, start = shared
    made.load_state_dict(start)
    return made


def test_precision_and_eager_mode_of_a_local_trainer_end_with_it():
    for use_fp16, dtype in ((True, "bfloat16"), (False, "float32")):
        with TFTrainer(training_operator_cls=Digits, use_local=True, use_fp16=use_fp16) as trainer:
            assert trainer.get_local_operator().model.layers[0].compute_dtype == dtype
            trainer.apply_all_operators(lambda _: tf.config.run_functions_eagerly(True))
        assert not tf.config.functions_run_eagerly()


def test_it_trains_in_steps_and_epochs(trainer):
    first = trainer.train(num_steps=5)
    assert (first["epoch"], first["num_samples"], first["batch_count"]) == (1, 160, 5)
    rest = trainer.train(profile=True)
    assert (rest["epoch"], rest["num_samples"]) == (1, 1280)
    assert rest["profile"]["mean_grad_s"] > 0
    assert trainer.validate(num_steps=3)["num_samples"] == 96
    assert trainer.validate()["num_samples"] == 357 - 96


def test_get_model_predict_and_test_agree(trainer, tmp_path):
    trainer.train(num_steps=40)
    model = trainer.get_model()
    (_, _), (images, labels) = digits()
    predicted = model.predict(images, verbose=0)
    share = (predicted.argmax(axis=1) == labels).mean()
    close = pytest.approx(share, abs=2.5 / len(labels))  # rounding may decide on a few samples
    assert share > 0.3  # of ten classes
    assert trainer.save_model(tmp_path / "model.safetensors")
    assert trainer.validate()["val_accuracy"] == close
    assert trainer.test((images, labels))["test_accuracy"] == close
    for given in ((images, labels), images):
        np.testing.assert_allclose(trainer.predict(given), predicted, rtol=1e-4, atol=1e-4)
    with pytest.raises(CallbackError, match="use_ema=True"):
        trainer.fit(trainer.epoch + 1, callbacks=[EMA()])


def test_schedulers_of_pytorch_are_refused(trainer):
    with pytest.raises(NotImplementedError, match="LearningRateSchedule"):
        trainer.update_scheduler(0.3)


def model_creator(config):
    # not built yet: the data determine the shape of the features
    model = keras.Sequential([keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
    return model


def data_creator(config):
    import tensorflow as tf

    train, validation = (tf.data.Dataset.from_tensor_slices(each) for each in digits())
    return train.repeat().shuffle(100).batch(32), validation.batch(32)


def test_creator_functions_train_and_validate(tmp_path):
    config = {"fit_config": {"epochs": 2, "steps_per_epoch": 10}, "evaluate_config": {"steps": 4}}
    with TFTrainer(model_creator, data_creator, config, num_replicas=1, use_local=True) as trainer:
        assert (trainer.model_creator, trainer.data_creator) == (model_creator, data_creator)
        assert (trainer.num_replicas, trainer.verbose) == (1, False)
        assert {"train_loss", "train_accuracy"} <= set(trainer.train())
        assert trainer.global_step == 20
        validated = trainer.validate()
        assert {"validation_loss", "validation_accuracy", "loss"} <= set(validated)
        assert validated["num_samples"] == 128
        assert trainer.validate() == validated  # of the same steps
        path = trainer.save(tmp_path / "state")
        trainer.train()
        trainer.restore(path)
        assert trainer.global_step == 20


def test_each_epoch_of_a_fit_config_has_its_steps():
    """The `fit` of Keras takes 2, 1, 2, and 1 steps, because each epoch ends with the data."""
    config = {"fit_config": {"epochs": 4, "steps_per_epoch": 2}}
    images, labels = digits()[0]
    data = (images[:96], labels[:96]), None  # three batches of 32
    with TFTrainer(model_creator, lambda _: data, config, use_local=True) as trainer:
        trainer.train()
        assert trainer.global_step == 8


@pytest.mark.parametrize(("steps", "max_steps"), [(8, 10), (25, 10), (4, 20)])
def test_fit_of_creator_functions_ends_at_max_steps_with_metrics(steps, max_steps):
    config = {"fit_config": {"epochs": 2, "steps_per_epoch": steps}}
    arguments = {"config": config, "use_local": True}
    with TFTrainer(model_creator, data_creator, **arguments) as trainer:
        history = trainer.fit(max_steps=max_steps, verbose=False)
        assert trainer.global_step == max_steps
        assert all(row["train_loss"] > 0 and row["batch_count"] > 0 for row in history)
        stopping = Callback()
        stopping.on_epoch_end = stopping.on_partial_epoch_end = lambda *_: trainer.request_stop(
            "enough"
        )
        trainer.fit(max_steps=max_steps + 9, verbose=False, callbacks=[stopping])
        assert trainer.global_step == max_steps + min(steps, 9)


def test_fit_refuses_to_count_epochs_of_endless_data_of_creator_functions():
    config = {"fit_config": {"steps_per_epoch": 2}}
    with (
        TFTrainer(model_creator, data_creator, config, use_local=True) as trainer,
        pytest.raises(ValueError, match=r"repeats without end.* fit\(max_steps="),
    ):
        trainer.fit(1, verbose=False)


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        ({"fit_config": 3}, TypeError, r"config\(fit_config=3\): must be a dict"),
        ({"fit_config": {"epochs": 0}}, ValueError, r"fit_config\(epochs=0\): must be at least 1"),
        ({"fit_config": {"batch_size": 3}}, ValueError, r"'batch_size'\. It can have 'epochs'"),
        ({"fit_config": {"callbacks": []}}, ValueError, "TFTrainer.callbacks="),
    ],
)
def test_wrong_fit_configs_are_errors(config, error, text):
    with pytest.raises(error, match=text):
        fit_limits(config)


def make_trainable(value):
    """Return a function for `apply_all_operators` that freezes or thaws the first layer."""

    def change(operator):
        operator.model.layers[0].trainable = value

    return change


class TwoOutputs(TrainingOperator):
    """Its validation data have no targets."""

    def setup(self, config):
        inputs = keras.Input((2,))
        outputs = [
            keras.layers.Dense(1, None, kernel_regularizer="l2", name=n)(inputs) for n in "ab"
        ]
        self.register(
            models=keras.Model(inputs, outputs),
            optimizers=keras.optimizers.SGD(0.01),
            criterion=["mse", "mse"],
        )
        x, y = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")
        train, validation = map(tf.data.Dataset.from_tensor_slices, [(x, (y, y)), (x,)])
        self.register_data(train_loader=train.batch(4), validation_loader=validation.batch(4))


def test_a_sanity_check_changes_neither_the_losses_of_training_nor_weights():
    with TFTrainer(training_operator_cls=TwoOutputs, use_local=True) as trainer:
        train_state = trainer.get_local_operator()._train_state
        kernel = train_state.models[0].weights[0]
        with train_state.preserving_models():
            kernel.assign(kernel * 0)
        assert kernel.numpy().any()
        (result,) = trainer.fit(1)
    assert {"train_a_loss", "train_b_loss"} <= result.keys()


def test_a_state_has_what_is_trainable():
    with TFTrainer(training_operator_cls=Digits, config={}, use_local=True) as trainer:
        trainer.train(num_steps=1)
        trainer.apply_all_operators(make_trainable(False))
        state = trainer.state_dict()
    with TFTrainer(training_operator_cls=Digits, config={}, use_local=True) as trainer:
        trainer.load_state_dict({k: v for k, v in state.items() if k != "trainable"})  # older
        assert trainer.get_model().layers[0].trainable
        trainer.load_state_dict(state)
        trainer.train(num_steps=2)
        found = trainer.state_dict()
        models = zip(*(each["models"][0].values() for each in (state, found)), strict=True)
        assert [(then == now).all() for then, now in models] == [True, True, False, False]
        with pytest.raises(CheckpointError, match=r"trainable.* has 1 layers and variables, not 8"):
            trainer.load_state_dict({**state, "trainable": [{"0/model": True}]})
        adamax = {n.replace("velocity", "norm"): v for n, v in state["optimizers"][0].items()}
        with pytest.raises(CheckpointError, match=r"has .*_norm in place of .*_velocity"):
            trainer.load_state_dict({**state, "optimizers": [adamax]})


class Masking(keras.layers.Layer):
    def build(self, shape):
        infinite = keras.initializers.Constant(-np.inf)
        self.mask = self.add_weight(shape=(2,), initializer=infinite, trainable=False)

    def call(self, inputs):
        return inputs


class Masked(Digits):
    def register(self, models, **others):
        models.add(Masking())
        return super().register(models, **others)


def test_a_mask_may_be_infinite_and_a_trained_weight_may_not(tmp_path):
    with TFTrainer(training_operator_cls=Masked, config={}, use_local=True) as trainer:
        trainer.train(num_steps=1)
        trainer.load(trainer.save(tmp_path / "state"))
        kernel = trainer.get_local_operator().model.layers[0].kernel
        kernel.assign(kernel * np.nan)
        with pytest.raises(CheckpointError, match="kernel has NaN or infinity"):
            trainer.save(tmp_path / "state")


class Frozen(Digits):
    def register(self, models, **others):
        models.layers[0].trainable = False
        return super().register(models, **others)


class Constant(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.1


class Wrapper(keras.optimizers.SGD):
    def get_config(self):
        return {"inner": {"learning_rate": next(RATES)}, "object": object(), "each": [object()]}


RATES = itertools.count()
OPTIMIZERS = {
    "schedule": lambda: keras.optimizers.SGD(Constant()),
    "callable": lambda: keras.optimizers.SGD(functools.partial(float, 0.1)),
    "wrapper": Wrapper,
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_rates_need_no_config_and_may_change(kind):
    class Rated(Digits):
        def register(self, models, optimizers, **others):
            return super().register(models, OPTIMIZERS[kind](), **others)

    with TFTrainer(training_operator_cls=Rated, config={}, use_local=True) as trainer:
        assert trainer.train(num_steps=1)["batch_count"] == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda operator: operator.model.compile("sgd", "mse"),
        lambda operator: setattr(operator.optimizer, "weight_decay", 0.1),
        lambda operator: setattr(operator.optimizer, "learning_rate", Constant()),
        lambda operator: setattr(operator, "criterion", keras.losses.MeanAbsoluteError()),
    ],
)
def test_another_phase_of_training_is_an_error_that_names_the_way(change):
    with TFTrainer(training_operator_cls=Frozen, config={}, use_local=True) as trainer:
        trainer.apply_all_operators(make_trainable(True))
        with pytest.raises(RuntimeError, match=r"dense\w*/kernel is trainable now.*set_weights"):
            trainer.train(num_steps=1)
        trainer.apply_all_operators(make_trainable(False))
        trainer.get_local_operator().criterion = None
        assert trainer.train(num_steps=1)["batch_count"] == 1  # nothing had changed
        trainer.apply_all_operators(change)
        for call in (functools.partial(trainer.train, num_steps=1), trainer.validate):
            with pytest.raises(RuntimeError, match="After setup, a model was compiled, an attr"):
                call()
        weights = trainer.get_model().get_weights()

    class Next(Digits):
        def register(self, models, **others):
            models.set_weights(self.config["weights"])
            return super().register(models, **others)

    config = {"weights": weights}
    with TFTrainer(training_operator_cls=Next, config=config, use_local=True) as trainer:
        found = trainer.get_model().get_weights()
        assert all((a == b).all() for a, b in zip(weights, found, strict=True))


@pytest.mark.parametrize("given", [{}, {"optimizers": "sgd"}, {"criterion": "mse"}])
def test_a_model_is_compiled_before_register_takes_its_objects(given):
    class Late(Digits):
        def register(self, models, **others):
            models.compile("sgd", "mse")
            super().register(models, **given)
            models.compile("sgd", "mse")
            return models, None, None, None

    with pytest.raises(RuntimeError, match=r"after register.*Call compile\(\) first"):
        TFTrainer(training_operator_cls=Late, config={}, use_local=True)
    given = {"optimizers": "sgd", "criterion": "mse"}
    TFTrainer(training_operator_cls=Late, config={}, use_local=True).shutdown()


class ValidatesFirst(Digits):
    """Validates within an epoch. Then the epoch fails."""

    def train_epoch(self, iterator, info):
        def batches():
            yield from itertools.islice(iterator, 3)
            self.validate(self.validation_loader)
            raise ValueError("after the validation")

        return super().train_epoch(batches(), info)

    def validate_batch(self, batch, batch_info):
        self.phase = self._train_state.step_timing.phase
        return super().validate_batch(batch, batch_info)


def test_validation_within_an_epoch_has_metrics_and_time_of_its_own():
    config = {"num_samples": 160}
    with TFTrainer(training_operator_cls=ValidatesFirst, config=config, use_local=True) as trainer:
        with pytest.raises(ValueError, match="after the validation"):
            trainer.train()
        operator = trainer.get_local_operator()
        metrics = operator._train_state.meters.summary()
    assert operator.phase == step_timing._OUTSIDE
    assert metrics["num_samples"] == 96
    assert "val_loss" not in metrics


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.ones((4, 64), "float32"), np.ones(4, "int64")


class NestedOutputs(TrainingOperator):
    def setup(self, config):
        inputs = keras.Input((64,))
        heads = [keras.layers.Dense(n, name=f"of_{n}")(inputs) for n in (1, 2, 3)]
        outputs = {"list": heads, "nested": {"pair": heads[:2], "c": heads[2]}}
        model = keras.Model(inputs, outputs[config["outputs"]])
        self.model, *_ = self.register(model, "sgd", "mse")


@pytest.mark.parametrize("outputs", ["list", "nested"])
def test_predict_returns_an_array_for_each_output(outputs):
    images = digits()[1][0][:70]  # three batches
    config = {"outputs": outputs}
    with TFTrainer(training_operator_cls=NestedOutputs, config=config, use_local=True) as trainer:
        found = trainer.predict(images)
        expected = trainer.get_local_operator().model.predict(images, verbose=0)
        for own, other in zip(keras.tree.flatten(found), keras.tree.flatten(expected), strict=True):
            np.testing.assert_allclose(own, other, atol=1e-5)
        assert type(found) is (tuple if outputs == "list" else dict)
        with pytest.raises(TypeError, match=r"keras\.utils\.PyDataset, such as .*Batches"):
            trainer.predict(Batches())


class OwnOutputs(keras.Model):
    """Returns ragged rows, or puts the time before the samples."""

    def __init__(self, ragged):
        super().__init__()
        self.ragged = ragged

    def call(self, inputs):
        if self.ragged:
            return tf.ragged.boolean_mask(inputs, inputs > 0.5)
        return tf.stack([inputs, inputs, inputs])


class RegistersOutputs(TrainingOperator):
    def setup(self, config):
        model = OwnOutputs(config["ragged"])
        self.register_data(train_loader=digits()[1])
        self.register(model, "sgd", "mse")


@pytest.mark.parametrize("ragged", [False, True])
def test_rows_of_predictions_are_samples(ragged):
    images = digits()[1][0][:70]
    config = {"ragged": ragged}
    with TFTrainer(
        training_operator_cls=RegistersOutputs, config=config, use_local=True
    ) as trainer:
        if not ragged:
            with pytest.raises(ValueError, match=r"shape \(3, 32, 64\) for a batch of 32 samples"):
                trainer.predict(images)
            return
        found = trainer.predict(images)
        assert [row.tolist() for row in found] == [row[row > 0.5].tolist() for row in images]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"training_operator_cls": None}, TypeError, "raysgd.tf.TrainingOperator"),
        ({"training_operator_cls": TrainingOperator}, NotImplementedError, "override setup"),
        ({"model_creator": model_creator}, TypeError, "not both"),
        ({"num_workers": 0}, ValueError, "num_workers=0"),
        ({"num_workers": 2, "num_replicas": 3}, ValueError, "one argument with two names"),
        ({"backend": "nccl"}, ValueError, "'gloo', 'horovod', 'tensorflow'"),
        ({"use_fp16": "apex"}, ValueError, "use_fp16='apex'"),
        ({"config": 3}, TypeError, "config"),
    ],
)
def test_wrong_arguments_are_errors(arguments, error, text):
    with pytest.raises(error, match=text):
        TFTrainer(**{"training_operator_cls": Digits, **arguments})


class Endless(Digits):
    def setup(self, config):
        super().setup(config)
        streams = [tf.data.Dataset.from_tensor_slices(part).batch(32) for part in digits()]
        self.register_data(train_loader=streams[0].repeat(), validation_loader=streams[1].repeat())

    def train_epoch(self, iterator, info=None):  # the signature of older scripts
        return super().train_epoch(iterator, info)


def test_endless_data_need_a_number_of_steps():
    with TFTrainer(training_operator_cls=Endless, use_local=True) as trainer:
        with pytest.raises(ValueError, match=r"training data set repeats.* train\(num_steps="):
            trainer.train()
        with pytest.raises(ValueError, match=r"fit\(max_steps=\.\.\.\), or register dataset\.take"):
            trainer.fit(1, validate_every=None)
        with pytest.raises(ValueError, match=r"validation data set repeats.* validate\(num_steps="):
            trainer.validate()
        assert trainer.train(num_steps=2)["batch_count"] == 2
        assert "mark" not in trainer.state_dict()["data"]["stream"]  # has no end to resume at
        assert trainer.validate(num_steps=2)["batch_count"] == 2
        trainer.fit(max_steps=5, validate_every=None, verbose=False)
        assert trainer.global_step == 5


class Averaging(TrainingOperator):
    def setup(self, config):
        model = make_model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.5, use_ema=True), loss)
        model.optimizer.build(model.trainable_variables)
        model.layers[0].trainable = not config["frozen"]
        self.model, *_ = self.register(model)
        self.register_data(train_loader=digits()[0], shuffle=False)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_model_has_the_averages_of_its_optimizer_as_after_fit(frozen):
    config = {"frozen": frozen}
    with TFTrainer(training_operator_cls=Averaging, config=config, use_local=True) as trainer:
        before = trainer.get_model().get_weights()
        trainer.train()
        model = trainer.get_model()
        raw = list(trainer.state_dict()["models"][0].values())
        predicted = trainer.predict(digits()[1])
    np.testing.assert_allclose(predicted, model.predict(digits()[1][0], verbose=0), atol=1e-5)
    weights = [*zip(before, model.get_weights(), raw, strict=True)][2 * frozen :]
    assert all(np.abs(held - old).sum() < np.abs(new - old).sum() for old, held, new in weights)
