"""Scripts for the old library (RaySGD v1), with only the imports changed.

Creators or an operator are followed by a test, which does what the script did with its trainer.
Most tests run without Ray, on one worker in this process.
"""

import functools
import json
import os
import pkgutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from raysgd import TorchTrainer, TrainingOperator
from raysgd.torch import constants
from raysgd.utils import NUM_SAMPLES, AverageMeterCollection, override
from tests.conftest import run_python

NUM_TRAIN = 160
NUM_VALIDATION = 101
"""Enough for 7 batches of 16: four for one worker and three for the other."""


class Line(Dataset):
    """Points on the line y = 2 x + 1."""

    def __init__(self, num_points, seed=5):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.rand(num_points, 1, generator=generator) * 2 - 1
        self.y = 2 * self.x + 1

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class ModelOperator(TrainingOperator):
    """The base of operators below. It has no data."""

    def setup(self, config):
        torch.manual_seed(1)
        model = nn.Linear(1, 1)
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            criterion=nn.MSELoss(),
        )


def all_equal(values):
    return all(value == values[0] for value in values)


# ---- custom loops with the older signatures, and DistributedDataParallel in the user's code


class OldLoopsOperator(TrainingOperator):
    """An operator that wraps one model before `register`, and one after it."""

    def setup(self, config):
        torch.manual_seed(1)
        features = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.ReLU())
        head = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD([*features.parameters(), *head.parameters()], lr=0.05)
        wrap = functools.partial(
            DistributedDataParallel, device_ids=self.device_ids, find_unused_parameters=False
        )
        (self.features, head), self.optimizer, self.criterion = self.register(
            models=[wrap(features), head], optimizers=optimizer, criterion=nn.MSELoss()
        )
        self.head = wrap(head)
        self.register_data(
            train_loader=DataLoader(Line(NUM_TRAIN), batch_size=16, shuffle=True),
            validation_loader=DataLoader(Line(NUM_VALIDATION, seed=6), batch_size=16),
        )

    def output_of(self, features):
        return self.head(self.features(features.to(self.device)))

    def train_epoch(self, iterator, info):
        meters = AverageMeterCollection()
        for batch_idx, (features, target) in enumerate(iterator):
            if self.world_rank == info.get("fail_on"):
                raise ArithmeticError("as asked")
            with self.timers.record("fwd"):
                loss = self.criterion(self.output_of(features), target)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            meters.update({"train_loss": loss.item(), "batch": batch_idx}, n=len(target))
        return {**meters.summary(), "tag": info.get("tag")}

    def validate_batch(self, batch, batch_info):
        features, target = batch
        error = (self.output_of(features) - target).abs()
        metrics = {"val_mae": error.mean(), "val_close": (error < 1).float().mean().item()}
        return {**metrics, NUM_SAMPLES: len(target)}

    def validate(self, val_iterator, info):
        assert not torch.is_inference_mode_enabled()
        stats = super().validate(val_iterator, info)
        assert not self.head.training
        stats["judgement"] = "good" if stats["val_mae"] < info["limit"] else "bad"
        return stats


def weights_of_every_copy(operator):
    models = (operator.features, operator.head)
    return [p.tolist() for model in models for p in model.parameters()]


@pytest.fixture(scope="class")
def old_loops_trainer(module_cluster):
    with TorchTrainer(
        training_operator_cls=OldLoopsOperator,
        num_workers=2,
        use_local=True,
        wrap_ddp=False,
        timeout_s=120,  # so that a hang ends soon
    ) as trainer:
        yield trainer
    assert not dist.is_initialized()


class TestLoopsOfOnesOwn:
    def test_train_epoch_with_the_older_signature(self, old_loops_trainer):
        trainer = old_loops_trainer
        first = trainer.train(info={"tag": "warm"})
        second = trainer.train(info={"tag": "up"}, profile=True)
        assert (first["tag"], second["tag"]) == ("warm", "up")
        assert first["num_samples"] == NUM_TRAIN
        assert first["batch_count"] == NUM_TRAIN / 16 / 2
        assert first["last_batch"] == NUM_TRAIN / 16 / 2 - 1
        assert second["train_loss"] < first["train_loss"]
        assert second["profile"]["mean_fwd_s"] > 0
        assert trainer.global_step == 2 * first["batch_count"]
        part = trainer.train(num_steps=2, info={"tag": "part"})
        assert part["batch_count"] == 2
        rest = trainer.train(info={"tag": "rest"})
        assert rest["batch_count"] == first["batch_count"] - 2
        assert all_equal(trainer.apply_all_operators(weights_of_every_copy))

    def test_validate_and_validate_batch_with_metrics_of_their_own(self, old_loops_trainer):
        """Batch normalization does not wait for the worker that has no last batch."""
        trainer = old_loops_trainer
        assert trainer.validate(info={"limit": 0.0})["judgement"] == "bad"
        stats = trainer.validate(info={"limit": 100.0})
        features, head = trainer.get_model()
        data = Line(NUM_VALIDATION, seed=6)
        with torch.no_grad():
            error = (head.eval()(features.eval()(data.x)) - data.y).abs()
        assert stats["num_samples"] == NUM_VALIDATION
        assert stats["batch_count"] == 3.5
        assert stats["val_mae"] == pytest.approx(error.mean().item(), rel=1e-5)
        assert stats["val_close"] == pytest.approx((error < 1).float().mean().item(), rel=1e-5)
        assert stats["judgement"] == "good"
        assert trainer.train()["num_samples"] == NUM_TRAIN
        assert all_equal(trainer.apply_all_operators(weights_of_every_copy))

    def test_models_come_back_without_their_wrappers(self, old_loops_trainer):
        models = old_loops_trainer.get_model()
        assert [type(model) for model in models] == [nn.Sequential] * 2
        states = [model.state_dict() for model in models] + old_loops_trainer.state_dict()["models"]
        assert len(states) == 4
        assert all("module." not in name for state in states for name in state)

    def test_trains_on_after_an_exception_while_this_process_waited(self, old_loops_trainer):
        with pytest.raises(ArithmeticError, match="as asked"):
            old_loops_trainer.train(info={"fail_on": 1})
        assert old_loops_trainer.train()["num_samples"] == NUM_TRAIN
        assert all_equal(old_loops_trainer.apply_all_operators(weights_of_every_copy))


# ---- a whole file, run as a program


@pytest.mark.slow("a program imports ray and torch, and so does its worker")
def test_a_script_in_one_file_runs_as_a_program(module_cluster, tmp_path):
    root = Path(__file__).parents[2]
    note = tmp_path / "note"
    address = module_cluster.get_runtime_context().gcs_address
    script = Path(__file__).with_name("old_style_script.py")
    done = run_python(script, address, note, PYTHONPATH=str(root))
    result = json.loads(done.stdout.splitlines()[-1])
    stats = result["stats"]
    assert [s["num_samples"] for s in stats] == [48] * 3
    assert [s["batch_count"] for s in stats] == [6] * 3
    assert stats[-1]["train_loss"] < stats[0]["train_loss"]
    assert abs(result["prediction"] - 2) < 1.5
    # the worker exited normally: exit handlers ran, and files were flushed
    assert note.read_text() == "ended"


# ---- small habits of scripts for the old library


def train_alone(operator_cls, **arguments):
    """Train for an epoch in this process. Return the metrics and the trainer."""
    trainer = TorchTrainer(training_operator_cls=operator_cls, use_local=True)
    return trainer.train(**arguments), trainer


class HabitOperator(ModelOperator):
    """The base of operators below, with data."""

    def setup(self, config):
        super().setup(config)
        loader = DataLoader(Line(NUM_TRAIN), batch_size=16)
        self.register_data(train_loader=loader, validation_loader=loader)


@pytest.mark.parametrize("signature", ["iterator, _", "loader, information", "batches, info=None"])
def test_an_older_train_epoch_may_name_its_parameters_as_it_likes(signature):
    iterator, info = signature.removesuffix("=None").split(", ")
    namespace = {}
    exec(f"def train_epoch(self, {signature}): return self.walk({iterator}, {info})", namespace)

    class Operator(HabitOperator):
        train_epoch = namespace["train_epoch"]

        def walk(self, batches, info):
            return {**super().train_epoch(batches), **info}  # a dict even without an argument

    stats, _ = train_alone(Operator)
    assert stats["num_samples"] == NUM_TRAIN


@pytest.mark.parametrize(
    "name", ["data.dataset.Dataset", "tf.tf_trainer.TFTrainer", "tf.tf_trainer.TFTrainable"]
)
def test_names_are_found_where_scripts_import_them_from(name):
    assert pkgutil.resolve_name(f"raysgd.{name}")


# ---- other habits of scripts for RaySGD v1: they work, or fail with a message that names the way


@pytest.mark.parametrize(("frequency", "rate"), [("batch", 0.5**2), ("epoch", 0.5), ("manual", 1)])
def test_info_tells_a_loop_how_often_to_step_its_scheduler(frequency, rate):
    class Operator(HabitOperator):
        def register(self, *, optimizers, **given):
            halving = torch.optim.lr_scheduler.ExponentialLR(optimizers, 0.5)
            *others, self.scheduler = super().register(
                optimizers=optimizers, schedulers=halving, **given
            )
            return others

        def train_epoch(self, iterator, info):
            meters = AverageMeterCollection()
            for batch_idx, batch in enumerate(iterator):
                batch_info = {"batch_idx": batch_idx, "global_step": self.global_step}
                batch_info.update(info)
                metrics = self.train_batch(batch, batch_info=batch_info)
                if info.get("scheduler_step") == "batch":
                    self.scheduler.step()
                meters.update(metrics, n=metrics.pop(NUM_SAMPLES, 1))
            if info.get("scheduler_step") == "epoch":
                self.scheduler.step()
            return {**meters.summary(), "info": info}

    trainer = TorchTrainer(
        training_operator_cls=Operator, use_local=True, scheduler_step_freq=frequency
    )
    given = trainer.train(info={"lesson": 3}, num_steps=2)["info"]
    assert trainer.get_local_operator().optimizer.param_groups[0]["lr"] == 0.1 * rate
    keys = ("lesson", constants.NUM_STEPS, constants.USE_FP16, constants.SCHEDULER_STEP)
    assert [given[key] for key in keys] == [3, 2, False, frequency]


def test_batch_info_has_the_precision_and_keeps_the_callers_info_apart():
    class Operator(HabitOperator):
        def train_batch(self, batch, batch_info):
            half, note = float(batch_info[constants.USE_FP16]), str(batch_info["info"])
            return {"half": half, "note": note, "lesson": batch_info["lesson"]}

    trainer = TorchTrainer(training_operator_cls=Operator, use_local=True, use_fp16=True)
    stats = trainer.train(info={"lesson": 3})
    assert (stats["half"], stats["note"], stats["lesson"]) == (1, "{'lesson': 3}", 3)


def test_apex_args_are_ignored_with_a_warning(caplog):
    class Operator(HabitOperator):
        def register(self, **arguments):
            return super().register(apex_args={"opt_level": "O1"}, **arguments)

    train_alone(Operator)
    assert "register(apex_args={'opt_level': 'O1'}) does nothing" in caplog.text


def test_get_model_before_training_warns_that_it_returns_a_copy(caplog):
    _, trainer = train_alone(HabitOperator)
    trainer.get_model()
    assert "get_model() returns a copy" not in caplog.text
    TorchTrainer(training_operator_cls=HabitOperator, use_local=True).get_model()
    assert "get_model() returns a copy of the model, as it is now" in caplog.text


def test_a_loop_with_batches_of_its_own_needs_no_loader_and_its_metrics_and_steps_count():
    class Operator(ModelOperator):
        def setup(self, config):
            super().setup(config)
            self.own = DataLoader(Line(NUM_TRAIN), batch_size=16)

        def train_epoch(self, *args, **kwargs):
            for batch in self.own:
                self.train_batch(batch, {})
                self.global_step += 1
            return {"img_sec": 5.0}

        def validate(self, val_iterator, info):
            return {"val_own": 0.25}

    stats, trainer = train_alone(Operator)
    assert (stats["img_sec"], stats["epoch"]) == (5.0, 1)
    assert trainer.global_step == NUM_TRAIN / 16
    assert trainer.train(num_steps=10)["img_sec"] == 5.0
    assert trainer.global_step == 2 * NUM_TRAIN / 16
    assert trainer.validate() == {"val_own": 0.25}


def test_a_map_style_data_set_may_be_a_loader():
    class Batches:
        def __getitem__(self, index):
            if index == 4:
                raise IndexError(index)
            x = torch.full((8, 1), index / 4)
            return x, 2 * x + 1

    class Operator(HabitOperator):
        def setup(self, config):
            super().setup(config)
            self.register_data(train_loader=Batches())

    stats, trainer = train_alone(Operator)
    assert (stats["num_samples"], stats["batch_count"]) == (32, 4)
    assert trainer.train()["num_samples"] == 32


def test_a_state_with_schedulers_loads_where_none_are_registered(caplog):
    _, trainer = train_alone(HabitOperator)
    trainer.load_state_dict({**trainer.state_dict(), "schedulers": [{"last_epoch": 3}]})
    assert "has schedulers, which are ignored because the operator has none" in caplog.text
    assert trainer.train()["epoch"] == 2


def test_arguments_and_attributes_of_the_trainer(caplog):
    trainer = TorchTrainer(
        training_operator_cls=HabitOperator,
        use_local=True,
        num_workers=np.int64(1),
        num_replicas=None,
        data_creator=None,
        serialize_data_creation=True,
        scheduler_step_freq="epoch",
    )
    assert "serialize_data_creation=True) does nothing" in caplog.text
    assert (trainer.use_gpu, trainer.use_fp16, trainer.backend) == (False, False, "gloo")
    assert (trainer.max_replicas, trainer.scheduler_step_freq) == (1, "epoch")
    flags = trainer.use_local, trainer.wrap_ddp, trainer.use_tqdm, trainer.add_dist_sampler
    assert flags == (True, True, False, True)
    assert (trainer.timeout_s, trainer.num_cpus_per_worker) == (1800, 1)
    assert os.path.isdir(trainer.temp_dir)
    os.rmdir(trainer.temp_dir)
    assert trainer.train(num_steps=3.0)["batch_count"] == 3
    assert trainer.train(num_steps=np.int32(2))["batch_count"] == 2


def test_meters_count_samples_and_override_rejects_unknown_methods():
    meters = AverageMeterCollection()
    meters.update({"loss": 1.0}, n=3)
    assert meters.n == 3

    class Operator(HabitOperator):
        @override(TrainingOperator)
        def train_batch(self, batch, batch_info):
            return super().train_batch(batch, batch_info)

    assert train_alone(Operator)[0]["num_samples"] == NUM_TRAIN
    with pytest.raises(AttributeError, match="train_bach"):

        class Wrong(HabitOperator):
            @override(TrainingOperator)
            def train_bach(self, batch, batch_info):
                pass
