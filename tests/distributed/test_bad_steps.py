"""Workers that leave out an update agree on it, also after a kill."""

import pytest
import torch

from raysgd import BadSteps, TorchTrainer
from raysgd.testing.chaos import Chaos, Fault
from tests.conftest import needs_full_sharding
from tests.unit.torch.test_bad_steps import BATCH, NUM_SAMPLES, SAMPLES, Regression, by_hand


class FullySharded(Regression):
    def register(self, **given):
        return super().register(**given, sharding="full")


@pytest.mark.slow("a worker is killed and replaced")
@pytest.mark.parametrize(
    ("operator", "averages"),
    [
        (Regression, True),
        (Regression, False),
        pytest.param(FullySharded, True, marks=needs_full_sharding),  # restarts from setup
    ],
)
def test_workers_agree_on_a_bad_step_of_one_of_them(ray_cluster, operator, averages):
    trainer = TorchTrainer(
        training_operator_cls=operator,
        config={"kind": "loss", "normalizes": False},
        num_workers=2,
        use_gpu=False,
        scheduler_step_freq="batch",
        bad_steps=BadSteps(spike=8.0),
        wrap_ddp=averages,
        timeout_s=60,
    )
    # With own models, the worker with the bad samples must not decide alone.
    with trainer, Chaos(trainer, [Fault(step=2, rank=0)] * averages):
        trainer.train()  # only the samples of one worker are bad
        (record,) = trainer.bad_steps
        assert (record["step"], record["samples"]) == (5, SAMPLES)
        assert trainer.global_step == NUM_SAMPLES // BATCH
        if not averages:  # each worker has a model of its own
            states = trainer.apply_all_operators(lambda op: op.model.state_dict())
            assert all(each.isfinite().all() for state in states for each in state.values())
            return
        expected, _ = by_hand("loss", normalizes=False)
        torch.testing.assert_close(trainer.get_model().state_dict(), expected.state_dict())
