"""Training continues with fewer workers, and a shutdown ends what runs."""

import time

import psutil
import pytest

from raysgd import ElasticConfig, train
from raysgd.train import Trainer, TrainingCallback
from raysgd.train.backend import BackendConfig
from tests.conftest import wait_until
from tests.ends import LONG_S, by_coroutine, by_signal, check_that_shutdown_ends
from tests.faulty import check_epoch, faulty_trainer, order, pids_of
from tests.operators import NUM_SAMPLES


@pytest.mark.slow("three workers start, and are lost one by one")
def test_training_continues_without_replacements(ray_cluster, tmp_path):
    with faulty_trainer(tmp_path, 3, elastic=ElasticConfig(replace_workers=False)) as trainer:
        start = trainer.state_dict()
        trainer.apply_all_operators(lambda op: setattr(op, "tokens_per_sample", 10))
        order(tmp_path, "train", 1, 3, "die")
        # the metrics of three steps are lost with the worker
        assert trainer.train()["num_samples"] == (NUM_SAMPLES - 3 * 32) * 10
        check_epoch(trainer)
        assert trainer.num_workers == 2

        trainer.load_state_dict(start)
        trainer.train(num_steps=2)
        trainer.validate(num_steps=2)
        order(tmp_path, "validate", 1, 2, "die")
        # the remaining one validates as many samples per step, from the same offset
        assert trainer.validate(num_steps=3)["num_samples"] == 3 * 3 * 32
        assert trainer.num_workers == 1
        assert trainer.validate()["num_samples"] == NUM_SAMPLES - (2 + 3) * 3 * 32
        pids = pids_of(trainer)
        trainer.shutdown()
        assert ray_cluster.available_resources()["CPU"] == 4
        wait_until(lambda: not any(map(psutil.pid_exists, pids)))


@pytest.mark.slow("a worker starts three times")
def test_a_start_and_runs_of_functions_are_ended_by_a_shutdown(ray_cluster, tmp_path):
    trainer, mark = Trainer(BackendConfig(), logdir=tmp_path), tmp_path / "waiting"

    def wait():
        mark.touch()
        time.sleep(LONG_S)

    def function():
        train.report(n=1)
        wait()

    def by_callback(run, shut_down, is_time):
        class Ending(TrainingCallback):
            def handle_result(self, results, **info):
                wait_until(is_time)
                shut_down()

        run([Ending()])

    def start():
        trainer.start(wait)

    def run(callbacks=()):
        trainer.run(function, callbacks=callbacks)

    check_that_shutdown_ends(start, trainer, by_signal, mark.exists, 0)
    for source in (by_coroutine, by_callback):
        mark.unlink()
        trainer.start()
        check_that_shutdown_ends(run, trainer, source, mark.exists, 1)
