"""What a trial of Ray Tune asks for, and what it does with its trainer; no Ray is started."""

import json
import subprocess
import sys

import numpy as np
import pytest
import ray
import torch
from ray.tune import Trainable

from raysgd import TorchTrainer
from raysgd.callbacks import Callback
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
    """A factory of trials in this process; the trainer's only worker is here as well."""
    monkeypatch.setattr("ray.tune.trainable.trainable.DEFAULT_STORAGE_PATH", str(tmp_path))
    started = ray.is_initialized()  # by other tests; not one of these starts it
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


def test_the_base_is_found_where_users_of_the_old_library_look():
    import raysgd.torch

    assert raysgd.torch.BaseTorchTrainable is BaseTorchTrainable
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = raysgd.torch.Nothing


def test_without_tune_the_error_names_the_extra():
    code = """
import sys
sys.modules["pyarrow"] = None  # as where ray is installed, and ray[tune] is not
import raysgd.torch
try:
    raysgd.torch.TorchTrainer.as_trainable(training_operator_cls=Operator)
except RuntimeError as error:
    print(error)
"""
    operator = "from raysgd import TrainingOperator\nclass Operator(TrainingOperator):\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{operator}    def setup(self, config): pass\n{code}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert 'pip install "raysgd[tune]"' in done.stdout, done.stderr


def test_a_mistake_in_the_arguments_is_found_before_there_are_trials():
    with pytest.raises(TypeError, match=r"argument 'num_worker'\. Did you mean 'num_workers'"):
        make_class(num_worker=2)
    with pytest.raises(DeprecationWarning, match="Use num_workers instead"):
        make_class(num_replicas=2)
    with pytest.raises(TypeError, match="must be a subclass"):
        make_class(training_operator_cls=object)
    with pytest.raises(TypeError, match=r"config=3\): must be a dict"):
        make_class(config=3)
    with pytest.raises(ValueError, match=r"num_workers=0\): must be at least 1"):
        make_class(num_workers=0)
    with pytest.raises(TypeError, match=r"as_trainable\(callbacks=\.\.\.\) takes a list .* not 5"):
        make_class(callbacks=5)
    with pytest.raises(TypeError, match="logdir must be a path"):
        make_class(logdir=b"runs")


def test_an_older_subclass_makes_its_trainer_itself(make_trial, tmp_path):
    class Own(BaseTorchTrainable):
        def _create_trainer(self, config):
            return TorchTrainer(
                training_operator_cls=Classifier,
                config={**SMALL, **config},
                use_local=True,
                use_gpu=False,
                data_creator=None,
            )

    assert Own.default_resource_request({"lr": 0.5}) is None  # which is one CPU to Tune
    trial = make_trial({"lr": 0.5}, cls=Own)
    assert lr_of(trial) == 0.5
    assert {"train_loss", "val_loss"} <= trial.train().keys()
    trial.save(str(tmp_path / "saved"))
    trial.restore(str(tmp_path / "saved"))
    assert trial.trainer.epoch == 1
    with pytest.raises(TypeError, match=r"BaseTorchTrainable does not say .*_create_trainer"):
        BaseTorchTrainable.default_resource_request({})


def test_arguments_of_a_subclass_of_the_trainer_are_known():
    class Own(TorchTrainer):
        def __init__(self, *, extra, **arguments):
            super().__init__(**arguments)

    cls = Own.as_trainable(training_operator_cls=Classifier, extra=1, num_workers=2)
    assert cls.__name__ == "OwnTrainable"
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        Own.as_trainable(training_operator_cls=Classifier, other=1)


@pytest.mark.parametrize("step", [lambda trainer: {}, lambda a, b, c: {}, "step", lambda: {}])
def test_an_override_that_does_not_take_two_arguments_is_refused(step):
    with pytest.raises(ValueError, match="function of two arguments, \\(trainer, info\\)"):
        make_class(override_tune_step=step)


# ---- room


def test_there_is_a_bundle_for_each_worker_and_none_for_the_trial():
    cls = make_class(num_workers=3, num_cpus_per_worker=2, resources_per_worker={"disk": 5})
    worker = {"CPU": 2, "disk": 5}
    assert bundles(cls) == [worker, worker, worker]


def test_a_local_worker_has_the_first_bundle():
    assert bundles(make_class(num_workers=2, use_local=True)) == [{"CPU": 1}, {"CPU": 1}]


def test_the_trial_s_config_sets_the_room():
    cls = make_class(num_workers=4, config={"num_workers": 7})
    assert bundles(cls, num_workers=1) == [{"CPU": 1}]
    assert bundles(cls, num_workers=np.int64(1)) == [{"CPU": 1}]
    assert bundles(cls, num_workers=1, num_cpus_per_worker=0.5) == [{"CPU": 0.5}]
    assert bundles(cls, num_workers=1, use_gpu=True) == [{"CPU": 1, "GPU": 1}]
    # the trainer's own config is the operator's business
    assert len(bundles(cls)) == 4


def test_several_gpus_a_worker():
    cls = make_class(resources_per_worker={"GPU": 2}, use_gpu=True)
    assert bundles(cls) == [{"CPU": 1, "GPU": 2}]


@pytest.mark.parametrize(("gpus", "worker"), [(0, {"CPU": 1}), (2, {"CPU": 1, "GPU": 1})])
def test_auto_asks_the_cluster_for_gpus(monkeypatch, gpus, worker):
    monkeypatch.setattr("raysgd.cluster.ray_session.connect", lambda: None)
    monkeypatch.setattr("raysgd.cluster.ray_session.gpus_in_cluster", lambda: gpus)
    assert bundles(make_class(use_gpu="auto")) == [worker]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_workers": "two"}, r"num_workers='two'\): must be an int"),
        ({"num_workers": 10**6}, r"num_workers=1000000\): must be at most 10000"),
        ({"num_workers": 0}, "num_workers=0"),
        ({"num_workers": True}, "num_workers=True"),
        ({"num_workers": 1.5}, "num_workers=1.5"),
        ({"num_cpus_per_worker": 0}, r"num_cpus_per_worker=0\): must be a number above 0"),
        ({"num_cpus_per_worker": "1"}, "num_cpus_per_worker='1'"),
        ({"use_gpu": "yes"}, r"use_gpu='yes'\): must be one of True, False, 'auto'"),
    ],
)
def test_a_config_that_asks_for_what_cannot_be_is_refused(config, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make_class().default_resource_request(config)


# ---- life


def test_a_trial_s_config_is_merged_over_the_trainer_s(make_trial):
    config = {"lr": 0.5, "momentum": 0.25, BATCH_SIZE: 8}
    trial = make_trial({"lr": 0.125, "num_workers": 1}, config)
    assert trial.trainer.config == {**SMALL, **config, "lr": 0.125, "num_workers": 1}
    assert type(trial).trainer_kwargs["config"]["lr"] == 0.5


def test_a_step_trains_and_validates(make_trial):
    trial = make_trial()
    for number in (1, 2):
        result = trial.train()
        assert result["training_iteration"] == result["epoch"] == number
        assert result["train_loss"] > 0
        assert result["val_loss"] > 0
        assert result["num_samples"] == 40


class Unvalidated(Classifier):
    def register_data(self, *, train_loader, validation_loader):
        super().register_data(train_loader=train_loader)


def test_without_a_validation_loader_a_step_trains_alone(make_trial):
    result = make_trial(training_operator_cls=Unvalidated).train()
    assert result["epoch"] == 1
    assert not [name for name in result if name.startswith("val_")]


def test_an_override_replaces_the_step(make_trial):
    trial = make_trial(override_tune_step=lambda t, info: {**t.train(num_steps=2), **info})
    assert [trial.train()["iteration"] for _ in range(2)] == [0, 1]
    assert trial.trainer.global_step == 4


def test_an_override_must_return_a_dict(make_trial):
    trial = make_trial(override_tune_step=lambda trainer, info: 3)
    with pytest.raises(TypeError, match="override_tune_step must return a dict, but got 3"):
        trial.train()


def test_a_trial_goes_on_from_its_checkpoint(make_trial, tmp_path):
    trial, other = make_trial(config={"lr": 0.1}), make_trial(config={"lr": 0.1})
    trial.train()
    saved = trial.save(str(tmp_path / "saved"))
    expected = trial.train()
    other.restore(saved)
    result = other.train()
    for name in ("epoch", "training_iteration", "train_loss", "val_loss"):
        assert result[name] == expected[name]


def test_options_that_a_copied_trial_s_config_changes_are_used(make_trial, tmp_path):
    """Population based training: weights and moments of the better trial, and a rate near its."""
    better = make_trial({"lr": 0.1, "momentum": 0.9})
    better.train()
    copied = make_trial({"lr": 0.2, "momentum": 0.9})
    copied.restore(better.save(str(tmp_path / "saved")))
    assert lr_of(copied) == 0.2
    assert copied.trainer.epoch == 1
    optimizer = copied.trainer.get_local_operator().optimizer
    assert all("momentum_buffer" in state for state in optimizer.state.values())
    assert optimizer.param_groups[0]["momentum"] == 0.9
    # and on: what is copied from a copy
    third = make_trial({"lr": 0.4})
    third.restore(copied.save(str(tmp_path / "again")))
    assert lr_of(third) == 0.4


class Pair(Classifier):
    """Two optimizers that begin with equal rates, where the config says no other, and schedules."""

    def setup(self, config):
        model = torch.nn.Linear(2, 2)
        self.pair = [
            torch.optim.SGD([parameter], lr=config.get(name, 0.1))
            for name, parameter in zip(("lr_g", "lr_d"), model.parameters(), strict=True)
        ]
        schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.5**n) for o in self.pair]
        self.register(models=model, optimizers=self.pair, schedulers=schedulers)

    def rates(self):
        for part in (*self.pair, *self._train_state.schedulers):
            part.step()
        return [optimizer.param_groups[0]["lr"] for optimizer in self.pair]


@pytest.mark.parametrize(("changed", "then"), [("lr_d", [0.05, 0.2]), ("lr_g", [0.2, 0.05])])
def test_a_changed_rate_of_one_of_two_optimizers_lasts(make_trial, tmp_path, changed, then):
    arguments = {"training_operator_cls": Pair, "scheduler_step_freq": "manual"}
    better, copied = make_trial(**arguments), make_trial({changed: 0.4}, **arguments)
    copied.restore(better.save(str(tmp_path / "saved")))
    assert isinstance(json.loads((tmp_path / "saved" / "optimizer_options.json").read_text()), list)
    assert copied.trainer.get_local_operator().rates() == then


def test_a_rate_that_the_config_does_not_set_comes_from_the_checkpoint(make_trial, tmp_path):
    trial, other = make_trial({"lr": 0.1}), make_trial({"lr": 0.1})
    trial.trainer.get_local_operator().optimizer.param_groups[0]["lr"] = 0.01
    other.restore(trial.save(str(tmp_path / "saved")))
    assert lr_of(other) == 0.01


def test_a_checkpoint_without_options_loads(make_trial, tmp_path):
    trial, other = make_trial({"lr": 0.1}), make_trial({"lr": 0.2})
    saved = trial.save(str(tmp_path / "saved"))
    options = tmp_path / "saved" / "optimizer_options.json"
    assert json.loads(options.read_text())[0][0]["lr"] == 0.1
    options.unlink()
    other.restore(saved)
    assert lr_of(other) == 0.1


def test_a_trial_is_reused_for_another_with_nothing_of_the_first_left(make_trial):
    trial = make_trial({"lr": 0.1})
    trial.train()
    first = trial.trainer
    assert trial.reset({"lr": 0.2})
    assert lr_of(trial) == 0.2
    assert trial.train()["epoch"] == 1
    with pytest.raises(RuntimeError, match="shut down"):
        first.train()


class Counting(Callback):
    """Adds how many epochs it has seen."""

    num_epochs = 0

    def on_epoch_end(self, trainer, metrics):
        self.num_epochs += 1
        metrics["num_epochs_seen"] = self.num_epochs


def test_each_trial_has_callbacks_of_its_own(make_trial):
    trial = make_trial(callbacks=[Counting()])
    assert [trial.train()["num_epochs_seen"] for _ in range(2)] == [1, 2]
    assert trial.reset({})
    assert trial.train()["num_epochs_seen"] == 1


def test_stop_shuts_the_trainer_down(make_trial):
    trial = make_trial()
    trial.stop()
    with pytest.raises(RuntimeError, match="shut down"):
        trial.trainer.train()
