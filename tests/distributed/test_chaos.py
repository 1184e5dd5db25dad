"""Faults that users inject."""

import os
import threading

import psutil
import pytest

from raysgd import ElasticConfig, TorchTrainer
from raysgd.execution import members
from raysgd.testing import chaos
from raysgd.testing.chaos import Chaos, Fault
from tests.conftest import wait_until
from tests.distributed.test_elastic import check_ledger, kinds, ledger_trainer
from tests.operators import Classifier


def ended(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def stopped(pid):
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


@pytest.mark.parametrize("by_a_task", [False, True])
def test_kill_ends_that_process_and_no_other(ray_cluster, monkeypatch, by_a_task):
    if by_a_task:  # as on every node but the driver's
        monkeypatch.setattr(members, "_is_here", lambda place: False)
    with TorchTrainer(training_operator_cls=Classifier, num_workers=2) as trainer:
        pids = trainer.apply_all_workers(os.getpid)
        assert chaos.kill(trainer, 1) == pids[1]
        wait_until(lambda: ended(pids[1]))
        assert not ended(pids[0])
        assert trainer.train()["num_samples"] == 1003
        assert kinds(trainer)[:2] == ["started", "lost"]


def test_a_process_that_has_ended_cannot_be_hit(ray_cluster):
    with TorchTrainer(training_operator_cls=Classifier, num_workers=2) as trainer:
        pid = chaos.kill(trainer, 0)
        wait_until(lambda: not psutil.pid_exists(pid))
        with pytest.raises(ProcessLookupError, match=f"worker 0 .pid {pid}. has ended"):
            chaos.hang(trainer, 0)


def test_a_worker_that_hangs_goes_on_when_it_is_resumed(ray_cluster):
    with TorchTrainer(training_operator_cls=Classifier, num_workers=2) as trainer:
        pids = trainer.apply_all_workers(os.getpid)
        assert chaos.hang(trainer, 1) == pids[1]
        wait_until(lambda: stopped(pids[1]))
        results = []
        call = threading.Thread(target=lambda: results.append(trainer.train()))
        call.start()
        # the other one has asked for the batch that they train on together
        wait_until(lambda: trainer._supervisor.state.name == "RUNNING")
        assert chaos.resume(trainer, 1) == pids[1]
        call.join()
        assert results[0]["num_samples"] == 1003
        assert kinds(trainer) == ["started"]
        assert trainer.apply_all_workers(os.getpid) == pids


@pytest.mark.parametrize("inject", [chaos.kill, chaos.hang, chaos.resume])
def test_wrong_ranks_are_refused(ray_cluster, inject):
    with TorchTrainer(
        training_operator_cls=Classifier, num_workers=2, use_local=True, use_gpu=False
    ) as trainer:
        for rank in (2, -1):
            with pytest.raises(ValueError, match=f"no worker {rank}: .* has ranks 0 to 1"):
                inject(trainer, rank)
        with pytest.raises(TypeError, match="must be an int"):
            inject(trainer, True)
        with pytest.raises(ValueError, match="Worker 0 lives in the driver's process"):
            inject(trainer, 0)
    with pytest.raises(ValueError, match="has no workers now"):
        inject(trainer, 0)


def test_chaos_injects_each_fault_at_its_step(ray_cluster):
    faults = [Fault(rank=1, step=5), Fault(rank=2, step=40), Fault(rank=0, step=10**9)]
    with ledger_trainer(3) as trainer:
        with Chaos(trainer, faults) as injected:
            metrics = trainer.train()
        assert [i.fault for i in injected.injected] == faults[:2]
        assert all(i.step >= i.fault.step for i in injected.injected)
        assert injected.pending == faults[2:]
        check_ledger(trainer, metrics)
        assert kinds(trainer).count("lost") == 2
        assert not {i.pid for i in injected.injected} & set(trainer.apply_all_workers(os.getpid))


def test_chaos_with_none_to_spare_lets_all_be_lost(ray_cluster):
    with ledger_trainer(2, num_samples=600) as trainer:
        trainer.train(num_steps=1)
        faults = [Fault(rank=rank, after_s=0.0) for rank in (0, 1)]
        with Chaos(trainer, faults, spare=0) as injected:
            wait_until(lambda: not injected.pending)
        metrics = trainer.train()
        assert "restarted" in kinds(trainer)
        check_ledger(trainer, metrics, num_samples=600)


def test_chaos_spares_the_last_worker(ray_cluster):
    faults = [Fault(rank=rank, after_s=0.0) for rank in (0, 1)]
    elastic = ElasticConfig(grow=False)
    with ledger_trainer(2, num_samples=600, elastic=elastic, until_size=1) as trainer:
        with Chaos(trainer, faults) as injected:
            wait_until(lambda: injected.injected)
            metrics = trainer.train()
        assert len(injected.injected) == 1
        assert "restarted" not in kinds(trainer)
        check_ledger(trainer, metrics, num_samples=600)


def test_what_chaos_has_stopped_goes_on_at_the_end_of_the_block(ray_cluster):
    with TorchTrainer(training_operator_cls=Classifier, num_workers=2) as trainer:
        pids = trainer.apply_all_workers(os.getpid)
        with Chaos(trainer, [Fault(rank=1, after_s=0.0, kind="hang")]):
            wait_until(lambda: stopped(pids[1]))
        assert trainer.apply_all_workers(os.getpid) == pids


def test_what_goes_wrong_while_injecting_reaches_the_caller(ray_cluster):
    with (
        TorchTrainer(
            training_operator_cls=Classifier, num_workers=2, use_local=True, use_gpu=False
        ) as trainer,
        pytest.raises(ValueError, match="lives in the driver's process"),
        Chaos(trainer, [Fault(rank=0, after_s=0.0)]) as injected,
    ):
        injected._thread.join()
