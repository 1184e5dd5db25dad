"""Trials of Ray Tune and their trainers, without starting Ray."""

import sys

import numpy as np
import pytest
import ray
from ray.tune import Trainable

import raysgd.torch
from raysgd import TorchTrainer
from raysgd.callbacks import Callback
from raysgd.train import RunConfig, ScalingConfig, TrainingCallback
from raysgd.train.data_parallel_trainer import DataParallelTrainer
from raysgd.tune import BaseTorchTrainable
from raysgd.utils import BATCH_SIZE
from tests.operators import Classifier
from tests.unit.conftest import SMALL


def make_class(**arguments):
    return TorchTrainer.as_trainable(
        **{"training_operator_cls": Classifier, "use_gpu": False, **arguments}
    )


@pytest.fixture
def make_trial(monkeypatch, tmp_path):
    """Return a function that creates trials, with their workers in this process."""
    monkeypatch.setattr("ray.tune.trainable.trainable.DEFAULT_STORAGE_PATH", str(tmp_path))
    started = ray.is_initialized()  # by other tests
    made = []

    def make(trial_config=None, config=None, cls=None, **arguments):
        if cls is None:
            cls = make_class(config={**SMALL, **(config or {})}, use_local=True, **arguments)
        made.append(cls(config=dict(trial_config or {})))
        return made[-1]

    yield make
    for trial in made:
        trial.stop()
    assert ray.is_initialized() == started


def bundles(trainable, **config):
    room = trainable.default_resource_request(config)
    assert room.strategy == "PACK"
    return room.bundles


def lr_of(trial):
    return trial.trainer.get_local_operator().optimizer.param_groups[0]["lr"]


# ---- the class


def test_the_class_is_a_trainable_with_a_name_that_tune_finds_again():
    cls = make_class()
    assert issubclass(cls, Trainable)
    assert issubclass(cls, BaseTorchTrainable)
    assert cls.__name__ == make_class().__name__ == "TorchTrainable"


def test_without_tune_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.tune", None)
    monkeypatch.delitem(sys.modules, "raysgd.trials")
    monkeypatch.delattr("raysgd.trials")
    with pytest.raises(RuntimeError, match=r'pip install "raysgd\[tune\]"'):
        make_class()


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"num_worker": 2}, TypeError, r"argument 'num_worker'\. Did you mean 'num_workers'"),
        ({"num_replicas": 2}, DeprecationWarning, "Use num_workers instead"),
        ({"training_operator_cls": object}, TypeError, "must be a subclass"),
    ],
)
def test_wrong_arguments_are_refused_before_there_are_trials(arguments, error, match):
    with pytest.raises(error, match=match):
        make_class(**arguments)


def test_an_old_subclass_creates_its_trainer_itself(make_trial, tmp_path):
    class Own(raysgd.torch.BaseTorchTrainable):
        def _create_trainer(self, config):
            return TorchTrainer(
                training_operator_cls=Classifier,
                config={**SMALL, **config},
                use_local=True,
                use_gpu=False,
                data_creator=None,
            )

    assert Own.default_resource_request({"lr": 0.5}) is None  # Tune then reserves one CPU
    trial = make_trial({"lr": 0.5}, cls=Own)
    assert lr_of(trial) == 0.5
    assert {"train_loss", "val_loss"} <= trial.train().keys()
    trial.save(str(tmp_path / "saved"))
    trial.restore(str(tmp_path / "saved"))
    assert trial.trainer.epoch == 1
    with pytest.raises(TypeError, match=r"BaseTrainable has no trainer.*_create_trainer"):
        BaseTorchTrainable.default_resource_request({})


def test_a_subclass_of_the_trainer_may_have_its_own_arguments():
    class Own(TorchTrainer):
        def __init__(self, *, extra, **arguments):
            super().__init__(**arguments)

    cls = Own.as_trainable(training_operator_cls=Classifier, extra=1, num_workers=2)
    assert cls.__name__ == "OwnTrainable"
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        Own.as_trainable(training_operator_cls=Classifier, other=1)


# ---- resources

WORKER = {"CPU": 1}


@pytest.mark.parametrize(
    ("arguments", "config", "expected"),
    [
        ({"num_workers": 3, "num_cpus_per_worker": 2}, {}, [{"CPU": 2}] * 3),
        ({"resources_per_worker": {"disk": 5}}, {}, [{"CPU": 1, "disk": 5}]),
        ({"num_workers": 2, "use_local": True}, {}, [WORKER, WORKER]),
        ({"resources_per_worker": {"GPU": 2}, "use_gpu": True}, {}, [{"CPU": 1, "GPU": 2}]),
        ({"num_workers": 4}, {"num_workers": np.int64(1)}, [WORKER]),
        ({}, {"num_cpus_per_worker": 0.5, "use_gpu": True}, [{"CPU": 0.5, "GPU": 1}]),
        # `config` is for the operator, so its num_workers does not count
        ({"num_workers": 2, "config": {"num_workers": 7}}, {}, [WORKER, WORKER]),
    ],
)
def test_a_trial_reserves_a_bundle_for_each_worker(arguments, config, expected):
    assert bundles(make_class(**arguments), **config) == expected


@pytest.mark.parametrize("arguments", [{}, {"num_workers": 2}, {"use_local": True}])
def test_the_process_of_a_trial_reserves_only_what_its_own_worker_needs(arguments):
    room = make_class(**arguments).default_resource_request({})
    assert room.head_bundle_is_empty == ("use_local" not in arguments)


def test_a_trial_of_a_function_has_room_for_the_largest_group_as_configured():
    scaling = ScalingConfig(num_workers=(1, 3), placement_strategy="SPREAD")
    cls = DataParallelTrainer(print, scaling_config=scaling).as_trainable()
    room = cls.default_resource_request({})
    assert (room.bundles, room.strategy) == ([WORKER] * 4, "SPREAD")  # one for its own process


@pytest.mark.parametrize(("gpus", "worker"), [(0, {"CPU": 1}), (2, {"CPU": 1, "GPU": 1})])
def test_auto_asks_the_cluster_for_gpus(monkeypatch, gpus, worker):
    monkeypatch.setattr("raysgd.cluster.ray_session.connect", lambda: None)
    monkeypatch.setattr("raysgd.cluster.ray_session.gpus_in_cluster", lambda: gpus)
    assert bundles(make_class(use_gpu="auto")) == [worker]


# ---- trials


def test_the_config_of_a_trial_is_merged_over_that_of_the_trainer(make_trial):
    config = {"lr": 0.5, "momentum": 0.25, BATCH_SIZE: 8}
    trial = make_trial({"lr": 0.125, "num_workers": 1}, config)
    assert trial.trainer.config == {**SMALL, **config, "lr": 0.125, "num_workers": 1}
    assert type(trial).trainer_kwargs["config"]["lr"] == 0.5


class Unvalidated(Classifier):
    def register_data(self, *, train_loader, validation_loader):
        super().register_data(train_loader=train_loader)


def test_without_a_validation_loader_a_step_only_trains(make_trial):
    result = make_trial(training_operator_cls=Unvalidated).train()
    assert result["epoch"] == 1
    assert not [name for name in result if name.startswith("val_")]


def test_an_override_replaces_the_step(make_trial):
    trial = make_trial(override_tune_step=lambda t, info: {**t.train(num_steps=2), **info})
    assert [trial.train()["iteration"] for _ in range(2)] == [0, 1]
    assert trial.trainer.global_step == 4


def test_a_trial_continues_from_its_checkpoint(make_trial, tmp_path):
    trial, other = make_trial(config={"lr": 0.1}), make_trial(config={"lr": 0.1})
    trial.train()
    saved = trial.save(str(tmp_path / "saved"))
    expected = trial.train()
    other.restore(saved)
    result = other.train()
    for name in ("epoch", "training_iteration", "train_loss", "val_loss"):
        assert result[name] == expected[name]


def test_a_copied_trial_uses_the_options_that_its_config_changes(make_trial, tmp_path):
    better = make_trial({"lr": 0.1, "momentum": 0.9})
    better.train()
    copied = make_trial({"lr": 0.2, "momentum": 0.9})
    copied.restore(better.save(str(tmp_path / "saved")))
    assert lr_of(copied) == 0.2
    assert copied.trainer.epoch == 1
    optimizer = copied.trainer.get_local_operator().optimizer
    assert all("momentum_buffer" in state for state in optimizer.state.values())
    assert optimizer.param_groups[0]["momentum"] == 0.9
    third = make_trial({"lr": np.float32(0.5)})
    third.restore(copied.save(str(tmp_path / "again")))
    assert lr_of(third) == 0.5


def test_a_rate_that_the_config_does_not_change_is_restored(make_trial, tmp_path):
    trial, other = make_trial({"lr": 0.1}), make_trial({"lr": 0.1})
    trial.trainer.get_local_operator().optimizer.param_groups[0]["lr"] = 0.01
    other.restore(trial.save(str(tmp_path / "saved")))
    assert lr_of(other) == 0.01


def test_the_file_of_the_trainer_alone_is_a_checkpoint_of_a_trial(make_trial, tmp_path):
    trial, other = make_trial({"lr": 0.1}), make_trial({"lr": 0.2})
    trial.trainer.save(tmp_path / "trainer.checkpoint")
    other.load_checkpoint(tmp_path)
    assert lr_of(other) == 0.1


class Counting(Callback):
    """A callback that adds the number of epochs it has seen to the metrics."""

    num_epochs = 0

    def on_epoch_end(self, trainer, metrics):
        self.num_epochs += 1
        metrics["num_epochs_seen"] = self.num_epochs


def test_a_reused_trial_keeps_nothing_of_the_first(make_trial):
    trial = make_trial({"lr": 0.1}, callbacks=[Counting()])
    assert [trial.train()["num_epochs_seen"] for _ in range(2)] == [1, 2]
    first = trial.trainer
    assert (trial.reset({"lr": 0.2}), lr_of(trial)) == (True, 0.2)
    assert trial.train().items() >= {"epoch": 1, "num_epochs_seen": 1}.items()
    with pytest.raises(RuntimeError, match="shut down"):
        first.train()
    vars(counting := Counting())["module"] = pytest  # which cannot be copied
    make_trial({"lr": 0.1}, callbacks=[counting])
    trainer = DataParallelTrainer(print, run_config=RunConfig(callbacks=[TrainingCallback()]))
    assert trainer.for_trial({}).run_config.callbacks[0] not in trainer.run_config.callbacks
