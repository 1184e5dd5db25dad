"""State that is saved, loaded, and taken out of a trainer."""

import random
import threading
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from raysgd import TorchTrainer
from raysgd.callbacks import CheckpointCallback
from tests.distributed.test_exactness import Ledger, ledger_of
from tests.operators import Classifier, make_data, parameters, replica_hash


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_a_run_saved_in_mid_epoch_goes_on_with_another_number_of_workers(
    ray_cluster, tmp_path, loader_workers
):
    config = {"num_samples": 300, "batch_size": 7, "loader_workers": loader_workers}
    with TorchTrainer(training_operator_cls=Ledger, config=config, num_workers=3) as trainer:
        trainer.train(num_steps=5)
        assert int(ledger_of(trainer).sum()) == 105
        path = trainer.save(tmp_path / "part.pt")
        trainer.train(num_steps=2)  # what comes after the save does not count
    with TorchTrainer(training_operator_cls=Ledger, config=config, num_workers=2) as trainer:
        trainer.load(path)
        assert (trainer.epoch, trainer.global_step) == (1, 5)
        metrics = trainer.train()
        assert (metrics["epoch"], metrics["num_samples"]) == (1, 195)
        # 195 samples are 13 full steps of 14 and one of 13
        assert torch.equal(ledger_of(trainer), torch.ones(300))


def test_a_loaded_run_ends_with_the_bits_of_one_that_was_not_interrupted(ray_cluster, tmp_path):
    config = {"momentum": 0.9, "batch_norm": True, "batch_size": 30}
    with TorchTrainer(training_operator_cls=Classifier, config=config, num_workers=2) as trainer:
        trainer.train(num_steps=20)
        path = trainer.save(tmp_path / "state.pt")
        trainer.train()
        expected = trainer.apply_all_operators(replica_hash)
        for _ in range(2):
            trainer.load(path)
            assert trainer.global_step == 20
            trainer.train()
            assert trainer.apply_all_operators(replica_hash) == expected


class Everything(Classifier):
    """Dropout, a scheduler, a scaler, accumulation, and state and randomness of its own."""

    def setup(self, config):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.Dropout(),
            torch.nn.Linear(16, 2),
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        self.drawn = []
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=model,
            optimizers=optimizer,
            criterion=torch.nn.CrossEntropyLoss(),
            schedulers=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99),
            gradient_accumulation_steps=2,
        )
        self.register_data(train_loader=DataLoader(make_data(300), batch_size=10, shuffle=True))

    def train_batch(self, batch, batch_info):
        self.drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        return super().train_batch(batch, batch_info)

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, state):
        self.drawn = list(state["drawn"])


def everything_of(operator):
    scaler = operator._parts.training_state()["amp_native"]
    # what came before the save is rank 0's on every rank that loads it
    drawn = operator.drawn[0 if operator.world_rank == 0 else 6 :]
    return replica_hash(operator), drawn, operator.scheduler.state_dict(), scaler


def test_a_run_that_is_loaded_into_new_processes_ends_as_if_it_had_not_ended(ray_cluster, tmp_path):
    settings = {
        "training_operator_cls": Everything,
        "num_workers": 2,
        "scheduler_step_freq": "batch",
        "use_fp16": True,
        "amp_dtype": torch.float16,
    }
    with TorchTrainer(**settings) as trainer:
        trainer.train(num_steps=6)
        path = trainer.save(tmp_path / "state.pt")
        trainer.train()
        expected = trainer.apply_all_operators(everything_of)
    with TorchTrainer(**settings) as trainer:
        trainer.load(path)
        assert trainer.train()["num_samples"] == 300 - 6 * 20
        assert trainer.apply_all_operators(everything_of) == expected


def test_the_model_is_a_copy_and_the_workers_keep_theirs(ray_cluster):
    with TorchTrainer(training_operator_cls=Classifier, num_workers=2) as trainer:
        trainer.train(num_steps=2)
        before = trainer.apply_all_operators(parameters)
        model = trainer.get_model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert torch.equal(trainer.apply_all_operators(parameters)[0], before[0])
        assert isinstance(model, torch.nn.Sequential)
        assert trainer.get_model(to_cpu=True)(torch.zeros(1, 8)).shape == (1, 2)


class Wide(Classifier):
    """Large enough for its weights to travel through shared memory."""

    def setup(self, config):
        model = torch.nn.Sequential(torch.nn.Linear(8, 50_000), torch.nn.Linear(50_000, 2))
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
            criterion=torch.nn.CrossEntropyLoss(),
        )
        self.register_data(train_loader=DataLoader(make_data(40), batch_size=10))


def test_a_state_without_a_copy_lies_in_shared_memory_and_stays_as_it_is(ray_cluster, tmp_path):
    with TorchTrainer(training_operator_cls=Wide, config={}, num_workers=1) as trainer:
        shared = trainer.state_dict(copy=False)["models"][0]["0.weight"]
        own = trainer.state_dict()["models"][0]["0.weight"]
        assert lies_in_shared_memory(shared)
        assert not lies_in_shared_memory(own)
        trainer.train()
        assert not torch.equal(trainer.get_model()[0].weight, own)
        assert torch.equal(shared, own)

        # what is written to a file needs no copy
        copies = []
        state_dict = trainer.state_dict
        trainer.state_dict = lambda copy=True: copies.append(copy) or state_dict(copy)
        callback = CheckpointCallback(tmp_path, every="epoch", resume=False)
        trainer.fit(2, callbacks=[callback])
        assert copies == [False]


def lies_in_shared_memory(tensor):
    with open("/proc/self/maps") as maps:
        for line in maps:
            first, last = (int(number, 16) for number in line.split(maxsplit=1)[0].split("-"))
            if first <= tensor.data_ptr() < last:
                return "plasma" in line
    raise AssertionError("no such memory")


def test_the_progress_bar_shows_the_whole_group(ray_cluster, capsys):
    with TorchTrainer(
        training_operator_cls=Slow, config={"batch_size": 25}, num_workers=2, use_tqdm=True
    ) as trainer:
        trainer.train()
    shown = capsys.readouterr().err
    assert "train" in shown
    assert "/21" in shown
    assert "workers=2/2" in shown
    assert "loss=" in shown
    assert "samples/s=" in shown


class Slow(Classifier):
    def train_batch(self, batch, batch_info):
        time.sleep(0.05)
        return super().train_batch(batch, batch_info)


def test_two_threads_cannot_call_at_the_same_time(ray_cluster):
    with TorchTrainer(training_operator_cls=Slow, num_workers=2) as trainer:
        thread = threading.Thread(target=trainer.train)
        thread.start()
        while trainer._supervisor.state.name != "RUNNING":
            time.sleep(0.01)
        with pytest.raises(RuntimeError, match="in another thread"):
            trainer.validate()
        thread.join()
        assert trainer.validate()["num_samples"] == 1003
