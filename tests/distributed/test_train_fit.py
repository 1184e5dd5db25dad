"""fit(): results, best checkpoints, restoring after a driver was killed, subclasses, Tune.

Workers import this module: what takes long to import is imported where it is needed.
"""

import os
import signal
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
    FailureConfig,
    RunConfig,
    ScalingConfig,
    Trainer,
    TrainingCallback,
)
from raysgd.train.backend import Backend, BackendConfig
from raysgd.train.torch import TorchTrainer
from tests.conftest import wait_until

TWO = ScalingConfig(num_workers=2)


class Seen(TrainingCallback):
    def __init__(self):
        self.results, self.errors = [], []

    def handle_result(self, results, **info):
        self.results.append(results)

    def finish_training(self, error=False, **info):
        self.errors.append(error)


def losses(config):
    start = 0
    if (checkpoint := train.get_checkpoint()) is not None:
        start = checkpoint.to_dict()["epoch"] + 1
    for epoch, loss in enumerate(config["losses"][start:], start):
        made = Checkpoint.from_dict({"epoch": epoch}) if train.world_rank() == 0 else None
        train.report({"loss": loss, "epoch": epoch}, checkpoint=made)


def test_a_result_has_metrics_and_the_best_checkpoints(ray_cluster, tmp_path):
    seen = Seen()
    trainer = DataParallelTrainer(
        losses,
        train_loop_config={"losses": [2.0, 4.0, 1.0, 3.0]},
        scaling_config=TWO,
        run_config=RunConfig(
            name="best",
            storage_path=tmp_path,
            checkpoint_config=CheckpointConfig(2, "loss", "min"),
            callbacks=[seen],
        ),
        metadata={"by": "me"},
    )
    result = trainer.fit()
    assert (result.metrics["loss"], result.metrics["epoch"]) == (3.0, 3)
    assert result.checkpoint.to_dict() == {"epoch": 3}
    assert result.checkpoint.get_metadata() == {"by": "me"}
    assert [c.to_dict()["epoch"] for c, _ in result.best_checkpoints] == [2, 0]
    assert [numbers["loss"] for _, numbers in result.best_checkpoints] == [1.0, 2.0]
    assert result.path == str(tmp_path / "best")
    assert list(result.metrics_dataframe["loss"]) == [2.0, 4.0, 1.0, 3.0]
    assert result.error is None
    assert len(seen.results) == 4
    assert seen.errors == [False]


def test_rays_own_configs_and_checkpoints_are_taken(ray_cluster, tmp_path):
    import ray.train

    def function():
        folder = tmp_path / f"rank{train.world_rank()}"
        folder.mkdir()
        (folder / "model.txt").write_text("weights")
        train.report({"a": 1}, checkpoint=ray.train.Checkpoint.from_directory(folder))

    result = TorchTrainer(
        function,
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(name="rays", storage_path=str(tmp_path)),
    ).fit()
    with result.checkpoint.as_directory() as folder:
        assert (Path(folder) / "model.txt").read_text() == "weights"


def test_losses_within_max_failures_cost_the_work_since_the_checkpoint(ray_cluster, tmp_path):
    def function():
        checkpoint = train.get_checkpoint()
        start = 0 if checkpoint is None else checkpoint.to_dict()["epoch"] + 1
        for epoch in range(start, 4):
            if epoch == 2 and not (tmp_path / "died").exists() and train.world_rank() == 1:
                (tmp_path / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            train.report({"epoch": epoch}, checkpoint=Checkpoint.from_dict({"epoch": epoch}))

    def trainer(max_failures):
        return DataParallelTrainer(
            function,
            scaling_config=TWO,
            run_config=RunConfig(
                storage_path=tmp_path, failure_config=FailureConfig(max_failures=max_failures)
            ),
        )

    with pytest.raises(RuntimeError, match="max_retries=0"):
        trainer(0).fit()
    (tmp_path / "died").unlink()
    result = trainer(1).fit()
    assert result.metrics["epoch"] == 3
    assert result.metrics["_training_iteration"] == 4


DRIVER = """
import pathlib, sys, ray
from raysgd import train
from raysgd.train import DataParallelTrainer, RunConfig, ScalingConfig
from tests.distributed.fit_function import function

ray.init(num_cpus=2, include_dashboard=False)
DataParallelTrainer(
    function,
    train_loop_config={"folder": sys.argv[1]},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="killed", storage_path=sys.argv[1]),
).fit()
"""


def test_a_run_is_restored_after_its_driver_was_killed(ray_cluster, tmp_path):
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": root}
    environment["RAY_ADDRESS"] = "local"
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


def test_reports_that_a_restored_run_makes_again_have_the_iterations_they_had(
    ray_cluster, tmp_path
):
    def function():
        start = train.get_checkpoint().to_dict()["n"] + 1 if train.get_checkpoint() else 0
        for n in range(start, 4):
            made = Checkpoint.from_dict({"n": n}) if n == 1 else None
            train.report({"n": n}, checkpoint=made)
        if start == 0:
            raise ValueError("on purpose")

    trainer = DataParallelTrainer(
        function, run_config=RunConfig(name="restored", storage_path=tmp_path)
    )
    with pytest.raises(ValueError, match="on purpose"):
        trainer.fit()
    history = DataParallelTrainer.restore(tmp_path / "restored").fit().history
    assert [report["n"] for report in history] == [0, 1, 2, 3, 2, 3]
    assert [report["_training_iteration"] for report in history] == [1, 2, 3, 4, 3, 4]


def test_a_subclass_with_a_backend_of_its_own(ray_cluster, tmp_path):
    class MyBackend(Backend):
        def on_start(self, worker_group, backend_config):
            def set_variable(value):
                os.environ["RAYSGD_MINE"] = value

            worker_group.execute(set_variable, backend_config.env_var)

    @dataclass
    class MyConfig(BackendConfig):
        env_var: str = "default"

        def backend_cls(self):
            return MyBackend

    class MyTrainer(DataParallelTrainer):
        def __init__(self, train_loop_per_worker, my_backend_config, **kwargs):
            super().__init__(train_loop_per_worker, backend_config=my_backend_config, **kwargs)

        def setup(self):
            self.was_set_up = True

    trainer = MyTrainer(
        lambda: train.report(found=os.environ["RAYSGD_MINE"]),
        MyConfig(env_var="mine"),
        scaling_config=TWO,
        run_config=RunConfig(storage_path=tmp_path),
    )
    assert trainer.fit().metrics["found"] == "mine"
    assert trainer.was_set_up


def test_the_train_data_is_split_and_the_rest_is_whole(ray_cluster, tmp_path):
    def function():
        rows = {
            name: sorted(row["id"] for row in train.get_dataset_shard(name).iter_rows())
            for name in ("train", "val")
        }
        train.report(rows=rows["train"], num_val=len(rows["val"]))

    import ray.data

    seen = Seen()
    DataParallelTrainer(
        function,
        scaling_config=TWO,
        run_config=RunConfig(storage_path=tmp_path, callbacks=[seen]),
        datasets={"train": ray.data.range(20), "val": ray.data.range(6)},
    ).fit()
    (results,) = seen.results
    assert [len(result["rows"]) for result in results] == [10, 10]
    assert sorted(results[0]["rows"] + results[1]["rows"]) == list(range(20))
    assert [result["num_val"] for result in results] == [6, 6]


def test_a_tuner_searches_over_the_functions_config_and_stops_the_bad_ones(ray_cluster, tmp_path):
    def function(config):
        for _ in range(3):
            train.report(output=config["input"] * config["factor"], size=train.world_size())

    trainer = TorchTrainer(
        function, train_loop_config={"factor": 2}, scaling_config=ScalingConfig(num_workers=1)
    )
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    results = tune.Tuner(
        trainer.as_trainable(),
        param_space={"train_loop_config": {"input": tune.grid_search([3, 1])}},
        tune_config=tune.TuneConfig(
            metric="output",
            mode="max",
            scheduler=ASHAScheduler(max_t=10, grace_period=1, reduction_factor=2),
            max_concurrent_trials=1,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(storage_path=str(tmp_path), name="search", verbose=0),
    ).fit()
    assert results.get_best_result().metrics["output"] == 6
    # the second was worse than the first at its first report
    assert [r.metrics["_training_iteration"] for r in results] == [3, 1]
    assert all(r.error is None for r in results)


def test_pbt_lets_a_trial_go_on_from_the_checkpoint_of_a_better_one(ray_cluster, tmp_path):
    """With another config: the first two reports are the other's, the third is its own."""

    def function(config):
        found = train.get_checkpoint()
        state = {"score": 0.0, "rates": []} if found is None else found.to_dict()
        while True:
            rate = config["rate"]
            state = {"score": state["score"] + rate, "rates": [*state["rates"], rate]}
            train.report(state, checkpoint=Checkpoint.from_dict(state))

    from ray import tune
    from ray.tune.schedulers import PopulationBasedTraining

    trainer = DataParallelTrainer(function)
    worse, better = tune.Tuner(
        trainer.as_trainable(),
        param_space={"train_loop_config": {"rate": tune.grid_search([0.25, 4.0])}},
        tune_config=tune.TuneConfig(
            scheduler=PopulationBasedTraining(
                time_attr="training_iteration",
                metric="score",
                mode="max",
                perturbation_interval=2,
                hyperparam_mutations={"train_loop_config": {"rate": tune.uniform(0, 10)}},
                resample_probability=0,
                quantile_fraction=0.5,
                synch=True,
            ),
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            storage_path=str(tmp_path), name="pbt", stop={"training_iteration": 3}, verbose=0
        ),
    ).fit()
    assert better.metrics["rates"] == [4.0, 4.0, 4.0]
    changed = worse.config["train_loop_config"]["rate"]
    assert changed == pytest.approx(3.2) or changed == pytest.approx(4.8)
    assert worse.metrics["rates"] == [4.0, 4.0, changed]
    assert worse.metrics["score"] == 8.0 + changed
    assert worse.metrics["_training_iteration"] == 3


def test_a_trial_of_the_older_api_keeps_the_functions_checkpoints(ray_cluster, tmp_path):
    def function(config):
        for step in range(3):
            train.save_checkpoint(step=step)
            train.report(score=config["x"] + step)

    trainer = Trainer(BackendConfig(), num_workers=2, logdir=tmp_path / "runs")
    trainable = trainer.to_tune_trainable(function)
    trainer.start()
    with pytest.raises(RuntimeError, match="not started"):
        trainer.to_tune_trainable(function)
    trainer.shutdown()
    from ray import tune

    results = tune.run(
        trainable, config={"x": 10}, storage_path=str(tmp_path), name="older", verbose=0
    )
    assert [trial.last_result["score"] for trial in results.trials] == [12]
    assert results.trials[0].checkpoint is not None
