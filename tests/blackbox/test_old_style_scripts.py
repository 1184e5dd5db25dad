"""Scripts for the old library (RaySGD v1), with only the imports changed.

Creators or an operator are followed by a test, which does what the script did with its trainer.
Tests use two workers only if they need them: for averaging, sharding, metrics over workers, state
that reaches all workers, and functions on workers. All others run without Ray, on one worker in
this process.
"""

import functools
import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from raysgd import TorchTrainer, TrainingOperator
from raysgd.data import Dataset as ItemDataset
from raysgd.torch import CreatorOperator, constants
from raysgd.utils import BATCH_SIZE, NUM_SAMPLES, AverageMeterCollection, override
from tests.operators import replica_hash

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


def make_line_model():
    torch.manual_seed(1)
    return nn.Linear(1, 1)


def learning_rates(operator):
    return [group["lr"] for group in operator.optimizer.param_groups]


def all_equal(values):
    return all(value == values[0] for value in values)


# ---- creator functions, with a loss class, a scheduler and two loaders


def model_creator(config):
    torch.manual_seed(1)
    return nn.Linear(1, config.get("hidden_size", 1))


def optimizer_creator(model, config):
    return torch.optim.SGD(model.parameters(), lr=config.get("lr", 1e-2))


def step_scheduler_creator(optimizer, config):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=config["gamma"])


def data_creator(config):
    train_loader = DataLoader(Line(NUM_TRAIN), batch_size=config["batch_size"], shuffle=True)
    validation_loader = DataLoader(Line(NUM_VALIDATION, seed=6), batch_size=config["batch_size"])
    return train_loader, validation_loader


def test_creators_with_a_loss_class_a_scheduler_per_epoch_and_two_loaders(tmp_path):
    LineTrainingOperator = TrainingOperator.from_creators(  # noqa: N806  as scripts named it
        model_creator=model_creator,
        optimizer_creator=optimizer_creator,
        data_creator=data_creator,
        scheduler_creator=step_scheduler_creator,
        loss_creator=nn.MSELoss,
    )
    assert issubclass(LineTrainingOperator, CreatorOperator)
    trainer = TorchTrainer(
        training_operator_cls=LineTrainingOperator,
        num_workers=1,
        use_local=True,
        config={"lr": 0.4, "gamma": 0.5, "hidden_size": 1, "batch_size": 8},
        scheduler_step_freq="epoch",
    )
    with trainer:
        before = trainer.validate()
        stats = [trainer.train() for _ in range(2)]
        after = trainer.validate()

        assert [s["epoch"] for s in stats] == [1, 2]
        assert [s["num_samples"] for s in stats] == [NUM_TRAIN, NUM_TRAIN]
        assert stats[0]["batch_count"] == NUM_TRAIN / 8
        assert stats[1]["train_loss"] < stats[0]["train_loss"]
        assert after["num_samples"] == NUM_VALIDATION
        assert after["val_loss"] < 0.1 * before["val_loss"]
        # halved after each of two epochs
        assert learning_rates(trainer.get_local_operator()) == [0.1]

        model = trainer.get_model()
        assert type(model) is nn.Linear
        held_out = Line(NUM_VALIDATION, seed=6)
        loss = nn.functional.mse_loss(model(held_out.x), held_out.y).item()
        assert after["val_loss"] == pytest.approx(loss, rel=1e-5)

        path = trainer.save(tmp_path / "line.pt")
        trainer.train()
        trainer.load(path)
        assert trainer.validate()["val_loss"] == pytest.approx(loss, rel=1e-5)
    trainer.shutdown()


# ---- creator functions, with a function that makes the loss, one loader and a custom train_batch


def huber_creator(config):
    return nn.SmoothL1Loss(beta=config["beta"])


def train_data_creator(config):
    return DataLoader(Line(NUM_TRAIN), batch_size=16)


class ClippingOperator(CreatorOperator):
    """An operator whose own `train_batch` uses the objects of the creators."""

    def train_batch(self, batch, batch_info):
        features, target = batch
        output = self.model(features)
        loss = self.criterion(output, target)
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return {"train_loss": loss.item(), "norm": norm.item(), NUM_SAMPLES: features.size(0)}


def test_creators_with_a_loss_function_and_one_loader_under_an_own_train_batch():
    trainer = TorchTrainer(
        training_operator_cls=ClippingOperator.from_creators(
            model_creator,
            optimizer_creator,
            data_creator=train_data_creator,
            loss_creator=huber_creator,
        ),
        num_workers=1,
        use_local=True,
        config={"lr": 0.3, "beta": 0.25},
    )
    with trainer:
        stats = [trainer.train() for _ in range(3)]
        assert stats[-1]["train_loss"] < stats[0]["train_loss"]
        assert {"norm", "last_norm", "last_train_loss"} <= set(stats[0])
        operator = trainer.get_local_operator()
        assert (operator.criterion.beta, hasattr(operator, "scheduler")) == (0.25, False)
        with pytest.raises(RuntimeError, match="validation_loader"):
            trainer.validate()
        assert trainer.train()["epoch"] == 4


# ---- custom loops with the older signatures; functions on workers and operators, with one worker
# ---- in the driver's process


class OldLoopsOperator(TrainingOperator):
    def setup(self, config):
        model = make_line_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss(), schedulers=scheduler
        )
        self.register_data(
            train_loader=DataLoader(Line(NUM_TRAIN), batch_size=16),
            validation_loader=DataLoader(Line(NUM_VALIDATION, seed=6), batch_size=16),
        )

    def train_epoch(self, iterator, info):
        self.model.train()
        meters = AverageMeterCollection()
        for batch_idx, (features, target) in enumerate(iterator):
            if self.world_rank == info.get("fail_on"):
                raise ArithmeticError("as asked")
            with self.timers.record("fwd"):
                loss = self.criterion(self.model(features.to(self.device)), target)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            meters.update({"train_loss": loss.item(), "batch": batch_idx}, n=len(target))
        stats = meters.summary()
        stats["tag"] = info.get("tag")
        return stats

    def validate_batch(self, batch, batch_info):
        metrics = super().validate_batch(batch, batch_info)
        features, target = batch
        error = (self.model(features) - target).abs()
        metrics["val_mae"] = error.mean()
        metrics["val_close"] = (error < 1).float().mean().item()
        return metrics

    def validate(self, val_iterator, info):
        assert not torch.is_inference_mode_enabled()
        stats = super().validate(val_iterator, info)
        assert not self.model.training
        stats["judgement"] = "good" if stats["val_mae"] < info["limit"] else "bad"
        stats["val_root"] = stats["val_loss"] ** 0.5
        return stats


@pytest.fixture(scope="class")
def old_loops_trainer(module_cluster):
    with TorchTrainer(
        training_operator_cls=OldLoopsOperator,
        config={"lr": 0.1},
        num_workers=2,
        use_local=True,
        scheduler_step_freq="manual",
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
        assert all_equal(trainer.apply_all_operators(replica_hash))

        part = trainer.train(num_steps=2, info={"tag": "part"})
        assert part["batch_count"] == 2
        rest = trainer.train(info={"tag": "rest"})
        assert rest["batch_count"] == first["batch_count"] - 2

    def test_validate_and_validate_batch_with_metrics_of_their_own(self, old_loops_trainer):
        trainer = old_loops_trainer
        first = trainer.validate(info={"limit": 0.0})
        assert first["judgement"] == "bad"
        trainer.train()
        stats = trainer.validate(info={"limit": 100.0})

        model, data = trainer.get_model(), Line(NUM_VALIDATION, seed=6)
        with torch.no_grad():
            error = (model(data.x) - data.y).abs()
        assert stats["num_samples"] == NUM_VALIDATION
        assert stats["batch_count"] == 3.5
        assert stats["val_mae"] == pytest.approx(error.mean().item(), rel=1e-5)
        assert stats["val_close"] == pytest.approx((error < 1).float().mean().item(), rel=1e-5)
        assert stats["val_loss"] == pytest.approx((error**2).mean().item(), rel=1e-5)
        assert stats["judgement"] == "good"
        assert {"last_val_mae", "last_val_close", "val_root"} <= set(stats)

    def test_functions_run_on_all_workers_and_operators(self, old_loops_trainer):
        trainer = old_loops_trainer
        pids = trainer.apply_all_workers(os.getpid)
        assert pids[0] == os.getpid()
        assert pids[1] != os.getpid()

        local = trainer.get_local_operator()
        assert isinstance(local, OldLoopsOperator)
        assert (local.world_rank, local.world_size) == (0, 2)
        assert trainer.apply_all_operators(lambda op: op.world_rank) == [0, 1]

        def lower(operator, rate):
            for group in operator.optimizer.param_groups:
                group["lr"] = rate

        trainer.apply_all_operators(functools.partial(lower, rate=0.02))
        assert trainer.apply_all_operators(learning_rates) == [[0.02], [0.02]]
        assert trainer.train()["num_samples"] == NUM_TRAIN
        assert all_equal(trainer.apply_all_operators(replica_hash))
        weight = local.model.module.weight
        assert torch.equal(trainer.get_model().weight, weight)
        assert trainer.get_model().weight is not weight

    def test_a_metric_reaches_the_schedulers_of_all_workers(self, old_loops_trainer):
        rates = old_loops_trainer.apply_all_operators(learning_rates)
        for metric in (1.0, 2.0):
            old_loops_trainer.update_scheduler(metric)
        lower = [pytest.approx(0.1 * rate) for rate in rates[0]]
        assert old_loops_trainer.apply_all_operators(learning_rates) == [lower, lower]

    def test_trains_on_after_an_exception_while_this_process_waited(self, old_loops_trainer):
        with pytest.raises(ArithmeticError, match="as asked"):
            old_loops_trainer.train(info={"fail_on": 1})
        assert old_loops_trainer.train()["num_samples"] == NUM_TRAIN
        assert all_equal(old_loops_trainer.apply_all_operators(replica_hash))


# ---- a custom loop with the newer signature


class AccumulatingOperator(TrainingOperator):
    """An operator that updates the weights every two batches."""

    def setup(self, config):
        model = make_line_model()
        self.model, self.optimizer = self.register(
            models=model, optimizers=torch.optim.Adam(model.parameters(), lr=config["lr"])
        )
        self.loss = nn.L1Loss()
        self.register_data(train_loader=DataLoader(Line(NUM_TRAIN), batch_size=16, shuffle=True))

    def train_epoch(self, iterator, info=None, num_steps=None, epoch_idx=0):
        info = info or {}
        meters = AverageMeterCollection()
        self.optimizer.zero_grad()
        for batch_idx, batch in enumerate(iterator):
            batch_info = {"batch_idx": batch_idx, "global_step": self.global_step}
            batch_info.update(info)
            metrics = self.train_batch(batch, batch_info=batch_info)
            meters.update(metrics, n=metrics.pop(NUM_SAMPLES, 1))
        stats = meters.summary()
        stats["asked"] = -1 if num_steps is None else num_steps
        stats["epoch_idx"] = epoch_idx
        return stats

    def train_batch(self, batch, batch_info):
        features, target = batch
        loss = self.loss(self.model(features), target) * batch_info.get("scale", 1.0)
        loss.backward()
        if batch_info["batch_idx"] % 2 == 1:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {"train_loss": loss.item(), "step": batch_info["global_step"], NUM_SAMPLES: 16}


def test_own_train_epoch_with_the_newer_signature():
    with TorchTrainer(
        training_operator_cls=AccumulatingOperator, config={"lr": 0.05}, use_local=True
    ) as trainer:
        whole = trainer.train()
        assert (whole["asked"], whole["epoch_idx"], whole["batch_count"]) == (-1, 0, 10)
        assert whole["last_step"] == 9

        part = trainer.train(num_steps=2, info={"scale": 2.0})
        assert (part["asked"], part["epoch_idx"], part["batch_count"]) == (2, 1, 2)
        assert part["last_step"] == 11

        # one step beyond the end of the epoch
        over = trainer.train(num_steps=9)
        assert over["batch_count"] == 9
        assert trainer.epoch == 3
        assert trainer.global_step == 21


# ---- two models and two optimizers, and custom state


class GanOperator(TrainingOperator):
    def setup(self, config):
        torch.manual_seed(2)
        self.best = float("inf")
        self.history = []
        self.noise_size = config["noise_size"]
        generator = nn.Sequential(
            nn.Linear(self.noise_size, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)
        )
        discriminator = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid())
        models = (discriminator, generator)
        optimizers = tuple(torch.optim.Adam(m.parameters(), lr=config["lr"]) for m in models)
        self.models, self.optimizers, self.criterion = self.register(
            models=models, optimizers=optimizers, criterion=nn.BCELoss()
        )
        self.discriminator, self.generator = self.models
        numbers = torch.randn(64, 1, generator=torch.Generator().manual_seed(4)) + 3
        loader = DataLoader(TensorDataset(numbers), batch_size=8, shuffle=True, drop_last=True)
        self.register_data(train_loader=loader, validation_loader=None)

    def train_batch(self, batch, batch_info):
        (real,) = batch
        real = real.to(self.device)
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        optimizer_d, optimizer_g = self.optimizers

        self.discriminator.zero_grad()
        loss_real = self.criterion(self.discriminator(real), ones)
        loss_real.backward()
        fake = self.generator(torch.randn(len(real), self.noise_size, device=self.device))
        loss_fake = self.criterion(self.discriminator(fake.detach()), zeros)
        loss_fake.backward()
        optimizer_d.step()

        self.generator.zero_grad()
        loss_g = self.criterion(self.discriminator(fake), ones)
        loss_g.backward()
        optimizer_g.step()
        return {
            "loss_g": loss_g.item(),
            "loss_d": (loss_real + loss_fake).item(),
            NUM_SAMPLES: len(real),
        }

    def train_epoch(self, iterator, info=None, num_steps=None, epoch_idx=0):
        stats = super().train_epoch(iterator, info, num_steps, epoch_idx)
        self.best = min(self.best, stats["loss_d"])
        self.history.append(torch.tensor(stats["loss_g"]))
        return stats

    def state_dict(self):
        return {"best": self.best, "history": self.history}

    def load_state_dict(self, state):
        self.best = state["best"]
        self.history = state["history"]


GAN = {"training_operator_cls": GanOperator, "config": {"noise_size": 4, "lr": 0.01}}


def memory_of(operator):
    return operator.best, [value.item() for value in operator.history]


def weights_of(models):
    return torch.cat([p.detach().reshape(-1) for model in models for p in model.parameters()])


@pytest.fixture(scope="class")
def gan_trainer(module_cluster):
    with TorchTrainer(num_workers=2, use_local=True, **GAN) as trainer:
        yield trainer


class TestGan:
    def test_two_models_and_two_optimizers_are_trained(self, gan_trainer):
        untrained = gan_trainer.get_model()
        stats = [gan_trainer.train() for _ in range(3)]
        assert stats[0]["num_samples"] == 64
        assert all(math.isfinite(s["loss_g"] + s["loss_d"]) for s in stats)
        assert stats[2]["loss_d"] < stats[0]["loss_d"]

        models = gan_trainer.get_model()
        assert isinstance(models, list)
        assert [len(m) for m in models] == [4, 4]
        for old, new in zip(untrained, models, strict=True):
            assert not torch.equal(old[0].weight, new[0].weight)
        assert models[1].eval()(torch.zeros(2, 4)).shape == (2, 1)
        assert gan_trainer.global_step == 12
        # each step updates both models with the gradients of both workers
        assert all_equal(gan_trainer.apply_all_operators(replica_hash))

    def test_own_state_is_saved_and_loaded_also_on_another_number_of_workers(
        self, gan_trainer, tmp_path
    ):
        path = str(tmp_path / "run.pt")
        gan_trainer.train()
        reached = epoch, step = gan_trainer.epoch, gan_trainer.global_step
        weights = weights_of(gan_trainer.get_model())
        assert gan_trainer.save(path) == path
        memory = gan_trainer.apply_all_operators(memory_of)[0]
        assert len(memory[1]) == epoch

        gan_trainer.train()
        gan_trainer.load(path)
        assert gan_trainer.apply_all_operators(memory_of) == [memory, memory]
        assert (gan_trainer.epoch, gan_trainer.global_step) == reached
        assert torch.equal(weights_of(gan_trainer.get_model()), weights)

        with TorchTrainer(num_workers=1, use_local=True, **GAN) as single:
            single.load(path)
            assert single.apply_all_operators(memory_of) == [memory]
            assert (single.epoch, single.global_step) == reached
            assert torch.equal(weights_of(single.get_model()), weights)
            assert single.train()["epoch"] == epoch + 1
            single.save(path)
            longer = single.apply_all_operators(memory_of)[0]
            assert len(longer[1]) == epoch + 1

        gan_trainer.load(path)
        assert gan_trainer.apply_all_operators(memory_of) == [longer, longer]
        # an epoch takes 8 steps with one worker, and 4 with two
        assert (gan_trainer.epoch, gan_trainer.global_step) == (epoch + 1, step + 8)
        assert gan_trainer.train()["epoch"] == epoch + 2
        assert all_equal(gan_trainer.apply_all_operators(replica_hash))


# ---- DistributedDataParallel in the user's code


class OwnDdpOperator(TrainingOperator):
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

    def loss_of(self, batch):
        features, target = batch
        return self.criterion(self.head(self.features(features)), target)

    def train_batch(self, batch, batch_info):
        if batch_info["info"] and self.world_rank == batch_info["info"]["fail_on"]:
            raise ArithmeticError("as asked")
        loss = self.loss_of(batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item(), NUM_SAMPLES: len(batch[0])}

    def validate_batch(self, batch, batch_info):
        return {"val_loss": self.loss_of(batch).item(), NUM_SAMPLES: len(batch[0])}


def weights_of_every_copy(operator):
    models = (operator.features, operator.head)
    return [p.tolist() for model in models for p in model.parameters()]


@pytest.fixture(scope="class")
def own_ddp_trainer(module_cluster):
    with TorchTrainer(
        training_operator_cls=OwnDdpOperator,
        num_workers=2,
        use_local=True,
        wrap_ddp=False,
        timeout_s=120,  # so that a hang ends soon
    ) as trainer:
        yield trainer


class TestModelThatWasWrappedByItsUser:
    def test_trains_in_step_on_both_workers(self, own_ddp_trainer):
        stats = [own_ddp_trainer.train() for _ in range(3)]
        assert stats[-1]["train_loss"] < stats[0]["train_loss"]
        assert all_equal(own_ddp_trainer.apply_all_operators(weights_of_every_copy))
        kinds = own_ddp_trainer.apply_all_operators(
            lambda op: [type(model).__name__ for model in (op.features, op.head)]
        )
        assert kinds == [["DistributedDataParallel"] * 2] * 2

    def test_with_batch_norm_validates_uneven_shards_and_trains_on(self, own_ddp_trainer):
        each = own_ddp_trainer.validate(reduce_results=False)
        assert [stats["batch_count"] for stats in each] == [4, 3]
        assert own_ddp_trainer.validate()["num_samples"] == NUM_VALIDATION
        assert own_ddp_trainer.train()["num_samples"] == NUM_TRAIN
        assert all_equal(own_ddp_trainer.apply_all_operators(weights_of_every_copy))

    def test_trains_on_after_a_validation_with_a_batch_for_one_worker_only(self, own_ddp_trainer):
        assert own_ddp_trainer.validate(num_steps=3)["batch_count"] == 3
        own_ddp_trainer.train(num_steps=1)
        each = own_ddp_trainer.validate(num_steps=1, reduce_results=False)
        assert [stats["batch_count"] for stats in each] == [1, 0]
        assert own_ddp_trainer.train(num_steps=5)["batch_count"] == 5
        assert all_equal(own_ddp_trainer.apply_all_operators(weights_of_every_copy))

    def test_comes_back_without_its_wrapper(self, own_ddp_trainer):
        models = own_ddp_trainer.get_model()
        assert [type(model) for model in models] == [nn.Sequential] * 2
        states = [model.state_dict() for model in models] + own_ddp_trainer.state_dict()["models"]
        assert len(states) == 4
        assert all("module." not in name for state in states for name in state)

    def test_trains_on_in_step_after_one_worker_raised(self, own_ddp_trainer):
        with pytest.raises(ArithmeticError, match="as asked"):
            own_ddp_trainer.train(info={"fail_on": 1})
        assert own_ddp_trainer.train(num_steps=3)["batch_count"] == 3
        assert all_equal(own_ddp_trainer.apply_all_operators(weights_of_every_copy))


# ---- schedulers that step with each batch, and by hand


class OneCycleOperator(TrainingOperator):
    def setup(self, config):
        model = make_line_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        batches = math.ceil(NUM_TRAIN / 16 / self.world_size)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.2, epochs=config["num_epochs"], steps_per_epoch=batches
        )
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss(), schedulers=scheduler
        )
        self.register_data(train_loader=DataLoader(Line(NUM_TRAIN), batch_size=16))


def test_one_cycle_scheduler_steps_with_each_batch():
    with TorchTrainer(
        training_operator_cls=OneCycleOperator,
        config={"num_epochs": 2},
        use_local=True,
        scheduler_step_freq="batch",
    ) as trainer:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.01, momentum=0.9)
        reference = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=20)
        expected = [reference.get_last_lr()[0]]
        for _ in range(20):
            optimizer.step()
            reference.step()
            expected.append(reference.get_last_lr()[0])

        operator = trainer.get_local_operator()
        assert learning_rates(operator) == [pytest.approx(expected[0])]
        trainer.train(num_steps=3)
        assert learning_rates(operator) == [pytest.approx(expected[3])]
        trainer.train()
        assert learning_rates(operator) == [pytest.approx(expected[10])]
        trainer.train()
        assert learning_rates(operator) == [pytest.approx(expected[20])]


class PlateauOperator(TrainingOperator):
    """An operator with two optimizers, each with a scheduler. `train_batch` steps both."""

    def setup(self, config):
        torch.manual_seed(1)
        models = [nn.Linear(1, 4), nn.Linear(4, 1)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
        schedulers = [
            torch.optim.lr_scheduler.ReduceLROnPlateau(o, factor=0.1, patience=0)
            for o in optimizers
        ]
        self.models, self.optimizers, self.criterion, self.schedulers = self.register(
            models=models, optimizers=optimizers, criterion=nn.MSELoss(), schedulers=schedulers
        )
        self.register_data(
            train_loader=DataLoader(Line(NUM_TRAIN), batch_size=16),
            validation_loader=DataLoader(Line(NUM_VALIDATION), batch_size=16),
        )

    def forward(self, features):
        return self.models[1](torch.tanh(self.models[0](features)))

    def train_batch(self, batch, batch_info):
        features, target = batch
        loss = self.criterion(self.forward(features), target)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return {"train_loss": loss.item(), NUM_SAMPLES: len(target)}

    def validate_batch(self, batch, batch_info):
        features, target = batch
        loss = self.criterion(self.forward(features), target)
        return {"val_loss": loss.item(), NUM_SAMPLES: len(target)}


def test_plateau_schedulers_step_by_hand_with_a_metric():
    def rates(operator):
        return [optimizer.param_groups[0]["lr"] for optimizer in operator.optimizers]

    with TorchTrainer(
        training_operator_cls=PlateauOperator, use_local=True, scheduler_step_freq="manual"
    ) as trainer:
        loss = trainer.validate()["val_loss"]
        trainer.update_scheduler(loss)
        trainer.train()
        better = trainer.validate()["val_loss"]
        assert better < loss
        trainer.update_scheduler(better)
        assert rates(trainer.get_local_operator()) == [0.1, 0.1]
        trainer.update_scheduler(loss)
        assert rates(trainer.get_local_operator()) == [pytest.approx(0.01)] * 2
        assert trainer.train()["train_loss"] < loss


# ---- one stream per worker, and items that the workers download and transform; an initialization
# ---- hook, a global batch size, timings, results by worker, `info` for a call


def initialization_hook():
    os.environ["OLD_STYLE_FLAG"] = "raised"
    torch.set_num_interop_threads(1)  # PyTorch accepts this only before its first parallel work


class Stream(IterableDataset):
    """A stream of `num_points` points, without a length. Each worker has its own."""

    num_replicas = None  # so that raysgd does not read one stream on all workers

    def __init__(self, rank, num_points):
        self.rank = rank
        self.num_points = num_points

    def __iter__(self):
        for i in range(self.num_points):
            x = torch.tensor([self.rank + i / 100])
            yield x, 2 * x + 1


class StreamOperator(TrainingOperator):
    def setup(self, config):
        self.flag = os.environ.get("OLD_STYLE_FLAG")
        model = make_line_model()
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.2),
            criterion=nn.MSELoss(),
        )
        own = Stream(self.world_rank, config["num_points"][self.world_rank])
        self.register_data(
            train_loader=DataLoader(own, batch_size=config[BATCH_SIZE]),
            validation_loader=DataLoader(own, batch_size=config[BATCH_SIZE]),
        )

    def train_batch(self, batch, batch_info):
        metrics = super().train_batch(batch, batch_info)
        metrics["x"] = batch[0].mean()
        metrics["rank"] = self.world_rank
        metrics["share"] = len(batch[0])
        metrics["note"] = str(batch_info["info"])
        return metrics

    def validate_batch(self, batch, batch_info):
        metrics = super().validate_batch(batch, batch_info)
        metrics["note"] = str(batch_info["info"])
        return metrics


def download(name):
    return float(name.removeprefix("item-"))


def to_sample(number):
    x = torch.tensor([[number / 10]])
    return x, 2 * x + 1


@pytest.fixture(scope="class")
def stream_trainer(module_cluster):
    config = {BATCH_SIZE: 21, "num_points": [20, 31]}
    with pytest.warns(UserWarning, match=r"21.*20"):
        trainer = TorchTrainer(
            training_operator_cls=StreamOperator,
            initialization_hook=initialization_hook,
            config=config,
            num_workers=2,
            timeout_s=120,  # so that a hang ends soon
        )
    assert config[BATCH_SIZE] == 21
    with trainer:
        yield trainer


class TestDataWithoutAnIndex:
    def test_hook_ran_on_every_worker_before_all_else(self, stream_trainer):
        assert stream_trainer.apply_all_operators(lambda op: op.flag) == ["raised"] * 2
        inside = stream_trainer.apply_all_workers(lambda: os.environ["OLD_STYLE_FLAG"])
        assert inside == ["raised"] * 2
        assert "OLD_STYLE_FLAG" not in os.environ

    def test_global_batch_size_is_shared_out(self, stream_trainer):
        assert stream_trainer.config[BATCH_SIZE] == 20
        shares = stream_trainer.apply_all_operators(lambda op: op.config[BATCH_SIZE])
        assert shares == [10, 10]

    def test_results_by_worker_timings_and_information(self, stream_trainer):
        trainer = stream_trainer
        each = trainer.train(reduce_results=False, info={"lesson": 3})
        assert [stats["rank"] for stats in each] == [0, 1]
        assert [stats["share"] for stats in each] == [10, 10]
        assert [stats["num_samples"] for stats in each] == [20, 20]
        assert [stats["epoch"] for stats in each] == [trainer.epoch] * 2
        assert [stats["note"] for stats in each] == ["{'lesson': 3}"] * 2

        stats = trainer.train(profile=True)
        assert stats["rank"] == 0.5
        assert "last_train_loss" in stats
        stages = ("mean_train_epoch_s", "mean_fwd_s", "mean_grad_s", "mean_apply_s", "mean_data_s")
        assert all(stats["profile"][stage] > 0 for stage in stages)
        assert "profile" not in trainer.train()

        by_worker = trainer.validate(reduce_results=False, profile=True, info={"exam": 1})
        assert all(stats["profile"]["mean_validation_s"] > 0 for stats in by_worker)
        assert all(stats["profile"]["mean_eval_fwd_s"] > 0 for stats in by_worker)
        assert by_worker[1]["note"] == "{'exam': 1}"

    def test_items_are_downloaded_and_transformed_on_the_workers(self, stream_trainer):
        trainer = stream_trainer
        names = [f"item-{i}" for i in range(21)]
        dataset = ItemDataset(
            names, batch_size=4, download_func=download, max_concurrency=2, transform=to_sample
        )
        shorter = ItemDataset(iter(names[:8]), batch_size=4, download_func=download)
        stats = [trainer.train(dataset=dataset) for _ in range(3)]
        for result in stats:
            assert result["num_samples"] == 21
            assert result["x"] == pytest.approx(1.0)  # the mean of 0.0, 0.1, ... 2.0
        assert stats[-1]["train_loss"] < stats[0]["train_loss"]

        trainer.train(num_steps=1, dataset=dataset)
        rest = trainer.train(dataset=dataset)
        assert rest["num_samples"] == 21 - 8

        # without a transform the items are bare numbers, which this operator cannot take
        with pytest.raises(TypeError):
            trainer.train(dataset=shorter)
        assert trainer.train(dataset=dataset)["num_samples"] == 21

    def test_streams_of_uneven_length_end_together(self, stream_trainer):
        trainer = stream_trainer
        begun, done = trainer.epoch, trainer.global_step
        for epoch in (1, 2):
            each = trainer.train(reduce_results=False)
            # as many steps as the shorter stream has
            assert [stats["batch_count"] for stats in each] == [2, 2]
            assert [stats["epoch"] for stats in each] == [begun + epoch] * 2
            # each worker read its own stream
            assert each[0]["x"] < 1 <= each[1]["x"]
        assert all_equal(trainer.apply_all_operators(replica_hash))

        by_worker = trainer.validate(reduce_results=False)
        assert [stats["num_samples"] for stats in by_worker] == [20, 31]
        assert [stats["batch_count"] for stats in by_worker] == [2, 4]

        # beyond the end of the streams
        assert trainer.train(num_steps=3)["batch_count"] == 3
        assert trainer.global_step - done == 7
        assert trainer.epoch - begun == 4


# ---- a whole file, run as a program


@pytest.mark.slow("a program imports ray and torch, and so does its worker")
def test_a_script_in_one_file_runs_as_a_program(module_cluster, tmp_path):
    root = Path(__file__).parents[2]
    note = tmp_path / "note"
    address = module_cluster.get_runtime_context().gcs_address
    script = str(Path(__file__).with_name("old_style_script.py"))
    arguments = [f"--address={address}", "--num-workers=1", "--num-epochs=3", f"--note={note}"]
    done = subprocess.run(
        [sys.executable, script, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stderr
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


class ModelOperator(TrainingOperator):
    """The base of operators below, without data."""

    def setup(self, config):
        model = make_line_model()
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            criterion=nn.MSELoss(),
        )


class HabitOperator(ModelOperator):
    """The base of operators below, with data."""

    def setup(self, config):
        super().setup(config)
        loader = DataLoader(Line(NUM_TRAIN), batch_size=16)
        self.register_data(train_loader=loader, validation_loader=loader)


def test_an_older_validate_may_use_info_as_a_dict_though_none_was_given():
    class Operator(HabitOperator):
        def validate(self, val_iterator, info):
            stats = super().validate(val_iterator, info)
            stats["wanted"] = info.get("wanted", "nothing")
            return stats

    _, trainer = train_alone(Operator)
    assert trainer.validate()["wanted"] == "nothing"


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


def test_an_operator_may_keep_its_loaders_under_any_name():
    class Operator(HabitOperator):
        def setup(self, config):
            self.train_loader = DataLoader(Line(NUM_TRAIN), batch_size=16)
            self.validation_loader = DataLoader(Line(NUM_VALIDATION), batch_size=16)
            super().setup(config)

    stats, _ = train_alone(Operator)
    assert stats["num_samples"] == NUM_TRAIN


class HalvesItsRate(TrainingOperator):
    def setup(self, config):
        model = make_line_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss(), schedulers=scheduler
        )
        self.register_data(train_loader=DataLoader(Line(NUM_TRAIN), batch_size=80))


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("raysgd.torch.trainer", "TorchTrainer"),
        ("raysgd.utils", "BATCH_SIZE NUM_SAMPLES BATCH_COUNT AverageMeter override"),
        ("raysgd.data.dataset", "Dataset"),
        ("raysgd.tf.tf_trainer", "TFTrainer TFTrainable"),
        ("raysgd.torch.torch_trainer", "TorchTrainer BaseTorchTrainable"),
    ],
)
def test_names_are_found_where_scripts_import_them_from(module, names):
    home = importlib.import_module(module)
    assert all(hasattr(home, name) for name in names.split())


def test_importing_resnet18_fails_and_points_to_torchvision():
    with pytest.raises(ImportError, match=r"torchvision\.models\.resnet18\(num_classes=10\)"):
        exec("from raysgd.torch.resnet import ResNet18")


# ---- other habits of scripts for RaySGD v1: they work, or fail with a message that names the way


@pytest.mark.parametrize(("frequency", "rate"), [("batch", 0.5**2), ("epoch", 0.5), ("manual", 1)])
def test_info_tells_a_loop_how_often_to_step_its_scheduler(frequency, rate):
    class Operator(HalvesItsRate):
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
    assert learning_rates(trainer.get_local_operator()) == [rate]
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


def test_losses_may_be_registered_in_a_list():
    class Operator(HabitOperator):
        def setup(self, config):
            model = make_line_model()
            self.given = [nn.MSELoss(), Centers(), lambda output, target: output.mean()]
            self.model, self.optimizer, self.criterion = self.register(
                models=model,
                optimizers=torch.optim.SGD(
                    [*model.parameters(), *self.given[1].parameters()], lr=0.1
                ),
                criterion=self.given,
            )
            self.register_data(train_loader=DataLoader(Line(NUM_TRAIN), batch_size=16))

        def train_batch(self, batch, batch_info):
            features, target = batch
            output = self.model(features)
            loss = sum(criterion(output, target) for criterion in self.criterion)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            return {"train_loss": loss.item(), NUM_SAMPLES: len(target)}

    _, trainer = train_alone(Operator)
    operator = trainer.get_local_operator()
    assert operator.criterion == operator.given
    # the state includes the loss that has parameters
    assert [list(state) for state in trainer.state_dict()["models"]] == [
        ["weight", "bias"],
        ["center"],
    ]
    assert type(trainer.get_model()) is nn.Linear


class Centers(nn.Module):
    def __init__(self):
        super().__init__()
        self.center = nn.Parameter(torch.zeros(1))

    def forward(self, output, target):
        return ((output - self.center) ** 2).mean()


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


def test_a_loop_without_a_loader_gets_a_clear_error():
    for call in ("train", "validate"):
        with pytest.raises(RuntimeError, match=r"There is no \w+ loader"):
            getattr(TorchTrainer(training_operator_cls=ModelOperator, use_local=True), call)()


def test_a_loop_that_counts_global_steps_reads_its_own_count():
    class Operator(HabitOperator):
        def train_epoch(self, iterator, info):
            self.seen = []
            for batch in iterator:
                self.train_batch(batch, {})
                self.global_step += 1
                self.seen.append(self.global_step)
            return {}

    _, trainer = train_alone(Operator)
    assert trainer.get_local_operator().seen == list(range(1, 11))
    assert trainer.global_step == 10


def test_epochs_in_a_call_weigh_by_batches_without_num_samples():
    class Operator(HabitOperator):
        def train_epoch(self, iterator, info):
            return {"share": float(len(list(iterator)) == 2)}

        def validate(self, val_iterator, info):
            return {"val_share": float(len(list(val_iterator)) == 2)}

    stats, trainer = train_alone(Operator, num_steps=8)
    assert stats["share"] == 0
    # two batches to the end of the epoch, and three of the next
    assert trainer.train(num_steps=5)["share"] == pytest.approx(0.4)
    trainer.validate(num_steps=8)
    assert trainer.validate(num_steps=5)["val_share"] == pytest.approx(0.4)


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


def test_own_loss_scaling_fails_with_a_message_that_names_the_methods():
    class Operator(HabitOperator):
        def train_batch(self, batch, batch_info):
            with self._amp.autocast():
                loss = self.criterion(self.model(batch[0]), batch[1])
            self._amp_scaler.scale(loss).backward()

    with pytest.raises(AttributeError, match=r"autocast.*self\.backward.*self\.optimizer_step"):
        train_alone(Operator)


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
    with pytest.raises(TypeError, match=r"num_steps=2\.5\): must be an int"):
        trainer.train(num_steps=2.5)
    with pytest.raises(ValueError, match=r"above 0. To reserve almost no CPU, pass 0\.001"):
        TorchTrainer(training_operator_cls=HabitOperator, num_cpus_per_worker=0)


def test_methods_that_shard_a_dataset_explain_that_it_shards_itself():
    for name in ("set_num_shards", "get_shard"):
        with pytest.raises(AttributeError, match="partitions the items"):
            getattr(ItemDataset([1, 2]), name)


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
