"""Operators from functions of the config, and what fit_config asks for."""

import pytest

from raysgd.tf.creators import creator_operator, fit_plan
from tests.tf_operators import digits, keras_of, make_model


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        ({"fit_config": 3}, TypeError, r"config\(fit_config=3\): must be a dict"),
        ({"fit_config": {"epochs": 0}}, ValueError, r"fit_config\(epochs=0\): must be at least 1"),
        ({"fit_config": {"batch_size": 3}}, ValueError, r"'batch_size'\. It can have 'epochs'"),
    ],
)
def test_wrong_fit_configs_are_errors(config, error, text):
    with pytest.raises(error, match=text):
        fit_plan(config)


def model_creator(config):
    keras = keras_of(config)
    model = make_model(keras)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


@pytest.fixture
def create(build):
    """A function that creates an operator, and returns the calls of its Keras callback too."""

    def create(**fit_config):
        calls = []

        class Recording(keras_of({}).callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                calls.append(("begin", epoch))

            def on_train_batch_end(self, batch, logs=None):
                calls.append(batch)

            def on_epoch_end(self, epoch, logs=None):
                calls.append(("end", epoch, *sorted(logs)))

        config = {"fit_config": {**fit_config, "callbacks": [Recording()]}}
        return build(creator_operator(model_creator, lambda config: digits()), config), calls

    return create


@pytest.mark.parametrize("segments", [[2, 2], [1, 1, 2], [2, 1, 1]])
def test_callbacks_see_epochs_of_steps_per_epoch(create, segments):
    operator, calls = create(steps_per_epoch=2)

    def steps(count):
        for batch in operator._train_state.data.source("train").batches(0, 0, count):
            yield batch
            operator._train_state.commit()

    for count in segments:
        operator.train_epoch(steps(count), epoch_idx=0)  # endless data stay in their first epoch
    found = [call[:2] for call in calls if isinstance(call, tuple)]
    assert found == [("begin", 0), ("end", 0), ("begin", 1), ("end", 1)]


def test_callbacks_of_keras_see_batches_and_epochs(create):
    operator, calls = create()
    operator.train_epoch(operator._train_state.data.source("train").batches(0, 0, 2))
    assert calls == [("begin", 0), 0, 1, ("end", 0, "accuracy", "loss")]
