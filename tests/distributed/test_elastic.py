"""Losing and gaining workers without losing a step."""

import psutil
import pytest
import torch

from raysgd import ElasticConfig
from raysgd.callbacks import EMA
from raysgd.testing import chaos
from tests.conftest import wait_until
from tests.faulty import Faulty, check_epoch, faulty_trainer, fingerprints, order
from tests.operators import CountsBatches, fingerprint
from tests.shared import Shared


class Rich(CountsBatches, Faulty):
    """Adds a scheduler and its own state, and counts how often its optimizer loads a state."""

    def register(self, *, models, optimizers, criterion):
        self.seen = self.num_loads = 0
        *registered, self.scheduler = super().register(
            models=models,
            optimizers=optimizers,
            criterion=criterion,
            schedulers=torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.999),
        )
        optimizers[0].register_load_state_dict_post_hook(self.count_load)
        return registered

    def on_world_change(self):
        self.group = torch.distributed.new_group()
        self.worlds = [*getattr(self, "worlds", []), (self.world_rank, self.ranks())]

    def ranks(self):
        """Return the ranks in the process group of the operator."""
        ranks = [None] * self.world_size
        torch.distributed.all_gather_object(ranks, self.world_rank, group=self.group)
        return ranks

    def count_load(self, optimizer):
        self.num_loads += 1


@pytest.fixture
def refilled(module_cluster, tmp_path):
    """Two workers, both required. A replacement takes longer to start than the backoff."""
    elastic = ElasticConfig(backoff_initial_s=0.05, backoff_max_s=0.05, max_start_attempts=1)
    with faulty_trainer(
        tmp_path,
        2,
        Rich,
        min_workers=2,
        elastic=elastic,
        scheduler_step_freq="batch",
        callbacks=[EMA(0.9)],
    ) as trainer:
        yield Shared(trainer, tmp_path)


def schedule_of(trainer):
    return trainer.apply_all_operators(lambda op: op.scheduler.state_dict())


def averages_of(trainer):
    return trainer.apply_all_operators(lambda op: fingerprint(op._update_features.averaging))


@pytest.mark.slow("two workers are lost and replaced, one after the other")
def test_run_with_replaced_workers_is_bitwise_equal_to_one_without_losses(refilled):
    """One worker dies between the updates of two optimizers, another one before a call.

    Rank 0 must not die within a call: the others get its batch norm statistics only at the end.
    """
    trainer = refilled.trainer
    trainer.train()
    check_epoch(trainer)
    expected = fingerprints(trainer), schedule_of(trainer), averages_of(trainer)
    assert len(set(averages_of(trainer))) == 1
    trainer.load_state_dict(refilled.start)
    num_loads = trainer.apply_all_operators(lambda op: op.num_loads)
    order(refilled.folder, "between", 1, 4, "die")
    trainer.train(num_steps=6)
    # a survivor with the current state does not load it again
    assert trainer.apply_all_operators(lambda op: op.num_loads)[0] == num_loads[0]
    pid = chaos.kill(trainer, 0)
    wait_until(lambda: not psutil.pid_exists(pid))
    trainer.train()
    assert refilled.kinds.count("lost") == 2
    assert (fingerprints(trainer), schedule_of(trainer), averages_of(trainer)) == expected
    # all operators have the same count, which includes failed steps
    assert len(set(trainer.apply_all_operators(lambda op: op.seen))) == 1
    check_epoch(trainer)
    # each operator has its own process group of the current ranks
    assert trainer.apply_all_operators(Rich.ranks) == [[0, 1]] * 2
    worlds = trainer.apply_all_operators(lambda op: op.worlds)
    assert [world[-1] for world in worlds] == [(0, [0, 1]), (1, [0, 1])]
