"""Learning rates that depend on the config of a trial."""

import pytest

from raysgd import TFTrainer
from raysgd.loop.operator_base import has_validation_loader
from tests.tf_operators import Digits, digits, make_model

pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")


def test_a_rate_that_a_config_changes_is_changed_in_the_state(build):
    from raysgd.tf.state_access import KerasStateAccess

    slow, fast = build(Digits, {"lr": 0.01}), build(Digits, {"lr": 0.04})
    then, now = (
        slow._train_state.initial_hyperparameters(),
        fast._train_state.initial_hyperparameters(),
    )
    assert has_validation_loader(slow)
    assert (then, now) == ([pytest.approx(0.01)], [pytest.approx(0.04)])
    slow.optimizer.learning_rate.assign(0.005)  # lowered during training
    KerasStateAccess(fast._train_state).load(KerasStateAccess(slow._train_state).read())
    fast._train_state.rescale_hyperparameters(then, now)
    assert float(fast.optimizer.learning_rate.numpy()) == pytest.approx(0.02)


def test_a_trial_trains_with_its_config_and_goes_on_from_anothers_checkpoint(monkeypatch, tmp_path):
    monkeypatch.setattr("ray.tune.trainable.trainable.DEFAULT_STORAGE_PATH", str(tmp_path))
    trainable = TFTrainer.as_trainable(
        training_operator_cls=Digits, config={"optimizer": "SGD"}, use_local=True, use_gpu=False
    )
    keras.utils.set_random_seed(0)
    slow, fast = trainable(config={"lr": 1e-6}), trainable(config={"lr": 0.2})
    try:
        assert slow.train()["val_accuracy"] < 0.4
        result = fast.train()
        assert (result["epoch"], result["num_samples"]) == (1, 357)
        assert result["val_accuracy"] > 0.6
        assert slow.trainer.config["lr"] == 1e-6
        fast.save_checkpoint(str(tmp_path))
        slow.load_checkpoint(str(tmp_path))
        result = slow.train()
        assert (result["epoch"], result["val_accuracy"] > 0.6) == (2, True)
    finally:
        slow.stop()
        fast.stop()


def test_older_scripts_may_pass_the_trainable_class_to_tune(monkeypatch, tmp_path):
    from raysgd.tf.tf_trainer import TFTrainable

    monkeypatch.setattr("ray.tune.trainable.trainable.DEFAULT_STORAGE_PATH", str(tmp_path))

    def model_creator(config):
        model = make_model()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    config = {
        "model_creator": model_creator,
        "data_creator": lambda config: digits(),
        "use_gpu": False,
        "trainer_config": {"fit_config": {"steps_per_epoch": 2}, "evaluate_config": {"steps": 1}},
    }
    room = TFTrainable.default_resource_request({**config, "num_replicas": 2})
    assert room.bundles == [{"CPU": 1}] * 2
    trial = TFTrainable(config={**config, "num_replicas": 1, "use_local": True})
    try:
        result = trial.train()
        assert trial.trainer.global_step == 2
        assert {"train_loss", "validation_loss"} <= result.keys()
    finally:
        trial.stop()
