"""What happens when user code raises, workers die, or the driver is interrupted."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch

from raysgd import ElasticConfig, TorchTrainer
from raysgd.errors import RemoteTraceback, WorkerLostError
from tests.conftest import wait_until
from tests.distributed.test_exactness import Ledger, ledger_of
from tests.operators import Classifier, parameters, replica_hash


class Faulty(Classifier):
    """Does what a file says, once, on one rank at one step: raise, die, or wait."""

    def setup(self, config):
        super().setup(config)
        self.folder = config["folder"]
        self.num_validated = 0
        if config.get("setup_fault") and self.world_rank == 0:
            self.act(config["setup_fault"])

    def train_batch(self, batch, batch_info):
        self.maybe("train")
        return super().train_batch(batch, batch_info)

    def validate_batch(self, batch, batch_info):
        self.num_validated += 1
        self.maybe("validate")
        return super().validate_batch(batch, batch_info)

    def maybe(self, when):
        order = os.path.join(self.folder, f"{when}-{self.world_rank}-{self.global_step}")
        if os.path.exists(order):
            with open(order) as file:
                what = file.read()
            os.unlink(order)
            self.act(what)

    def act(self, what):
        if what == "raise":
            raise KeyError("a mistake of the user")
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "wait":
            with open(os.path.join(self.folder, "waiting"), "w"):
                pass
            release = os.path.join(self.folder, "go")
            while not os.path.exists(release):
                time.sleep(0.01)


def order(folder, when, rank, step, what):
    (folder / f"{when}-{rank}-{step}").write_text(what)


def make_trainer(folder, num_workers, **config):
    return TorchTrainer(
        training_operator_cls=Faulty,
        config={"folder": str(folder), "batch_norm": True, "momentum": 0.9, **config},
        num_workers=num_workers,
        elastic=ElasticConfig(grow=False),
    )


@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_a_user_exception_on_one_rank_reaches_the_caller_and_spoils_nothing(
    ray_cluster, tmp_path, num_workers
):
    with make_trainer(tmp_path, num_workers) as trainer:
        pids = trainer.apply_all_workers(os.getpid)
        for rank in range(num_workers):
            step = trainer.global_step + 2
            before = trainer.train(num_steps=2) and trainer.apply_all_operators(parameters)[0]
            order(tmp_path, "train", rank, step, "raise")
            started = time.monotonic()
            with pytest.raises(KeyError, match="a mistake of the user") as caught:
                trainer.train()
            assert time.monotonic() - started < 2
            assert isinstance(caught.value.__cause__, RemoteTraceback)
            assert f"worker {rank} " in str(caught.value.__cause__)
            assert "test_failures.py" in str(caught.value.__cause__)
            # every worker is alive, and the state is that of the last committed step
            assert trainer.apply_all_workers(os.getpid) == pids
            assert trainer.global_step == step
            assert torch.equal(trainer.apply_all_operators(parameters)[0], before)
        trainer.train()
        assert len(set(trainer.apply_all_operators(replica_hash))) == 1
        assert [event.kind for event in trainer.events].count("user_error") == num_workers


def test_a_run_with_a_user_exception_ends_as_one_without(ray_cluster, tmp_path):
    hashes = []
    for fail in (False, True):
        with make_trainer(tmp_path, 2) as trainer:
            if fail:
                order(tmp_path, "train", 1, 5, "raise")
                with pytest.raises(KeyError):
                    trainer.train()
            metrics = trainer.train()
            assert metrics["epoch"] == 1
            hashes += trainer.apply_all_operators(replica_hash)
            trainer.validate()
    assert len(set(hashes)) == 1


class Tokens(Faulty):
    """Counts in another unit than samples."""

    def train_batch(self, batch, batch_info):
        return {"num_samples": super().train_batch(batch, batch_info)["num_samples"] * 10}


def test_after_a_loss_the_unit_of_num_samples_is_the_users(ray_cluster, tmp_path):
    order(tmp_path, "train", 1, 3, "die")
    with TorchTrainer(
        training_operator_cls=Tokens,
        config={"folder": str(tmp_path)},
        num_workers=2,
        elastic=ElasticConfig(grow=False),
    ) as trainer:
        # what the lost worker counted in three steps is gone with it
        assert trainer.train()["num_samples"] == (1003 - 3 * 32) * 10


def test_an_exception_in_validation_spoils_nothing(ray_cluster, tmp_path):
    with make_trainer(tmp_path, 2) as trainer:
        trainer.train(num_steps=2)
        expected = trainer.validate()
        order(tmp_path, "validate", 1, 2, "raise")
        with pytest.raises(KeyError):
            trainer.validate()
        assert trainer.validate() == pytest.approx(expected)
        assert trainer.train()["epoch"] == 1


@pytest.mark.parametrize(("num_workers", "victim"), [(2, 0), (3, 2), (4, 1)])
def test_a_killed_worker_loses_no_step(ray_cluster, tmp_path, num_workers, victim):
    with make_trainer(tmp_path, num_workers) as trainer:
        pids = trainer.apply_all_workers(os.getpid)
        order(tmp_path, "train", victim, 3, "die")
        metrics = trainer.train()
        assert trainer.num_workers == num_workers - 1
        # survivors keep their processes
        assert set(trainer.apply_all_workers(os.getpid)) == set(pids) - {pids[victim]}
        assert metrics["num_samples"] == 1003
        assert metrics["epoch"] == 1
        assert len(set(trainer.apply_all_operators(replica_hash))) == 1
        lost = [event for event in trainer.events if event.kind == "lost"]
        assert [event.ranks for event in lost] == [(victim,)]
        assert trainer.validate()["num_samples"] == 1003


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_the_ledger_is_all_ones_after_two_losses(ray_cluster, loader_workers):
    config = {"num_samples": 2000, "batch_size": 5, "loader_workers": loader_workers}
    with TorchTrainer(
        training_operator_cls=Ledger,
        config=config,
        num_workers=4,
        elastic=ElasticConfig(grow=False),
    ) as trainer:
        pids = trainer.apply_all_workers(os.getpid)

        def kill_two():
            for pid, step in ((pids[1], 15), (pids[3], 40)):
                wait_until(lambda step=step: reached(trainer) > step)
                os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill_two)
        killer.start()
        metrics = trainer.train()
        killer.join()
        assert trainer.num_workers == 2
        ledger = ledger_of(trainer)
        assert int((ledger != 1).sum()) == int((ledger == 2).sum()) < 2
        assert metrics["num_samples"] == 2000


def reached(trainer):
    return max((p.global_step for p in trainer._supervisor.ask_progress().values()), default=0)


def test_a_dead_worker_is_an_error_where_no_loss_is_allowed(ray_cluster, tmp_path):
    with make_trainer(tmp_path, 2) as trainer:
        order(tmp_path, "train", 1, 3, "die")
        started = time.monotonic()
        with pytest.raises(WorkerLostError, match="Training run failed") as caught:
            trainer.train(max_retries=0)
        assert time.monotonic() - started < 2
        assert caught.value.rank == 1
        assert "1 loss in one call, which allows 0" in str(caught.value)
        assert caught.value.__cause__ is not None
        # what is left can still be saved, and used
        trainer.save(tmp_path / "rest.pt")
        assert trainer.train()["epoch"] == 1


def test_losing_more_than_min_workers_allow_is_an_error(ray_cluster, tmp_path):
    with TorchTrainer(
        training_operator_cls=Faulty,
        config={"folder": str(tmp_path)},
        num_workers=2,
        min_workers=2,
        elastic=ElasticConfig(grow=False),
    ) as trainer:
        order(tmp_path, "train", 0, 3, "die")
        with pytest.raises(WorkerLostError, match="1 left, and min_workers=2"):
            trainer.train()
        trainer.save(tmp_path / "rest.pt")


def test_losing_all_without_a_snapshot_is_an_error(ray_cluster, tmp_path):
    with TorchTrainer(
        training_operator_cls=Faulty,
        config={"folder": str(tmp_path)},
        elastic=ElasticConfig(snapshot_every=None),
    ) as trainer:
        trainer.train(num_steps=2)
        order(tmp_path, "train", 0, 3, "die")
        with pytest.raises(WorkerLostError, match=r"all workers are lost(.|\n)*worker 0"):
            trainer.train()


def test_a_worker_that_dies_in_setup_is_an_error(ray_cluster, tmp_path):
    with pytest.raises(WorkerLostError, match="worker 0"):
        make_trainer(tmp_path, 2, setup_fault="die")


def test_an_exception_in_setup_on_one_rank_reaches_the_caller(ray_cluster, tmp_path):
    with pytest.raises(KeyError, match="a mistake of the user"):
        make_trainer(tmp_path, 2, setup_fault="raise")


@pytest.mark.parametrize("num_workers", [1, 2])
def test_ctrl_c_in_a_validation_loses_nothing(ray_cluster, tmp_path, num_workers):
    """Nothing communicates there: it is the next batch that finds the request."""
    with make_trainer(tmp_path, num_workers) as trainer:
        pids = trainer.apply_all_workers(os.getpid)
        trainer.train(num_steps=3)
        trainer.validate(num_steps=2)
        order(tmp_path, "validate", 0, 3, "wait")
        before = trainer.apply_all_operators(lambda operator: operator.num_validated)[0]
        with interrupted_when((tmp_path / "waiting").exists), pytest.raises(KeyboardInterrupt):
            trainer.validate()
        (tmp_path / "go").touch()
        after = trainer.apply_all_operators(lambda operator: operator.num_validated)[0]
        assert after == before + 1  # a long one would take a long time to end by itself
        assert trainer.validate()["num_samples"] == 1003 - 2 * 32 * num_workers
        assert trainer.apply_all_workers(os.getpid) == pids
        assert trainer.global_step == 3


def test_a_validation_that_loses_a_worker_is_repeated_from_where_it_began(ray_cluster, tmp_path):
    """Also on the survivor, which may be at its end by then."""
    with make_trainer(tmp_path, 2) as trainer:
        trainer.train(num_steps=2)
        trainer.validate(num_steps=2)
        order(tmp_path, "validate", 1, 2, "die")
        # alone it takes as many steps, of half as many samples, and from the same place on
        assert trainer.validate(num_steps=3)["num_samples"] == 3 * 32
        assert trainer.validate()["num_samples"] == 1003 - (2 * 2 + 3) * 32


@pytest.mark.parametrize("rank", [0, 1])
def test_a_validation_after_one_that_raised_begins_where_that_did(ray_cluster, tmp_path, rank):
    with make_trainer(tmp_path, 2) as trainer:
        trainer.train(num_steps=2)
        trainer.validate(num_steps=2)
        order(tmp_path, "validate", rank, 2, "raise")
        with pytest.raises(KeyError):
            trainer.validate(num_steps=3)
        trainer.train(num_steps=1)
        assert trainer.validate()["num_samples"] == 1003 - 2 * 2 * 32


@contextlib.contextmanager
def interrupted_when(condition):
    """Send this process a Ctrl-C when a condition holds."""

    def interrupt():
        wait_until(condition)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_ctrl_c_leaves_a_usable_trainer(ray_cluster, tmp_path, num_workers):
    with make_trainer(tmp_path, num_workers) as trainer:
        order(tmp_path, "train", num_workers - 1, 3, "wait")
        with interrupted_when((tmp_path / "waiting").exists), pytest.raises(KeyboardInterrupt):
            trainer.train()
        (tmp_path / "go").touch()
        metrics = trainer.train()
        assert metrics["epoch"] == 1
        # the step under way when Ctrl-C came was given up or finished, no other is missing
        assert trainer.global_step == -(-1003 // (32 * num_workers))
        assert len(set(trainer.apply_all_operators(replica_hash))) == 1


def test_a_straggler_does_not_keep_the_exception_from_the_caller(ray_cluster, tmp_path):
    with make_trainer(tmp_path, 3) as trainer:
        order(tmp_path, "train", 0, 3, "wait")
        order(tmp_path, "train", 2, 3, "raise")
        started = time.monotonic()
        with pytest.raises(KeyError):
            trainer.train()
        assert time.monotonic() - started < 2
        (tmp_path / "go").touch()
        assert trainer.train()["epoch"] == 1
        assert len(set(trainer.apply_all_operators(replica_hash))) == 1


def test_a_trainer_that_is_dropped_leaves_no_worker(ray_cluster, tmp_path):
    trainer = make_trainer(tmp_path, 2)
    pids = trainer.apply_all_workers(os.getpid)
    del trainer
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_shutdown_frees_the_resources_before_it_returns(ray_cluster, tmp_path):
    trainer = make_trainer(tmp_path, 4)
    pids = trainer.apply_all_workers(os.getpid)
    trainer.shutdown()
    assert ray_cluster.available_resources()["CPU"] == 4
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    with pytest.raises(RuntimeError, match="shut down"):
        trainer.train()
    trainer.shutdown()


DRIVER = """
import os, signal, sys
from raysgd import ElasticConfig, TorchTrainer
from tests.operators import Classifier

trainer = TorchTrainer(training_operator_cls=Classifier, num_workers=2)
print(*trainer.apply_all_workers(os.getpid), flush=True)
if sys.argv[1] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "raise":
    raise ValueError("the script fails")
"""


@pytest.mark.parametrize("end", ["exit", "raise", "kill"])
def test_a_driver_that_ends_leaves_no_worker(ray_cluster, end):
    address = ray_cluster.get_runtime_context().gcs_address
    run = subprocess.run(
        [sys.executable, "-c", DRIVER, end],
        env={**os.environ, "RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    line = next(ln for ln in run.stdout.splitlines() if ln.replace(" ", "").isdigit())
    pids = [int(pid) for pid in line.split()]
    assert len(pids) == 2
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), timeout_s=10)
