"""Losing workers, replacing them, and running out of memory do not change the weights."""

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from raysgd import ElasticConfig, TorchTrainer
from raysgd.testing import chaos
from raysgd.torch.features.averaging import Averaging
from raysgd.utils import BATCH_SIZE
from tests.conftest import IN_SOAK, wait_until
from tests.fidelity import Exact, flat, plain_run
from tests.ledger import wait_if_short

CONFIG = {"num_samples": 203, "num_epochs": 3, "shuffle": True, BATCH_SIZE: 24}
"""Three or four workers can evenly divide neither the samples nor a batch."""


class Fault:
    """Raises MemoryError once, in the part of a step that `where` names."""

    where = None

    @classmethod
    def happen(cls, where):
        if cls.where == where:
            cls.where = None
            raise MemoryError(where)


def exchange(state, bucket):
    Fault.happen("exchange")
    return allreduce_hook(state, bucket)


class Waiting(Exact):
    """An operator so slow in a smaller group that replacements join long before the end.

    `faults` maps (rank, step) to the part of the step that runs out of memory.
    """

    def setup(self, config):
        super().setup(config)
        self.faults = dict(config.get("faults", {}))
        self.unwrapped(self.model).own.register_hook(lambda _: Fault.happen("backward"))
        if isinstance(self.model, DistributedDataParallel):
            self.model.register_comm_hook(None, exchange)
        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(lambda *_: Fault.happen("update"))

    def train_batch(self, batch, batch_info):
        Fault.where = self.faults.pop((self.world_rank, batch_info["global_step"]), Fault.where)
        Fault.happen("forward")
        wait_if_short(self, self.config.get("until_size", 0))
        return super().train_batch(batch, batch_info)


def train_on(trainer):
    """Train the remaining epochs, and step the plateau schedule after each."""
    while trainer.global_step < 27:
        trainer.train()
        react(trainer)


def run_out(trainer, where, rank):
    """Train a step in which a worker runs out of memory."""
    step, num_events = trainer.global_step, len(trainer.events)

    def plan(operator):
        train_state = operator._train_state
        train_state.micro_batching.split = 1
        operator.faults = {(rank, step): where}

    trainer.apply_all_operators(plan)
    trainer.train(num_steps=1)
    happened = [event for event in trainer.events[num_events:] if event.kind == "split"]
    assert [(event.ranks, event.factor) for event in happened] == [((rank,), 2)]
    learnt = trainer.apply_all_operators(all_weights)
    assert all(torch.equal(each, learnt[0]) for each in learnt)


def all_weights(operator):
    assert all(rank != operator.world_rank for rank, _ in operator.faults)
    (averages,) = operator._train_state.feature(Averaging).averages
    return torch.cat([flat(operator.model), *(each.flatten() for each in averages.values())])


def react(trainer):
    loss = trainer.validate()["val_loss"]
    trainer.apply_all_operators(lambda operator: operator.plateau.step(loss))


def check(trainer):
    expected, num_steps = plain_run(CONFIG, CONFIG[BATCH_SIZE], reacts=True)
    assert trainer.global_step == num_steps == 27
    torch.testing.assert_close(flat(trainer.get_model()), expected, rtol=0.0, atol=1e-10)
    schedules = trainer.apply_all_operators(
        lambda operator: [scheduler.last_epoch for scheduler in operator.schedulers]
    )
    assert schedules == [[num_steps, num_steps]] * trainer.num_workers


def go_on_with_others(saved):
    """Resume from a file on three workers, then on one. Lost workers are not replaced."""
    with TorchTrainer(
        training_operator_cls=Waiting,
        config=CONFIG,
        num_workers=3,
        use_local=True,
        scheduler_step_freq="batch",
        elastic=ElasticConfig(grow=False),
    ) as trainer:
        for size in (3, 1):
            for rank in range(size, trainer.num_workers):
                chaos.kill(trainer, rank)
            trainer.load(saved)
            assert (trainer.num_workers, trainer.global_step) == (size, 14)
            train_on(trainer)
            check(trainer)


@pytest.mark.slow("four workers start, and two replacements")
def test_a_run_with_losses_and_growth_learns_what_one_process_does(module_cluster, tmp_path):
    """Four workers shard their optimizers. In a soak, fewer workers resume without sharding."""
    saved = tmp_path / "state.pt"
    with TorchTrainer(
        training_operator_cls=Waiting,
        # out of memory in a step that loses a worker, and while a replacement starts
        config={
            **CONFIG,
            "until_size": 4,
            "faults": {(0, 3): "forward", (1, 6): "backward"},
            "register": {"sharding": "optimizer"},
        },
        num_workers=4,
        scheduler_step_freq="batch",
        elastic=ElasticConfig(resize_cooldown_s=0.0),
    ) as trainer:
        assert trainer.config[BATCH_SIZE] == 24
        faults = [chaos.Fault(rank=1, step=3), chaos.Fault(rank=0, step=23)]
        with chaos.Chaos(trainer, faults) as injected:
            assert trainer.train()["epoch"] == 1
            react(trainer)
            trainer.apply_all_operators(
                lambda o: o._train_state.feature(Averaging).start(0.5, start_epoch=1)
            )
            trainer.train(num_steps=1)
            for rank, where in (
                (0, "forward"),
                (1, "backward"),
                (1, "exchange"),
                (0, "update"),
            ):
                run_out(trainer, where, rank)
            trainer.apply_all_operators(
                lambda o: setattr(o._train_state.feature(Averaging), "averages", None)
            )
            trainer.save(saved)
            train_on(trainer)
            wait_until(lambda: not injected.pending)  # the last one may come after the training
        largest = trainer.apply_all_operators(lambda operator: operator.largest)
        assert max(largest) <= 6
        kinds = [event.kind for event in trainer.events]
        assert kinds.count("lost") == 2
        assert "grown" in kinds
        check(trainer)
    if IN_SOAK:
        go_on_with_others(saved)
