"""What happens when user code raises, workers die, or the driver is interrupted."""

import shutil
import time

import psutil
import pytest
import torch

from raysgd import ElasticConfig
from raysgd.callbacks import Callback
from raysgd.cluster import worker_handle
from raysgd.elastic import group_rpc
from raysgd.errors import CheckpointError, RemoteTraceback, WorkerLostError
from raysgd.testing import chaos
from raysgd.testing.chaos import Chaos, Fault
from raysgd.utils import BATCH_SIZE
from tests.conftest import IN_SOAK, SOON_S, has_ended, wait_until
from tests.ends import by_signal, by_timer, check_that_shutdown_ends, hold
from tests.faulty import check_epoch, faulty_trainer, fingerprints, interrupted_when, order, pids_of
from tests.ledger import SlowLedger, ledger_of, ledger_trainer
from tests.operators import NUM_SAMPLES
from tests.shared import Shared

ROW_SIZE = 25_000_000 if IN_SOAK else 300_000
"""Elements of a row of `Bulky`: 1.5 GB or 18 MB in all. From 17 MB on, Ray does not carry it."""


@pytest.fixture(scope="module")
def module_workers(module_cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("orders")
    with faulty_trainer(folder, 3) as trainer:
        yield Shared(trainer, folder)


def test_user_exceptions_reach_the_caller_and_change_no_result(fresh, monkeypatch):
    monkeypatch.setattr(group_rpc, "_NODE_LOSS_S", 2 * SOON_S)
    trainer = fresh.trainer
    trainer.train()
    check_epoch(trainer)
    expected = fingerprints(trainer)
    trainer.load_state_dict(fresh.start)
    pids = pids_of(trainer)
    for rank, step in enumerate((2, 5, 6)):
        order(fresh.folder, "train", rank, step, "raise")
        started = time.monotonic()
        with pytest.raises(KeyError, match="a mistake of the user") as caught:
            trainer.train()
        assert time.monotonic() - started < SOON_S
        assert isinstance(caught.value.__cause__, RemoteTraceback)
        assert f"worker {rank} " in str(caught.value.__cause__)
        assert "faulty.py" in str(caught.value.__cause__)
        # every worker is alive, and the state is that of the last committed step
        assert pids_of(trainer) == pids
        assert trainer.global_step == step
    trainer.train()
    assert fingerprints(trainer) == expected
    assert fresh.kinds.count("user_error") == 3


def test_a_straggler_does_not_keep_the_exception_from_the_caller(fresh):
    order(fresh.folder, "train", 0, 3, "wait")
    order(fresh.folder, "train", 2, 3, "raise")
    with pytest.raises(KeyError):
        fresh.trainer.train()
    (fresh.folder / "go").touch()
    fresh.trainer.train()
    check_epoch(fresh.trainer)


def interrupt_validation(trainer, folder, num_workers):
    """Interrupt a validation. It has no collectives, so it stops before the next batch."""
    trainer.train(num_steps=3)
    trainer.validate(num_steps=2)
    order(folder, "validate", 0, 3, "wait for the interruption")
    before = trainer.apply_all_operators(lambda operator: operator.num_validated)[0]
    with interrupted_when((folder / "waiting").exists), pytest.raises(KeyboardInterrupt):
        trainer.validate()
    after = trainer.apply_all_operators(lambda operator: operator.num_validated)[0]
    assert after == before + 1  # the rest is not validated
    assert trainer.validate()["num_samples"] == NUM_SAMPLES - 2 * 32 * num_workers
    assert trainer.global_step == 3
    (folder / "waiting").unlink()


def interrupt_training(trainer, folder, num_workers):
    """Interrupt a step. It is discarded or finished, and no other step is lost."""
    order(folder, "train", num_workers - 1, 5, "wait for the interruption")
    with interrupted_when((folder / "waiting").exists), pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    assert trainer.global_step == -(-NUM_SAMPLES // (32 * num_workers))
    check_epoch(trainer)


def test_ctrl_c_leaves_a_usable_trainer(fresh):
    pids = pids_of(fresh.trainer)
    interrupt_validation(fresh.trainer, fresh.folder, 3)
    interrupt_training(fresh.trainer, fresh.folder, 3)
    assert pids_of(fresh.trainer) == pids


def test_the_first_worker_is_killed_and_no_step_is_lost(fresh):
    trainer = fresh.trainer
    pids = pids_of(trainer)
    order(fresh.folder, "train", 0, 3, "die")
    trainer.train()
    assert set(pids[1:]) <= set(pids_of(trainer))  # survivors keep their processes
    check_epoch(trainer)
    lost = [event for event in fresh.events if event.kind == "lost"]
    assert [event.ranks for event in lost] == [(0,)]
    assert trainer.validate()["num_samples"] == NUM_SAMPLES


@pytest.mark.ends_shared
def test_training_is_ended_by_a_shutdown_in_a_signal_handler(fresh):
    order(fresh.folder, "train", 1, 3, "wait")
    is_waiting = (fresh.folder / "waiting").exists
    check_that_shutdown_ends(fresh.trainer.train, fresh.trainer, by_signal, is_waiting, 3)


def test_a_single_worker_survives_ctrl_c_but_no_loss_without_a_snapshot(module_cluster, tmp_path):
    elastic = ElasticConfig(snapshot_every=None)
    with faulty_trainer(tmp_path, 1, elastic=elastic) as trainer:
        path = trainer.save(tmp_path / "state.pt")
        trainer.load_state_dict(trainer.state_dict())
        interrupt_validation(trainer, tmp_path, 1)
        interrupt_training(trainer, tmp_path, 1)
        order(tmp_path, "train", 0, trainer.global_step + 1, "die")
        with pytest.raises(WorkerLostError, match=r"all workers are lost(.|\n)*worker 0"):
            trainer.train()
        # the state that was loaded is older than `global_step`
        step, late = trainer.global_step, tmp_path / "late.pt"
        for name, call in (("train", trainer.train), ("save", lambda: trainer.save(late))):
            message = rf"{name}\(\) failed: all workers are lost.*trainer\.load\(path\)"
            with pytest.raises(WorkerLostError, match=message):
                call()
            assert trainer.global_step == step
        trainer.load(path)
        assert trainer.global_step == 0
        trainer.train()
        check_epoch(trainer)


@pytest.mark.slow("two workers start twice")
def test_a_file_can_be_loaded_after_the_snapshot_of_lost_workers_is_damaged(
    module_cluster, tmp_path, monkeypatch
):
    """A fault ends one process, and the other is on another node than the driver."""
    with ledger_trainer(2, num_samples=80) as trainer:
        path = trainer.save(tmp_path / "good.pt")
        trainer.load(shutil.copy(path, tmp_path / "damaged.pt"))  # the driver keeps it open
        pids, faults = pids_of(trainer), [Fault(rank=1, step=0), Fault(rank=0, step=10**9)]
        with Chaos(trainer, faults) as injected:
            wait_until(lambda: not psutil.pid_exists(pids[1]))
        assert [(i.fault, i.pid) for i in injected.injected] == [(faults[0], pids[1])]
        assert injected.pending == faults[1:]
        with pytest.raises(ProcessLookupError, match=f"worker 1 .pid {pids[1]}. has ended"):
            chaos.kill(trainer, 1)
        assert not has_ended(pids[0])
        monkeypatch.setattr(worker_handle, "_is_here", lambda info: False)
        assert chaos.kill(trainer, 0) == pids[0]
        wait_until(lambda: has_ended(pids[0]))
        monkeypatch.undo()
        with open(tmp_path / "damaged.pt", "r+b") as file:
            file.write(bytes(1 << 10))
        with pytest.raises(CheckpointError, match=r"damaged.*trainer\.load\(path\)"):
            trainer.train()
        trainer.load(path)
        trainer.train()
        assert torch.equal(ledger_of(trainer), torch.ones(80))


class Bulky(SlowLedger):
    """A ledger with a large state. Most of it is not trained, and is empty after `setup`."""

    def setup(self, config):
        super().setup(config)
        bulk = torch.nn.Parameter(torch.zeros(15, ROW_SIZE), requires_grad=False)
        self.model.register_parameter("bulk", bulk)

    def fill(self):
        for row, values in enumerate(self.model.bulk):
            values.fill_(row + 1)

    def rows(self):
        return [values.unique().tolist() for values in self.model.bulk]


@pytest.mark.slow("all workers start three times")
def test_steps_lost_with_all_workers_run_again_before_any_call(module_cluster, tmp_path):
    elastic = ElasticConfig(snapshot_every=5)
    config = {"num_samples": 400, BATCH_SIZE: 8}
    with ledger_trainer(2, elastic=elastic, operator_cls=Bulky, **config) as trainer:
        trainer.apply_all_operators(Bulky.fill)
        trainer.train(num_steps=13)
        wait_until(lambda: snapshot_step(trainer) == 10)
        pids, points = pids_of(trainer), []

        class Killing(Callback):
            def next_pause(self, global_step):
                return next((step for step in (18, 27) if step > global_step), None)

            def on_pause(self, trainer):
                wait_until(lambda: snapshot_step(trainer) == trainer.global_step // 5 * 5)
                for rank in range(2):
                    chaos.kill(trainer, rank)

            def on_log(self, trainer, call, metrics):
                points.append((trainer.global_step, metrics["num_samples"]))

        with pytest.raises(WorkerLostError):
            trainer.fit(1, None, callbacks=[Killing()], log_every=9, max_retries=0)
        # any call repeats the lost steps, not only train()
        assert trainer.state_dict()["global_step"] == 18
        trainer.fit(1, None, callbacks=[Killing()], log_every=9)
        # repeated steps are logged only once, and none is left out
        assert points == [(18, 5 * 8), (27, 9 * 8), (36, 9 * 8), (45, 9 * 8)]
        assert not set(pids) & set(pids_of(trainer))
        assert torch.equal(ledger_of(trainer), torch.ones(400))
        rows = [[row] for row in range(1, 16)]
        assert trainer.apply_all_operators(Bulky.rows) == [rows, rows]
        assert {e.step for e in trainer.events if e.kind == "restarted"} == {15, 25}


@pytest.mark.slow("a worker starts")
def test_shutdown_ends_a_call_of_the_drivers_own_worker(module_cluster, tmp_path):
    with ledger_trainer(2, num_samples=400, use_local=True) as trainer:
        trainer.apply_all_operators(hold("train_batch", tmp_path / "held", seconds=0.1))
        is_held = (tmp_path / "held").exists
        check_that_shutdown_ends(trainer.train, trainer, by_timer, is_held, 1)


def snapshot_step(trainer):
    state = trainer._controller.snapshots.load()
    return None if state is None else state["global_step"]
