"""Replicas that differ, as a trainer's user sees them."""

import pytest
import torch

from raysgd import TorchTrainer
from raysgd.errors import ReplicasDifferError
from tests.operators import Classifier, local, replica_hash


def adds_noise(operator, ranks):
    if operator.world_rank in ranks:
        torch.manual_seed(operator.world_rank)
        with torch.no_grad():
            for parameter in operator.model.parameters():
                parameter += torch.randn_like(parameter)


class Clipping(Classifier):
    """Clips gradients on one worker in one step."""

    def train_batch(self, batch, batch_info):
        features, target = batch
        self.backward(self.criterion(self.model(features), target))
        if (self.world_rank, self.global_step) == (1, self.config["clips_at"]):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.001)
        self.optimizer_step(self.optimizer)
        return {"num_samples": len(target)}


def test_gradients_changed_by_one_worker_are_an_error_that_names_it(ray_cluster):
    """The other worker is in the next step, or has ended the call."""
    with local(Clipping, num_workers=2) as trainer:
        start = trainer.state_dict()
        for clips_at in (1, 3):
            trainer.load_state_dict(start)
            trainer.apply_all_operators(
                lambda operator, step=clips_at: operator.config.update(clips_at=step)
            )
            with pytest.raises(ReplicasDifferError, match="Worker 1 changed gradients") as caught:
                trainer.train(num_steps=4)
            assert caught.value.ranks == (1,)


def test_difference_is_an_error_until_a_state_is_loaded(ray_cluster, tmp_path):
    with TorchTrainer(training_operator_cls=Classifier, num_workers=3, min_workers=3) as trainer:
        trainer.train(num_steps=2)
        path = trainer.save(tmp_path / "good.pt")
        trainer.apply_all_operators(lambda operator: adds_noise(operator, (0,)))
        with pytest.raises(
            ReplicasDifferError, match=r"worker 0 and the majority differ in: models"
        ):
            trainer.train(num_steps=2)
        trainer.load_state_dict(trainer.state_dict())
        assert len(set(trainer.apply_all_operators(replica_hash))) == 1

        trainer.apply_all_operators(lambda operator: adds_noise(operator, (0, 1, 2)))
        with pytest.raises(ReplicasDifferError, match="the workers differ in: models"):
            trainer.get_model()
        for _ in range(2):
            with pytest.raises(ReplicasDifferError, match="the workers differ"):
                trainer.train(num_steps=2)
        trainer.load(path)
        trainer.apply_all_operators(lambda operator: adds_noise(operator, (0, 1, 2)))
        with pytest.raises(ReplicasDifferError, match="equal after step 2"):
            trainer.train(num_steps=2)
        trainer.load(path)
        trainer.train(num_steps=2)
        assert trainer.global_step == 4
        assert len(set(trainer.apply_all_operators(replica_hash))) == 1
