"""Mixed precision and gradient accumulation over several workers, with losses on the way."""

import os
import time

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, TorchTrainer, TrainingOperator
from raysgd.utils import BATCH_SIZE
from tests.conftest import wait_until
from tests.distributed.test_elastic import Killer, kill, kinds
from tests.distributed.test_exactness import Ids, Weights, ledger_of, plain_training
from tests.distributed.test_failures import Faulty, order, reached
from tests.operators import Classifier, parameters, replica_hash
from tests.unit.torch.test_updates import Adversaries

HALF = {"use_fp16": True, "amp_dtype": torch.float16}
PRECISIONS = {
    "float16": HALF,
    "bfloat16": {"use_fp16": True, "amp_dtype": torch.bfloat16},
}


def scaler_state(operator):
    return operator._parts.updates.precision.state_dict()


# ---- what is learned


class Digits(TrainingOperator):
    def setup(self, config):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        )
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.Adam(model.parameters(), lr=1e-2),
            criterion=torch.nn.CrossEntropyLoss(),
        )
        from sklearn.datasets import load_digits  # seconds, for workers of other tests as well

        digits = load_digits()
        order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
        images = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
        target = torch.tensor(digits.target)[order]
        loaders = [
            DataLoader(TensorDataset(images[rows], target[rows]), batch_size=32, shuffle=shuffle)
            for rows, shuffle in ((slice(0, 1440), True), (slice(1440, None), False))
        ]
        self.register_data(train_loader=loaders[0], validation_loader=loaders[1])


def accuracy(**arguments):
    with TorchTrainer(training_operator_cls=Digits, num_workers=2, **arguments) as trainer:
        for _ in range(12):
            metrics = trainer.train()
        assert ("num_skipped_steps" in metrics) == (arguments == HALF)
        assert len(set(trainer.apply_all_operators(replica_hash))) == 1
        return trainer.validate()["val_accuracy"]


def test_mixed_precision_learns_the_digits_as_well_as_float32(ray_cluster):
    expected = accuracy()
    assert expected > 0.95
    for arguments in PRECISIONS.values():
        assert accuracy(**arguments) == pytest.approx(expected, abs=0.01)


# ---- overflows


class Overflowing(Classifier):
    """The loss of one rank overflows in one batch."""

    def train_batch(self, batch, batch_info):
        features, target = batch
        with self.autocast():
            loss = self.criterion(self.model(features), target)
        if (self.world_rank, batch_info["global_step"]) == (1, self.config["overflow_at"]):
            loss = loss * float("inf")
        self.backward(loss, num_samples=len(target))
        self.optimizer_step(self.optimizer)
        return {"num_samples": len(target)}


def test_an_overflow_on_one_rank_skips_the_step_on_all(ray_cluster):
    with TorchTrainer(
        training_operator_cls=Overflowing,
        config={"overflow_at": 3, "momentum": 0.9},
        num_workers=3,
        **HALF,
    ) as trainer:
        assert trainer.train(num_steps=3)["num_skipped_steps"] == 0
        before = trainer.apply_all_operators(replica_hash)
        metrics = trainer.train(num_steps=1, reduce_results=False)
        assert [one["num_skipped_steps"] for one in metrics] == [1] * 3
        assert trainer.apply_all_operators(replica_hash) == before
        assert {s["scale"] for s in trainer.apply_all_operators(scaler_state)} == {2.0**15}
        metrics = trainer.train()
        assert metrics["num_skipped_steps"] == 0
        assert len(set(trainer.apply_all_operators(replica_hash))) == 1
        assert trainer.apply_all_operators(replica_hash) != before


@pytest.mark.parametrize("position", [0, 2])
def test_an_overflow_anywhere_in_a_group_skips_its_update_on_all(ray_cluster, position):
    class Grouped(Overflowing):
        def register(self, **given):
            return super().register(**given, gradient_accumulation_steps=3, max_grad_norm=1.0)

    config = {"overflow_at": 3 + position, "batch_size": 16}
    with TorchTrainer(
        training_operator_cls=Grouped, config=config, num_workers=2, **HALF
    ) as trainer:
        trainer.train(num_steps=3)
        before = trainer.apply_all_operators(replica_hash)
        assert trainer.train(num_steps=3)["num_skipped_steps"] == 1
        assert trainer.apply_all_operators(replica_hash) == before
        assert trainer.train(num_steps=4)["num_skipped_steps"] == 0
        after = trainer.apply_all_operators(replica_hash)
        assert len(set(after)) == 1
        assert after != before


# ---- state


class Counted(Faulty):
    """A Faulty that overflows once, on all ranks."""

    def train_batch(self, batch, batch_info):
        self.maybe("train")
        features, target = batch
        with self.autocast():
            loss = self.criterion(self.model(features), target)
        self.backward(loss * (float("inf") if self.global_step == 1 else 1.0), len(target))
        self.optimizer_step(self.optimizer)
        return {"num_samples": len(target)}


def test_a_newcomer_has_the_scaler_of_the_survivors(ray_cluster, tmp_path):
    with TorchTrainer(
        training_operator_cls=Counted, config={"folder": str(tmp_path)}, num_workers=2, **HALF
    ) as trainer:
        order(tmp_path, "train", 1, 4, "die")
        metrics = trainer.train(num_steps=8)
        assert metrics["num_skipped_steps"] == 1
        wait_until(lambda: trainer.train(num_steps=1) and trainer.num_workers == 2)
        states = trainer.apply_all_operators(scaler_state)
        assert states[0] == states[1]
        assert states[0]["scale"] == 2.0**15
        assert states[0]["_growth_tracker"] == trainer.global_step - 2
        assert len(set(trainer.apply_all_operators(replica_hash))) == 1


def test_when_all_are_lost_scaler_and_count_come_from_the_snapshot(ray_cluster, tmp_path):
    elastic = ElasticConfig(snapshot_every=1)
    with TorchTrainer(
        training_operator_cls=Counted,
        config={"folder": str(tmp_path)},
        num_workers=2,
        elastic=elastic,
        **HALF,
    ) as trainer:
        for rank in range(2):
            order(tmp_path, "train", rank, 4, "wait")

        def snapshot_is_there():
            state = trainer._supervisor.snapshots.state()
            return state is not None and state["global_step"] == 4

        pids = trainer.apply_all_workers(os.getpid)

        def kill_all():
            (tmp_path / "go").touch()
            for pid in pids:
                kill(pid)()

        with Killer((snapshot_is_there, kill_all)):
            metrics = trainer.train(num_steps=6)
        assert "restarted" in kinds(trainer)
        assert metrics["num_skipped_steps"] == 1
        assert {s["scale"] for s in trainer.apply_all_operators(scaler_state)} == {2.0**15}


def test_a_scaler_is_saved_and_loads_on_another_number_of_workers(ray_cluster, tmp_path):
    config = {"overflow_at": 1}
    with TorchTrainer(
        training_operator_cls=Overflowing, config=config, num_workers=2, **HALF
    ) as trainer:
        trainer.train(num_steps=4)
        trainer.save(tmp_path / "state.pt")
    with TorchTrainer(
        training_operator_cls=Overflowing, config=config, num_workers=3, **HALF
    ) as trainer:
        trainer.load(tmp_path / "state.pt")
        states = trainer.apply_all_operators(scaler_state)
        assert [(s["scale"], s["_growth_tracker"]) for s in states] == [(2.0**15, 2)] * 3


def test_a_missing_apex_is_told_by_the_worker_that_lacks_it(ray_cluster):
    with pytest.raises(ImportError, match=r"use_fp16=\"apex\" needs NVIDIA Apex"):
        TorchTrainer(training_operator_cls=Classifier, num_workers=2, use_fp16="apex")


# ---- several models


@pytest.mark.parametrize(
    ("config", "precision"), [({"times": 2}, HALF), ({"steps": 2}, HALF), ({"steps": 2}, {})]
)
def test_adversaries_stay_identical_on_all_workers(ray_cluster, config, precision):
    with TorchTrainer(
        training_operator_cls=Adversaries,
        config={"batch_size": 3, **config},
        num_workers=2,
        **precision,
    ) as trainer:
        before = trainer.apply_all_operators(replica_hash)
        for _ in range(2):
            metrics = trainer.train()
        assert (metrics["num_samples"], metrics["batch_count"]) == (20, 4)
        after = trainer.apply_all_operators(replica_hash)
        assert len(set(after)) == 1
        assert after != before


# ---- accumulation


class Accumulating(Classifier):
    """Counts how often gradients are exchanged."""

    def setup(self, config):
        super().setup(config)
        self.num_exchanges = 0
        if self.world_size > 1:
            self.model.register_comm_hook(None, self.exchange)

    def register(self, **given):
        return super().register(**given, gradient_accumulation_steps=self.config["steps"])

    def exchange(self, state, bucket):
        self.num_exchanges += 1
        return allreduce_hook(state, bucket)


def test_groups_on_two_workers_are_steps_of_one_process_with_all_their_samples(ray_cluster):
    config = {"steps": 3, "batch_size": 8, "shuffle": False, "momentum": 0.9, "num_samples": 480}
    with TorchTrainer(training_operator_cls=Accumulating, config=config, num_workers=2) as trainer:
        trainer.train(num_steps=3)
        assert trainer.apply_all_operators(lambda op: op.num_exchanges) == [1, 1]
        trainer.validate()
        trainer.train(num_steps=9)
        assert trainer.apply_all_operators(lambda op: op.num_exchanges) == [4, 4]
        found = trainer.apply_all_operators(parameters)
    expected = torch.cat([p.reshape(-1) for p in plain_training(4, 48).parameters()]).detach()
    assert torch.equal(found[0], found[1])
    assert torch.allclose(found[0], expected, atol=1e-6, rtol=0)


def test_a_static_graph_which_cannot_accumulate_is_refused(ray_cluster):
    """Torch fails with an internal error."""

    class Static(Accumulating):
        def register(self, **given):
            return super().register(**given, ddp_args={"static_graph": True})

    with pytest.raises(ValueError, match="static_graph"):
        TorchTrainer(training_operator_cls=Static, config={"steps": 2}, num_workers=2)


def test_an_uneven_end_of_an_epoch_is_trained_on_by_both(ray_cluster):
    """125 samples: seven full batches on each worker, then 7 and 6; groups of three."""
    config = {"steps": 3, "batch_size": 8, "num_samples": 125, "momentum": 0.9}
    with TorchTrainer(training_operator_cls=Accumulating, config=config, num_workers=2) as trainer:
        metrics = trainer.train()
        assert (metrics["num_samples"], metrics["batch_count"]) == (125, 8)
        assert trainer.apply_all_operators(lambda op: op.num_exchanges) == [3, 3]
        assert trainer.global_step == 8
        assert len(set(trainer.apply_all_operators(replica_hash))) == 1


class Stepper(torch.optim.Optimizer):
    """Adds 1 to the parameter of each sample in a group, by the gradient of the mean over it."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            gradient = -parameter.grad
            # the mean over all samples of the group: what each of them gets adds up to 1
            assert abs(gradient.sum().item() - 1) < 1e-4, gradient.sum()
            parameter += (gradient / gradient[gradient > 0].min()).round()


class GroupedLedger(TrainingOperator):
    """Counts in one parameter a sample how often it was trained on, in groups of batches."""

    def setup(self, config):
        model = Weights(config["num_samples"])
        self.model, self.optimizer = self.register(
            models=model,
            optimizers=Stepper(model.parameters()),
            gradient_accumulation_steps=config["steps"],
        )
        data = Ids(config["num_samples"])
        self.register_data(
            train_loader=DataLoader(data, batch_size=config[BATCH_SIZE], shuffle=True)
        )

    def train_batch(self, batch, batch_info):
        if self.world_size < self.config["num_workers"]:
            # for the newcomer to arrive within the epoch, also on a busy machine
            time.sleep(0.02 if self.global_step < 150 else 0.2)
        self.backward(-self.model(batch).mean(), num_samples=len(batch))
        self.optimizer_step(self.optimizer)
        return {"num_samples": len(batch)}


@pytest.mark.parametrize(("steps", "precision"), [(3, {}), (7, HALF)])
def test_each_sample_is_trained_on_once_although_a_worker_is_killed(ray_cluster, steps, precision):
    num_samples, num_workers = 6003, 3
    config = {
        "num_samples": num_samples,
        "num_workers": num_workers,
        "steps": steps,
        BATCH_SIZE: 12,
    }
    with TorchTrainer(
        training_operator_cls=GroupedLedger, config=config, num_workers=num_workers, **precision
    ) as trainer:
        pids = trainer.apply_all_workers(os.getpid)
        with Killer((lambda: reached(trainer) > 10, kill(pids[1]))):
            metrics = trainer.train()
        ledger = ledger_of(trainer)
        assert kinds(trainer) == ["started", "lost", "resumed", "grown"]
        assert trainer.num_workers == num_workers
        assert int((ledger == 1).sum()) + int((ledger == 2).sum()) == num_samples
        assert int((ledger == 2).sum()) < num_workers
        assert metrics["num_samples"] == num_samples
        assert metrics["epoch"] == 1
        assert len(set(trainer.apply_all_operators(replica_hash))) == 1
        assert metrics.get("num_skipped_steps", 0) == 0


def test_an_exception_within_a_group_on_one_rank_costs_the_group_on_all(ray_cluster, tmp_path):
    class Grouped(Faulty):
        def register(self, **given):
            return super().register(**given, gradient_accumulation_steps=3)

        def train_batch(self, batch, batch_info):
            if batch_info["global_step"] == 4:
                self.maybe("train")  # its order is for the group that begins at step 3
            return Classifier.train_batch(self, batch, batch_info)

    hashes = []
    for fail in (False, True):
        config = {"folder": str(tmp_path), "batch_norm": True, "momentum": 0.9}
        with TorchTrainer(training_operator_cls=Grouped, config=config, num_workers=2) as trainer:
            if fail:
                order(tmp_path, "train", 1, 3, "raise")
                with pytest.raises(KeyError):
                    trainer.train()
                assert trainer.global_step == 3
            trainer.train()
            hashes += trainer.apply_all_operators(replica_hash)
    assert len(set(hashes)) == 1
