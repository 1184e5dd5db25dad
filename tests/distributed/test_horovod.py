"""Horovod in place of DistributedDataParallel: identical replicas, and groups made anew."""

import pytest
import torch

from raysgd import ElasticConfig, TorchTrainer
from raysgd.testing import chaos
from tests.conftest import wait_until
from tests.operators import Classifier, make_data, make_model, parameters, replica_hash

pytest.importorskip("horovod")

QUICK = ElasticConfig(initial_s=0.2, resize_cooldown_s=0.0)


class Compressed(Classifier):
    """Sends gradients as float16, in groups of two batches."""

    def setup(self, config):
        import horovod.torch as hvd

        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        self.model, self.optimizer, self.criterion, _ = self.register(
            models=model,
            optimizers=optimizer,
            criterion=torch.nn.CrossEntropyLoss(),
            schedulers=scheduler,
            gradient_accumulation_steps=2,
            max_grad_norm=1.0,
            horovod_args={"compression": hvd.Compression.fp16},
        )
        self.register_data(train_loader=torch.utils.data.DataLoader(make_data(), batch_size=32))


def make_trainer(operator_cls=Classifier, config=None, **arguments):
    given = {"num_workers": 2, "backend": "horovod", "elastic": QUICK, "timeout_s": 60, **arguments}
    return TorchTrainer(
        training_operator_cls=operator_cls, config={"momentum": 0.9, **(config or {})}, **given
    )


def hashes(trainer):
    return set(trainer.apply_all_operators(replica_hash))


def pids(trainer):
    import os

    return trainer.apply_all_workers(lambda: os.getpid())


def fail_once(operator):
    if operator.world_rank == 1:
        step, original = operator.global_step + 3, operator.train_batch

        def train_batch(batch, batch_info):
            if batch_info["global_step"] == step:
                operator.train_batch = original
                raise ValueError("bad batch")
            return original(batch, batch_info)

        operator.train_batch = train_batch


def test_workers_stay_identical_also_after_losses_and_errors(ray_cluster, tmp_path):
    with make_trainer(config={"batch_norm": True}) as trainer:
        for epoch in (1, 2):
            result = trainer.train()
            assert (result["epoch"], result["num_samples"]) == (epoch, 1003)
            assert len(hashes(trainer)) == 1
        assert trainer.validate()["num_samples"] == 1003
        before = pids(trainer)

        trainer.apply_all_operators(fail_once)
        with pytest.raises(ValueError, match="bad batch"):
            trainer.train()
        assert trainer.train(max_retries=0)["epoch"] == 3
        assert pids(trainer) == before
        assert len(hashes(trainer)) == 1

        step = trainer.global_step
        with chaos.Chaos(trainer, [chaos.Fault(kind="kill", rank=1, step=step + 5)]):
            assert trainer.train()["epoch"] == 4
        assert trainer.global_step >= step + 16
        assert before[0] in pids(trainer)  # the survivor kept its process
        wait_until(lambda: trainer.num_workers == 2 or not trainer.train(), timeout_s=60)
        assert len(hashes(trainer)) == 1
        kinds = [event.kind for event in trainer.events]
        assert "lost" in kinds
        assert "grown" in kinds
        path = trainer.save(tmp_path / "state.pt")
        trainer.train(num_steps=3)
        trainer.load(path)
        assert len(hashes(trainer)) == 1


def test_k_steps_of_two_workers_are_those_of_one_with_twice_the_batch(ray_cluster):
    found = []
    for num_workers, batch_size in ((2, 16), (1, 32)):
        config = {"shuffle": False, "batch_size": batch_size}
        with make_trainer(config=config, num_workers=num_workers) as trainer:
            before = trainer.apply_all_operators(parameters)[0]
            trainer.train(num_steps=20)
            found.append(trainer.apply_all_operators(parameters)[0])
            assert (found[-1] - before).abs().max() > 0.01
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=0)


def test_compression_accumulation_clipping_and_schedules_work_together(ray_cluster):
    with make_trainer(Compressed, scheduler_step_freq="epoch") as trainer:
        first, second = trainer.train(), trainer.train()
        assert second["train_loss"] < first["train_loss"]
        assert len(hashes(trainer)) == 1
        rates = trainer.apply_all_operators(lambda op: op.optimizer.param_groups[0]["lr"])
        assert rates == [0.025, 0.025]
