"""Losing and gaining workers without losing a step."""

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from torch.utils.data import DataLoader

from raysgd import ElasticConfig, TorchTrainer
from raysgd.data import Dataset
from raysgd.execution import recruiting
from raysgd.utils import BATCH_SIZE
from tests.conftest import SOON_S, own_memory, wait_until
from tests.distributed.test_exactness import Ids, Ledger, ledger_of
from tests.distributed.test_failures import Faulty, order, reached
from tests.operators import Classifier, replica_hash


class SlowLedger(Ledger):
    """Trains slowly enough for newcomers to arrive within the epoch, or until a file says so."""

    def setup(self, config):
        if config.get("setup_fault") and os.path.exists(config["setup_fault"]):
            os.unlink(config["setup_fault"])
            os._exit(1)
        super().setup(config)

    def train_batch(self, batch, batch_info):
        # waits for the group to be full again before the end of the epoch
        if self.world_size < self.config.get("until_size", 0):
            left = self.config["num_samples"] - self.config["hold_at"]
            if self.global_step >= left // (len(batch) * self.config["until_size"]):
                time.sleep(0.2)
        return super().train_batch(batch, batch_info)


def ledger_trainer(num_workers, num_samples=3000, elastic=None, use_local=False, **config):
    config = {"num_samples": num_samples, "loader_workers": 0, **config}
    if BATCH_SIZE not in config:
        config.setdefault("batch_size", 4)
    return TorchTrainer(
        training_operator_cls=SlowLedger,
        config={"until_size": num_workers, "hold_at": num_samples, **config},
        num_workers=num_workers,
        elastic=elastic,
        use_local=use_local,
    )


def check_ledger(trainer, metrics, num_samples=3000):
    """Each sample was trained on once, but for those that the last step may repeat."""
    ledger = ledger_of(trainer)
    repeats = int((ledger == 2).sum())
    assert int((ledger == 1).sum()) + repeats == num_samples
    assert repeats < trainer.max_workers
    assert metrics["num_samples"] == num_samples
    assert len(set(trainer.apply_all_operators(replica_hash))) == 1


def kinds(trainer):
    return [event.kind for event in trainer.events]


class Killer:
    """Kills workers from a thread while the caller trains."""

    def __init__(self, *plan):
        self._thread = threading.Thread(target=self._run, args=plan)

    def _run(self, *plan):
        for condition, act in plan:
            wait_until(condition, timeout_s=60)
            act()

    def __enter__(self):
        self._thread.start()

    def __exit__(self, *error):
        self._thread.join()


def kill(pid):
    return lambda: os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("num_workers", "loader_workers", "batch"),
    [(2, 0, {}), (2, 2, {}), (3, 0, {BATCH_SIZE: 12}), (4, 2, {BATCH_SIZE: 16})],
)
def test_a_lost_worker_is_replaced_and_no_step_is_lost(
    ray_cluster, num_workers, loader_workers, batch
):
    killed_at = []
    with ledger_trainer(num_workers, loader_workers=loader_workers, **batch) as trainer:
        pids = trainer.apply_all_workers(os.getpid)
        with Killer(
            (lambda: reached(trainer) > 5, lambda: killed_at.append(time.time())),
            (lambda: True, kill(pids[-1])),
        ):
            metrics = trainer.train()
        # the processes of a DataLoader would keep the death a secret for 5 s
        assert trainer.events[1].time - killed_at[0] < 2 * SOON_S
        assert trainer.num_workers == num_workers
        assert set(pids[:-1]) < set(trainer.apply_all_workers(os.getpid))
        check_ledger(trainer, metrics)
        assert kinds(trainer) == ["started", "lost", "resumed", "grown"]
        if BATCH_SIZE in batch:
            assert trainer.config[BATCH_SIZE] == batch[BATCH_SIZE]


def test_two_losses_in_a_row(ray_cluster):
    with ledger_trainer(4) as trainer:
        pids = trainer.apply_all_workers(os.getpid)
        with Killer(
            (lambda: reached(trainer) > 5, kill(pids[0])),
            (lambda: "resumed" in kinds(trainer), kill(pids[2])),
        ):
            metrics = trainer.train()
        assert trainer.num_workers == 4
        check_ledger(trainer, metrics)
        assert kinds(trainer).count("lost") == 2


def test_two_of_four_at_once(ray_cluster):
    with ledger_trainer(4) as trainer:
        pids = trainer.apply_all_workers(os.getpid)

        def kill_both():
            for pid in pids[1:3]:
                os.kill(pid, signal.SIGKILL)

        with Killer((lambda: reached(trainer) > 5, kill_both)):
            metrics = trainer.train()
        assert trainer.num_workers == 4
        check_ledger(trainer, metrics)


def test_a_loss_while_a_newcomer_joins(ray_cluster):
    with ledger_trainer(3) as trainer:
        pids = trainer.apply_all_workers(os.getpid)
        supervisor = trainer._supervisor
        with Killer(
            (lambda: reached(trainer) > 5, kill(pids[2])),
            # the newcomer has been told to join, or is just about to be
            (lambda: bool(supervisor._recruiting.ready()), kill(pids[0])),
        ):
            metrics = trainer.train()
        assert trainer.num_workers == 3
        check_ledger(trainer, metrics)


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_spare_process_takes_the_place_of_a_lost_worker(ray_cluster, monkeypatch, is_ready):
    monkeypatch.setattr(recruiting, "_SETTLED_S", 0.0)
    with ledger_trainer(2) as trainer:
        spares = trainer._supervisor._group.spares
        wait_until(lambda: trainer.train(num_steps=1) and len(spares) == 1)
        ((spare, ready),) = spares._held.values()
        if is_ready:
            ready.result(timeout=60)
        first_step = trainer.global_step
        victim = trainer._supervisor.members[1]
        with Killer((lambda: reached(trainer) > first_step + 5, kill(victim.place.pid))):
            trainer.train(max_retries=1)
        assert spare in trainer._supervisor.members
        assert torch.equal(ledger_of(trainer).clamp(0, 1), torch.ones(3000))
        assert len(set(trainer.apply_all_operators(replica_hash))) == 1
        wait_until(lambda: trainer.train(num_steps=1) and len(spares) == 1)
        ((next_spare, _),) = spares._held.values()
        spare_pid = next_spare.control("place").result(timeout=60).pid
    wait_until(lambda: not psutil.pid_exists(spare_pid))


def test_a_newcomer_that_is_on_its_way_is_waited_for_when_the_backoff_is_over(ray_cluster):
    """It has room, and needs longer for its start than there is to wait for room."""
    elastic = ElasticConfig(initial_s=0.05, max_s=0.05, max_attempts=1, jitter=0.0)
    with TorchTrainer(
        training_operator_cls=Classifier, num_workers=2, min_workers=2, elastic=elastic
    ) as trainer:
        pids = trainer.apply_all_workers(os.getpid)
        os.kill(pids[1], signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(pids[1]))
        assert trainer.train()["num_samples"] == 1003
        assert trainer.num_workers == 2


def test_a_newcomer_that_dies_in_setup_is_tried_again(ray_cluster, tmp_path):
    fault = tmp_path / "fault"
    elastic = ElasticConfig(initial_s=0.1)
    with ledger_trainer(2, elastic=elastic, setup_fault=str(fault)) as trainer:
        pids = trainer.apply_all_workers(os.getpid)

        def break_and_kill():
            fault.touch()
            os.kill(pids[1], signal.SIGKILL)

        with Killer((lambda: reached(trainer) > 5, break_and_kill)):
            metrics = trainer.train(max_retries=1)
        assert trainer.num_workers == 2
        check_ledger(trainer, metrics)
        assert "newcomer_failed" in kinds(trainer)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_when_all_are_lost_training_restarts_from_the_snapshot(ray_cluster, num_workers):
    config = {"batch_size": 10, "num_samples": 600}
    with ledger_trainer(num_workers, elastic=ElasticConfig(), **config) as trainer:
        trainer.train()
        before = ledger_of(trainer)
        assert torch.equal(before.round(), torch.ones(600))
        trainer.train(num_steps=2)  # the epoch has begun: its snapshot is on the way
        wait_until(lambda: snapshot_step(trainer) == 600 // (10 * num_workers))
        pids = trainer.apply_all_workers(os.getpid)

        def kill_all():
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

        kill_all()
        metrics = trainer.train()
        assert "restarted" in kinds(trainer)
        assert metrics["epoch"] == 2
        assert torch.equal(ledger_of(trainer), torch.full((600,), 2.0))
        assert trainer.num_workers == num_workers


def snapshot_step(trainer):
    state = trainer._supervisor.snapshots.state()
    return None if state is None else state["global_step"]


def test_snapshots_every_few_steps_bound_what_is_redone(ray_cluster):
    elastic = ElasticConfig(snapshot_every=5)
    with ledger_trainer(2, elastic=elastic, num_samples=400, batch_size=4) as trainer:
        trainer.train(num_steps=13)
        wait_until(lambda: snapshot_step(trainer) == 10)
        for pid in trainer.apply_all_workers(os.getpid):
            os.kill(pid, signal.SIGKILL)
        metrics = trainer.train()
        assert metrics["epoch"] == 1
        assert torch.equal(ledger_of(trainer), torch.ones(400))


@pytest.mark.parametrize("use_local", [False, True])
def test_without_in_place_all_restart(ray_cluster, use_local):
    elastic = ElasticConfig(in_place=False, snapshot_every=5)
    with ledger_trainer(2, elastic=elastic, use_local=use_local, num_samples=400) as trainer:
        trainer.train(num_steps=13)
        wait_until(lambda: snapshot_step(trainer) == 10)
        pids = trainer.apply_all_workers(os.getpid)
        os.kill(pids[1], signal.SIGKILL)
        trainer.train()
        assert set(pids) & set(trainer.apply_all_workers(os.getpid)) <= {os.getpid()}
        assert torch.equal(ledger_of(trainer), torch.ones(400))
        assert [e.step for e in trainer.events if e.kind == "restarted"] == [10]


def test_the_group_grows_into_room_that_appears_and_spends_no_retry(ray_cluster):
    taken = placement_group([{"CPU": 1}])
    assert taken.wait(10)
    elastic = ElasticConfig(resize_cooldown_s=0.0)
    with ledger_trainer(4, elastic=elastic) as trainer:
        assert trainer.num_workers == 3
        with Killer((lambda: reached(trainer) > 5, lambda: remove_placement_group(taken))):
            metrics = trainer.train(max_retries=0)
        assert trainer.num_workers == 4
        check_ledger(trainer, metrics)
        grown = [event for event in trainer.events if event.kind == "grown"]
        assert [len(event.ranks) for event in grown] == [1]


class DerivedBatchSize(SlowLedger):
    """Validates with twice the share, which is no batch size that follows the share."""

    def setup(self, config):
        super().setup(config)
        data = Ids(config["num_samples"])
        self.register_data(validation_loader=DataLoader(data, batch_size=2 * config[BATCH_SIZE]))
        self.validated = []

    def validate_batch(self, batch, batch_info):
        self.validated += batch.tolist()
        return {"num_samples": len(batch)}


def test_the_group_grows_where_a_batch_size_is_derived_from_the_share(ray_cluster):
    taken = placement_group([{"CPU": 2}])
    assert taken.wait(10)
    num_samples = 3000
    with TorchTrainer(
        training_operator_cls=DerivedBatchSize,
        config={
            "num_samples": num_samples,
            "loader_workers": 0,
            "until_size": 4,
            "hold_at": num_samples,
            BATCH_SIZE: 12,
        },
        num_workers=4,
        elastic=ElasticConfig(resize_cooldown_s=0.0),
    ) as trainer:
        assert trainer.num_workers == 2
        with Killer((lambda: reached(trainer) > 5, lambda: remove_placement_group(taken))):
            metrics = trainer.train(max_retries=0)
        check_ledger(trainer, metrics, num_samples)
        kept = trainer.apply_all_operators(lambda operator: operator._parts.batching())
        # of shares of 6, 4 and 3 in setup
        assert kept == [{"train": (3, True), "validation": (12, False)}] * 4
        assert trainer.validate()["num_samples"] == num_samples
        validated = trainer.apply_all_operators(lambda operator: operator.validated)
        assert sorted(itertools.chain(*validated)) == list(range(num_samples))


def test_a_newcomer_goes_on_in_the_data_set_of_the_call(ray_cluster):
    dataset = Dataset(range(400), batch_size=4)
    with ledger_trainer(2, num_samples=400, elastic=ElasticConfig(min_workers=2)) as trainer:
        trainer.train(num_steps=10, dataset=dataset)
        os.kill(trainer.apply_all_workers(os.getpid)[1], signal.SIGKILL)
        trainer.train(num_steps=20, dataset=dataset)
        assert torch.equal(ledger_of(trainer), (torch.arange(400) < 30 * 8).float())
        assert trainer.train(dataset=dataset)["epoch"] == 1
        assert torch.equal(ledger_of(trainer), torch.ones(400))


class Counting:
    """Draws from random numbers of its own, alike on all workers that were there at the start."""

    def __init__(self, size):
        self.size = size
        self.hidden = torch.Generator().manual_seed(0)

    def __len__(self):
        return self.size

    def __iter__(self):
        return iter(torch.randperm(self.size, generator=self.hidden).tolist())


class OwnOrder(Ledger):
    def setup(self, config):
        super().setup(config)
        data = Ids(config["num_samples"])
        sampler = Counting(len(data))
        self.register_data(train_loader=DataLoader(data, batch_size=4, sampler=sampler))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_newcomer_takes_the_order_of_the_others(ray_cluster, victim):
    with TorchTrainer(
        training_operator_cls=OwnOrder,
        config={"num_samples": 48, "batch_size": 4, "loader_workers": 0},
        num_workers=2,
        min_workers=2,
    ) as trainer:
        trainer.train()
        trainer.train(num_steps=2)
        os.kill(trainer.apply_all_workers(os.getpid)[victim], signal.SIGKILL)
        trainer.train()
        assert ledger_of(trainer).tolist() == [2] * 48
        trainer.train()
        assert ledger_of(trainer).tolist() == [3] * 48


def test_the_second_worker_takes_the_order_of_the_first(ray_cluster):
    taken = placement_group([{"CPU": 3}])
    assert taken.wait(10)
    with TorchTrainer(
        training_operator_cls=OwnOrder,
        config={"num_samples": 48, "batch_size": 4, "loader_workers": 0},
        num_workers=2,
        elastic=ElasticConfig(resize_cooldown_s=0.0),
    ) as trainer:
        assert trainer.num_workers == 1
        trainer.train()
        trainer.train(num_steps=1)
        remove_placement_group(taken)
        wait_until(lambda: trainer.apply_all_workers(os.getpid) and trainer.num_workers == 2)
        trainer.train()
        assert ledger_of(trainer).tolist() == [2] * 48


class OwnGenerator(Ledger):
    """Shuffles by a generator that is seeded differently on workers that come later."""

    def setup(self, config):
        super().setup(config)
        data = Ids(config["num_samples"])
        generator = torch.Generator().manual_seed(int(os.path.exists(config["later"])))
        self.register_data(
            train_loader=DataLoader(data, batch_size=4, shuffle=True, generator=generator)
        )


def test_a_newcomer_shuffles_by_the_seed_of_the_others(ray_cluster, tmp_path):
    later = tmp_path / "later"
    config = {"num_samples": 48, "batch_size": 4, "loader_workers": 0, "later": str(later)}
    with TorchTrainer(
        training_operator_cls=OwnGenerator, config=config, num_workers=2, min_workers=2
    ) as trainer:
        trainer.train(num_steps=2)
        later.touch()
        os.kill(trainer.apply_all_workers(os.getpid)[0], signal.SIGKILL)
        for epoch in (1, 2):
            trainer.train()
            assert ledger_of(trainer).tolist() == [epoch] * 48


def test_momentum_schedulers_buffers_and_own_state_survive_on_a_newcomer(ray_cluster, tmp_path):
    with TorchTrainer(
        training_operator_cls=Rich,
        config={"folder": str(tmp_path)},
        num_workers=2,
        scheduler_step_freq="batch",
    ) as trainer:
        trainer.train(num_steps=3)
        os.kill(trainer.apply_all_workers(os.getpid)[0], signal.SIGKILL)
        trainer.train(num_steps=3)
        wait_until(lambda: trainer.train(num_steps=1) and trainer.num_workers == 2)
        states = trainer.apply_all_operators(
            lambda op: (op.scheduler.state_dict(), op.optimizer.state_dict()["state"][0]["step"])
        )
        assert states[0] == states[1]
        assert states[0][0]["last_epoch"] == trainer.global_step
        assert len(set(trainer.apply_all_operators(replica_hash))) == 1
        # what one operator had counted is on the newcomer as well
        assert len(set(trainer.apply_all_operators(lambda op: op.seen))) == 1


class Rich(Classifier):
    def setup(self, config):
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 2)
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        self.seen = 0
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=model,
            optimizers=optimizer,
            criterion=torch.nn.CrossEntropyLoss(),
            schedulers=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999),
        )

        from tests.operators import make_data

        self.register_data(train_loader=DataLoader(make_data(), batch_size=8, shuffle=True))

    def train_batch(self, batch, batch_info):
        self.seen += 1
        return super().train_batch(batch, batch_info)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class CountsLoads(Rich):
    def setup(self, config):
        super().setup(config)
        self.loads = 0
        self.optimizer.register_load_state_dict_post_hook(self.count_load)

    def count_load(self, optimizer):
        self.loads += 1


def come_apart(operator):
    if operator.world_rank == 1:
        with torch.no_grad():
            operator.model.module[2].bias[1] += 2**-20


def fail(operator):
    raise ValueError("on purpose")


def test_survivors_get_the_leaders_state_only_where_they_have_another(ray_cluster):
    with TorchTrainer(
        training_operator_cls=CountsLoads,
        num_workers=3,
        scheduler_step_freq="batch",
        elastic=ElasticConfig(grow=False),
    ) as trainer:

        def loads():
            trainer.train(num_steps=2)
            # statistics of batch normalization are each rank's own until the end of a call
            assert len(set(trainer.apply_all_operators(replica_hash))) == 1
            return trainer.apply_all_operators(lambda operator: operator.loads)

        assert loads() == [0, 0, 0]
        os.kill(trainer.apply_all_workers(os.getpid)[2], signal.SIGKILL)
        assert loads() == [0, 0]
        trainer.apply_all_operators(come_apart)
        with pytest.raises(ValueError, match="on purpose"):  # the next call makes a new generation
            trainer.apply_all_operators(fail)
        assert loads() == [0, 1]


class Twofold(Faulty):
    """Trains two models one after the other."""

    def register(self, *, models, optimizers, criterion):
        second = torch.nn.Linear(8, 2)
        adam = torch.optim.Adam(second.parameters())
        (model, self.second), (optimizer, self.adam), criterion = super().register(
            models=[models, second], optimizers=[optimizers, adam], criterion=criterion
        )
        return model, optimizer, criterion

    def train_batch(self, batch, batch_info):
        features, target = batch
        for model, optimizer in ((self.second, self.adam), (self.model, self.optimizer)):
            loss = self.criterion(model(features), target)
            self.backward(loss)
            self.optimizer_step(optimizer)
            self.maybe("between")
        return {"train_loss": loss.detach(), "num_samples": len(target)}


@pytest.mark.parametrize(("operator_cls", "when"), [(Faulty, "train"), (Twofold, "between")])
def test_a_run_with_a_loss_that_is_refilled_ends_with_the_bits_of_one_without(
    ray_cluster, tmp_path, operator_cls, when
):
    hashes = []
    for fail in (False, True):
        with TorchTrainer(
            training_operator_cls=operator_cls,
            config={"folder": str(tmp_path), "batch_norm": True, "momentum": 0.9},
            num_workers=2,
            min_workers=2,  # so that no step is taken before the place is filled
        ) as trainer:
            if fail:
                order(tmp_path, when, 1, 7, "die")
            trainer.train()
            assert kinds(trainer).count("lost") == int(fail)
            hashes += trainer.apply_all_operators(replica_hash)
    assert len(set(hashes)) == 1


def test_a_worker_that_hangs_is_named_killed_and_replaced(ray_cluster, caplog):
    with ledger_trainer(3, elastic=ElasticConfig(hang_timeout_s=4.0)) as trainer:
        pids = trainer.apply_all_workers(os.getpid)
        with Killer(
            (lambda: reached(trainer) > 5, lambda: os.kill(pids[1], signal.SIGSTOP)),
        ):
            metrics = trainer.train()
        check_ledger(trainer, metrics)
        hung = [event for event in trainer.events if event.kind == "hung"]
        assert [event.ranks for event in hung] == [(1,)]
        assert "train_batch" in caplog.text  # the stacks of the others
        assert "Killing worker 1" in caplog.text


@pytest.mark.timeout(600)
def test_a_long_run_with_many_kills(ray_cluster):
    """Fifty kills of random workers: nothing is lost, repeated or left behind."""
    rng = random.Random(5)
    driver = psutil.Process()
    with ledger_trainer(3, num_samples=40_000, hold_at=40_000) as trainer:
        stop = threading.Event()
        kills, memory, sockets = [], [], []

        def kill_at_random():
            while len(kills) < 50 and not stop.is_set():
                wait_until(lambda: len(trainer._supervisor.members) >= 2 or stop.is_set(), 300)
                members = list(trainer._supervisor.members)
                if len(members) < 2:
                    continue
                victim = rng.choice(members)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim.place.pid, signal.SIGKILL)
                    kills.append(victim.place.pid)
                memory.append(own_memory())
                sockets.append(len(driver.net_connections()))
                wait_until(
                    lambda v=victim: v not in trainer._supervisor.members or stop.is_set(), 300
                )

        killer = threading.Thread(target=kill_at_random)
        killer.start()
        try:
            metrics = trainer.train(max_retries=1000)
        finally:
            stop.set()
            killer.join()
        assert len(kills) == 50
        check_ledger(trainer, metrics, 40_000)
        assert max(memory) - memory[5] < 100 * 2**20, memory
        assert max(sockets[10:]) <= max(sockets[:10]) + 20, sockets


NODES = """
import json, logging, sys, time
from ray.cluster_utils import Cluster
import ray
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
ray.init(address=cluster.address, log_to_driver=False)

from raysgd import ElasticConfig, TorchTrainer
from raysgd.execution import recruiting
from raysgd.errors import WorkerLostError
from tests.operators import Classifier, replica_hash

logging.basicConfig(level=logging.WARNING)
JOINED = ("started", "grown")
elastic = ElasticConfig(initial_s=0.5, max_s=1.0, max_attempts=4, jitter=0.0)
with TorchTrainer(
    training_operator_cls=Classifier, num_workers=2, min_workers=2, elastic=elastic
) as trainer:
    trainer.train(num_steps=3)
    node = trainer.events[0].nodes[1]
    cluster.remove_node(next(n for n in nodes if n.node_id == node))
    try:
        trainer.train()
    except WorkerLostError as error:
        print(json.dumps({"error": str(error)}), flush=True)
    waits = [event.seconds for event in trainer.events if event.kind == "waiting"]
    state = trainer.state_dict()
    print(json.dumps({"waits": waits, "step": state["global_step"]}), flush=True)
    cluster.add_node(num_cpus=1)
    metrics = trainer.train()
    result = {
        "samples": metrics["num_samples"],
        "workers": trainer.num_workers,
        "equal": len(set(trainer.apply_all_operators(replica_hash))),
        "nodes": len({n for e in trainer.events for n in e.nodes if e.kind in JOINED}),
    }
    print(json.dumps(result), flush=True)

from raysgd import train
from raysgd.train import Trainer
from raysgd.train.backend import BackendConfig

def function():
    step = begun = (train.load_checkpoint() or {"step": 0})["step"]
    while True:
        step += 1
        train.report(step=step, size=train.world_size(), begun=begun)
        train.save_checkpoint(step=step)

elastic = ElasticConfig(initial_s=0.5, max_s=1.0, resize_cooldown_s=0.0)
trainer = Trainer(BackendConfig(), (1, 2), logdir=sys.argv[1], max_retries=1, elastic=elastic)
trainer.start()
lives, saved = [], 0
for reports in trainer.run_iterator(
    function, checkpoint_strategy=train.CheckpointStrategy(num_to_keep=0)
):
    now = reports[0]
    if not lives or lives[-1]["size"] != now["size"]:
        lives.append({**now, "saved": saved})
    saved = (trainer.latest_checkpoint or {"step": 0})["step"]
    if len(lives) == 1 and now["step"] == 5:
        node = trainer.events[0].nodes[1]
        cluster.remove_node(next(n for n in cluster.list_all_nodes() if n.node_id == node))
    elif len(lives) == 2 and now["step"] == lives[1]["step"] + 5:
        cluster.add_node(num_cpus=1)
    elif len(lives) == 3:
        break
kinds = [event.kind for event in trainer.events if event.kind != "waiting"]
print(json.dumps({"lives": lives, "kinds": kinds}), flush=True)
trainer.shutdown()
ray.shutdown()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def on_nodes(tmp_path_factory):
    """What an operator and a function have been through on nodes that go and come."""
    run = subprocess.run(
        [sys.executable, "-c", NODES, str(tmp_path_factory.mktemp("runs"))],
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 4, run.stderr
    return run, lines


def test_a_node_that_goes_is_waited_for_and_one_that_comes_is_used(on_nodes):
    run, lines = on_nodes
    assert "Training run failed: 1 left, and min_workers=2" in lines[0]["error"]
    assert "the cluster has 1 CPU, of which 0 CPU are free" in lines[0]["error"]
    # doubled, capped, and each one logged
    assert lines[1] == {"waits": [0.5, 1.0, 1.0, 1.0], "step": 3}
    assert run.stderr.count("Too few workers") >= 4
    assert lines[2] == {"samples": 1003 - 3 * 64, "workers": 2, "equal": 1, "nodes": 3}


def test_a_function_goes_on_with_fewer_when_a_node_goes_and_with_more_when_one_comes(on_nodes):
    _, (*_, found) = on_nodes
    first, alone, again = found["lives"]
    assert [life["size"] for life in found["lives"]] == [2, 1, 2]
    assert first["begun"] == 0
    # from the newest checkpoint; one may have been saved after the last report
    assert alone["saved"] <= alone["begun"] <= alone["saved"] + 1
    assert alone["begun"] >= 4
    assert again["begun"] == again["step"] - 1 == again["saved"] + 1
    assert found["kinds"] == ["started", "lost", "restarted", "grown"]
