"""Trials of Ray Tune: their resources, a scheduler that stops them, and killed trials.

examples/tune_pbt.py tests PBT. Starting the process of a trial takes seconds, so each trial tests
as much as possible.
"""

import os
import re
import signal
import sys

import pytest
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.util.placement_group import placement_group_table

from raysgd import TorchTrainer
from raysgd.testing import chaos
from tests.conftest import has_ended, needs_runtime_env, wait_until
from tests.operators import Classifier

SMALL = {"num_samples": 320, "batch_size": 32}


class Reporting(Classifier):
    """Reports the actual learning rate of the optimizer."""

    def train_batch(self, batch, batch_info):
        lr = self.optimizer.param_groups[0]["lr"]
        return {**super().train_batch(batch, batch_info), "optimizer_lr": lr}


def one_process(**arguments):
    """Return a trainable whose only worker is in the process of the trial."""
    return TorchTrainer.as_trainable(
        training_operator_cls=Reporting, config=SMALL, use_local=True, use_gpu=False, **arguments
    )


def fit(trainable, tmp_path, param_space, num_iterations, *, run=None, **tune_config):
    tuner = tune.Tuner(
        trainable,
        param_space=param_space,
        tune_config=tune.TuneConfig(**tune_config),
        run_config=tune.RunConfig(
            name="run",
            storage_path=str(tmp_path),
            stop={"training_iteration": num_iterations},
            verbose=0,
            **(run or {}),
        ),
    )
    return tuner.fit()


def test_path_of_python_with_a_space_is_an_error_before_a_trial_starts(
    ray_cluster, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "executable", "/home/my env/bin/python")
    with pytest.raises(Exception, match=r"a space or a quote: /home/my env/bin/python"):
        fit(one_process(), tmp_path, {}, 1)


class Killer(tune.Callback):
    """Kills the process of the first trial that reports a result of an iteration."""

    def __init__(self, iteration):
        self.iteration = iteration
        self.killed = None

    def on_trial_result(self, iteration, trials, trial, result, **info):
        if result["training_iteration"] == self.iteration and self.killed is None:
            self.killed = result["pid"]
            os.kill(result["pid"], signal.SIGKILL)


def lose_a_worker(trainer, info):
    def bundle_of_process():  # sent by value, so that workers do not import Tune
        """Return the index of the placement group bundle of this process, or None."""
        import ray

        held = ray.get_runtime_context().worker.core_worker.resource_ids()
        found = [re.match(r"CPU_group_(\d+)_", name) for name in held]
        return next((int(match[1]) for match in found if match), None)

    groups = [g for g in placement_group_table().values() if g["state"] != "REMOVED"]
    before = trainer.apply_all_workers(bundle_of_process)
    metrics = trainer.train()
    chaos.kill(trainer, 1)
    trainer.train()
    # the replacement worker joins at the start of a call
    wait_until(lambda: trainer.num_workers == 2 or not trainer.validate(num_steps=1), timeout_s=60)
    return {
        **metrics,
        "bundles": [list(group["bundles"].values()) for group in groups],
        "strategies": [group["strategy"] for group in groups],
        "own": bundle_of_process(),
        "before": before,
        "after": trainer.apply_all_workers(bundle_of_process),
        "lost": [event.kind for event in trainer.events].count("lost"),
        "seen_by_operator": trainer.apply_all_operators(lambda op: op.config["num_workers"]),
        "num_groups": sum(g["state"] != "REMOVED" for g in placement_group_table().values()),
        "told": info["iteration"],
        "workers": trainer.apply_all_workers(os.getpid),
    }


@needs_runtime_env
@pytest.mark.slow("Tune, a trial's process and those of its workers take seconds to start")
def test_trial_keeps_its_workers_in_the_placement_group_of_tune(ray_cluster, tmp_path):
    trainable = TorchTrainer.as_trainable(
        training_operator_cls=Classifier,
        config=SMALL,
        num_workers=4,  # the config of the trial overrides it
        override_tune_step=lose_a_worker,
    )
    (result,) = fit(
        trainable,
        tmp_path,
        {"num_workers": 2, "num_cpus_per_worker": 1.5},
        2,
        run={"callbacks": [killer := Killer(1)]},
    )
    metrics = result.metrics
    assert metrics["strategies"] == ["PACK"]
    assert metrics["bundles"] == [[{"CPU": 1.5}, {"CPU": 1.5}]]
    assert metrics["own"] is None
    assert sorted(metrics["before"]) == sorted(metrics["after"]) == [0, 1]
    assert metrics["lost"] == 1
    assert metrics["seen_by_operator"] == [2, 2]
    assert metrics["num_groups"] == 1
    assert metrics["num_samples"] == 320
    assert metrics["told"] == 0

    assert "died" in str(result.error)
    assert metrics["pid"] == killer.killed
    assert len(metrics["workers"]) == 2
    wait_until(lambda: all(map(has_ended, metrics["workers"])))


@needs_runtime_env
@pytest.mark.slow("Tune, and the process of the trials, take seconds to start")
def test_asha_stops_a_bad_trial_and_a_killed_trial_resumes(ray_cluster, tmp_path):
    """All trials share a process, which is replaced after the kill."""
    results = fit(
        one_process(),
        tmp_path,
        {"lr": tune.grid_search([0.5, 1e-7, -1])},
        3,
        run={
            "callbacks": [killer := Killer(2)],
            "failure_config": tune.FailureConfig(max_failures=1),
            "checkpoint_config": tune.CheckpointConfig(checkpoint_frequency=1),
        },
        metric="val_loss",
        mode="min",
        scheduler=ASHAScheduler(max_t=3, grace_period=1, reduction_factor=2),
        max_concurrent_trials=1,
        reuse_actors=True,
    )
    good, bad, mistaken = results
    assert (good.error, bad.error) == (None, None)
    assert good.metrics["training_iteration"] == 3
    assert bad.metrics["training_iteration"] == 1
    assert good.metrics["val_accuracy"] > 0.8
    # it resumed from its checkpoint: no epoch is repeated or missing
    assert good.metrics["iterations_since_restore"] < 3
    assert good.metrics["epoch"] == 3
    # the bad trial began from scratch, with its own config
    assert bad.metrics["epoch"] == 1
    rates = [result.metrics["optimizer_lr"] for result in (good, bad)]
    assert rates == pytest.approx([0.5, 1e-7], rel=1e-6)
    assert good.metrics["pid"] == bad.metrics["pid"] != killer.killed
    # an error in a trial is reported as the error of that trial
    assert "Invalid learning rate: -1" in str(mistaken.error)
