"""fit(): results, best checkpoints, restoring after a driver was killed, subclasses, Tune.

Workers import this module, so functions import what takes long to import.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from raysgd import train
from raysgd.train import (
    Checkpoint,
    CheckpointConfig,
    DataParallelTrainer,
    RunConfig,
    ScalingConfig,
    TrainingCallback,
)
from raysgd.train.backend import Backend, BackendConfig
from tests.conftest import wait_until


class Seen(TrainingCallback):
    def __init__(self):
        self.results, self.errors = [], []

    def handle_result(self, results, **info):
        self.results.append(results)

    def finish_training(self, error=False, **info):
        self.errors.append(error)


# ---- one run of two workers, which several tests share


class Variable(Backend):
    def on_start(self, worker_group, backend_config):
        def set_variable(value):
            os.environ["RAYSGD_MINE"] = value

        worker_group.execute(set_variable, backend_config.value)


@dataclass
class VariableConfig(BackendConfig):
    value: str = "default"

    def backend_cls(self):
        return Variable


class VariableTrainer(DataParallelTrainer):
    def __init__(self, train_loop_per_worker, own_config, **kwargs):
        super().__init__(train_loop_per_worker, backend_config=own_config, **kwargs)

    def setup(self):
        self.was_set_up = True


def learn(config):
    """Report one loss and the data of each epoch."""
    mine, whole = (
        sorted(row["id"] for row in train.get_dataset_shard(name).iter_rows())
        for name in ("train", "val")
    )
    for epoch, loss in enumerate(config["losses"]):
        made = Checkpoint.from_dict({"epoch": epoch}) if train.world_rank() == 0 else None
        metrics = {"loss": loss, "epoch": epoch, "mine": mine, "whole": whole}
        train.report({**metrics, "variable": os.environ["RAYSGD_MINE"]}, checkpoint=made)


@pytest.fixture(scope="module")
def run(module_cluster, tmp_path_factory):
    """A trainer after its run, its folder, its result, and its callback."""
    import ray.data

    folder, seen = tmp_path_factory.mktemp("fit"), Seen()
    trainer = VariableTrainer(
        learn,
        VariableConfig(value="mine"),
        train_loop_config={"losses": [2.0, 4.0, 1.0, 3.0]},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="best",
            storage_path=folder,
            checkpoint_config=CheckpointConfig(2, "loss", "min"),
            callbacks=[seen],
        ),
        datasets={"train": ray.data.range(20), "val": ray.data.range(6)},
    )
    result = trainer.fit()
    return trainer, folder, result, seen


@pytest.mark.slow("two workers start, and Ray Data")
def test_a_result_has_metrics_and_the_best_checkpoints(run):
    _, folder, result, seen = run
    assert (result.metrics["loss"], result.metrics["epoch"]) == (3.0, 3)
    assert result.checkpoint.to_dict() == {"epoch": 3}
    assert [c.to_dict()["epoch"] for c, _ in result.best_checkpoints] == [2, 0]
    assert [numbers["loss"] for _, numbers in result.best_checkpoints] == [1.0, 2.0]
    assert result.path == str(folder / "best")
    assert list(result.metrics_dataframe["loss"]) == [2.0, 4.0, 1.0, 3.0]
    assert result.error is None
    assert len(seen.results) == 4
    assert seen.errors == [False]


def test_train_data_is_split_and_other_data_is_not(run):
    for results in run[-1].results:
        assert [len(result["mine"]) for result in results] == [10, 10]
        assert sorted(results[0]["mine"] + results[1]["mine"]) == list(range(20))
        assert [result["whole"] for result in results] == [list(range(6))] * 2


def test_a_subclass_can_have_its_own_backend_and_setup(run):
    trainer, _, _, seen = run
    assert trainer.was_set_up
    assert {result["variable"] for results in seen.results for result in results} == {"mine"}


# ---- runs of one worker


def test_configs_checkpoints_and_the_session_of_ray_are_accepted(module_cluster, tmp_path):
    import ray.train
    from ray.air import session

    def function():
        session.report({"loss": 9.0, "size": session.get_world_size()})
        from ray.air.session import get_experiment_name, report

        for n, loss in enumerate((3.0, 1.0, 2.0)):
            folder = tmp_path / f"made{n}"
            folder.mkdir()
            (folder / "model.txt").write_text(str(loss))
            made = ray.train.Checkpoint.from_directory(folder)
            train.report({"n": n, "loss": loss}, checkpoint=made)
        report({"loss": 5.0}, checkpoint=Checkpoint.from_dict({"n": 1}))
        report({**session.get_checkpoint().to_dict(), "loss": 7.0, "name": get_experiment_name()})
        with pytest.raises(RuntimeError, match="cannot be used outside of a Ray Train"):
            ray.train.report({"n": 2})

    keep = ray.train.CheckpointConfig(1, "loss", "min")
    result = DataParallelTrainer(
        function,
        scaling_config=ray.train.ScalingConfig(num_workers=1),
        run_config=ray.train.RunConfig(
            name="rays", storage_path=str(tmp_path), checkpoint_config=keep
        ),
    ).fit()
    ((best, numbers),) = result.best_checkpoints
    assert (numbers["n"], numbers["loss"]) == (1, 1.0)
    with best.as_directory() as folder:
        assert (Path(folder) / "model.txt").read_text() == "1.0"
    assert result.history[0]["size"] == 1
    assert (result.metrics["n"], result.metrics["name"]) == (1, "rays")


DRIVER = """
import sys
from raysgd.train import DataParallelTrainer, RunConfig, ScalingConfig
from tests.distributed.fit_function import function

DataParallelTrainer(
    function,
    train_loop_config={"folder": sys.argv[1]},
    scaling_config=ScalingConfig(num_workers=1),
    run_config=RunConfig(name="killed", storage_path=sys.argv[1]),
).fit()
"""


@pytest.mark.slow("another driver starts and is killed")
def test_a_run_is_restored_after_its_driver_was_killed(module_cluster, tmp_path):
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    address = module_cluster.get_runtime_context().gcs_address
    environment = {**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": root}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)], env=environment, cwd=root
    )
    try:
        wait_until((tmp_path / "saved-2").exists, 90)
    finally:
        driver.kill()
        driver.wait()
    folder = tmp_path / "killed"
    assert DataParallelTrainer.can_restore(folder)
    assert not DataParallelTrainer.can_restore(tmp_path)
    (tmp_path / "go").touch()
    trainer = DataParallelTrainer.restore(folder)
    result = trainer.fit()
    assert result.metrics["started_from"] >= 2
    assert result.metrics["epoch"] == 4
    assert result.path == str(folder)
    epochs = list(result.metrics_dataframe["epoch"])
    assert epochs[0] == 0
    assert epochs[-1] == 4


# ---- trials of Ray Tune, in this process


def test_a_trial_continues_from_the_checkpoint_of_another(module_cluster, tmp_path, monkeypatch):
    """Like a PBT scheduler: before the first step, after some steps, and with a new config."""

    def function(config):
        state = train.load_checkpoint() or {"score": 0.0, "rates": []}
        while True:
            rate = config["rate"] * config["factor"]
            state = {"score": state["score"] + rate, "rates": [*state["rates"], rate]}
            train.save_checkpoint(**state)
            for _ in state["rates"]:
                train.report(**state)

    monkeypatch.setattr("ray.tune.trainable.trainable.DEFAULT_STORAGE_PATH", str(tmp_path))
    seen = Seen()
    seen.module = pytest  # which cannot be copied: the trials share the callback
    trainer = DataParallelTrainer(
        function, train_loop_config={"factor": 2.0}, run_config=RunConfig(callbacks=[seen])
    )
    trainable = trainer.as_trainable()
    worse = trainable(config={"train_loop_config": {"rate": 0.25}})
    better = trainable(config={"train_loop_config": {"rate": 4.0}})
    try:
        for trial in (worse, better):
            results = [trial.train() for _ in range(2)]
            assert all(result["should_checkpoint"] for result in results)
        assert better.train()["rates"] == [8.0, 8.0]  # no new checkpoint
        better.save_checkpoint(str(tmp_path))
        worse.load_checkpoint(str(tmp_path))
        assert worse.train()["rates"] == [8.0, 8.0, 0.5]
        assert better.reset_config({"train_loop_config": {"rate": 3.0}})
        better.load_checkpoint(str(tmp_path))
        result = better.train()
        assert (result["rates"], result["_training_iteration"]) == ([8.0, 8.0, 6.0], 3)
        assert len(seen.results) == 7
        assert seen.errors == [False, False]  # the runs of the replaced trials ended
    finally:
        worse.stop()
        better.stop()
