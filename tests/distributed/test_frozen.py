"""Replacements get only what setup has not made, and snapshots have the same."""

import pytest
import torch

from raysgd import ElasticConfig, TorchTrainer
from raysgd.checkpoint.file import read_checkpoint
from raysgd.errors import WorkerLostError
from raysgd.testing.chaos import Chaos, Fault, kill
from raysgd.torch.state_access import TorchStateAccess
from tests.unit.torch.features.test_frozen_parameters import Tuned


class TunedByRank(Tuned):
    def setup(self, config):
        super().setup({"seed": self.world_rank * config["differ"]})


def kept(operator):
    """Return which parameters a snapshot has, and the parameters of this worker."""
    state_access = TorchStateAccess(operator._train_state)
    names = set(state_access.read_for_workers()["models"][0])
    return names, operator.model.module.state_dict()


@pytest.mark.slow("a worker is killed and replaced")
@pytest.mark.parametrize("differ", [False, True])
def test_frozen_parameters_stay_where_setup_makes_them(ray_cluster, tmp_path, differ):
    trainer = TorchTrainer(
        training_operator_cls=TunedByRank,
        config={"differ": differ},
        num_workers=2,
        use_gpu=False,
        elastic=ElasticConfig(snapshot_every=1),
    )
    with trainer:
        before, expected = trainer.apply_all_operators(kept)[0]
        assert ("base.weight" in before) == differ
        assert {"head.weight", "norm.running_mean"} <= before
        with Chaos(trainer, [Fault(rank=1, step=2)]) as chaos:
            while trainer.events[-1].kind != "grown":
                trainer.train()
        trainer.train()  # sends a snapshot
        assert len(chaos.injected) == 1
        after = trainer.apply_all_operators(kept)
        assert [("base.weight" in names) for names, _ in after] == [differ] * len(after)
        for name in ("base.weight", "tied.weight", "norm.weight"):
            for _, state in after:
                torch.testing.assert_close(state[name], expected[name], rtol=0, atol=0)
        if differ:
            return
        for rank in range(len(after)):
            kill(trainer, rank)
        with pytest.raises(WorkerLostError):
            trainer.train(max_retries=0)
        trainer.save(tmp_path / "state.pt")  # of a snapshot that may lack them
        saved = read_checkpoint(tmp_path / "state.pt")[0]["models"][0]
        assert torch.equal(saved["base.weight"], expected["base.weight"])
