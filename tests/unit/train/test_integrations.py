"""The helpers for Lightning and Transformers, in a session without a process group."""

import os
from types import SimpleNamespace

import pytest
import torch

from raysgd.train import Checkpoint


def files_in(turn):
    return Checkpoint(blob=turn.checkpoint).to_dict()["_files"]


@pytest.fixture
def helpers():
    pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")
    import raysgd.train.lightning

    return raysgd.train.lightning


def lightning_trainer(**arguments):
    from lightning.pytorch import Trainer

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(accelerator="cpu", devices=1, enable_model_summary=False, **quiet, **arguments)


def test_lightning_has_the_ranks_of_the_worker(run, helpers, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    run(rank=1)
    trainer = lightning_trainer(
        strategy=helpers.RayDDPStrategy(), plugins=[helpers.RayLightningEnvironment()]
    )
    strategy = helpers.prepare_trainer(trainer).strategy
    strategy.set_world_ranks()
    assert (strategy.global_rank, strategy.world_size, strategy.local_rank) == (1, 2, 1)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": 1}
    assert strategy.root_device == torch.device("cpu")
    assert strategy.cluster_environment.creates_processes_externally
    strategy.cluster_environment.teardown()
    assert os.environ["WORLD_SIZE"] == "2"
    with pytest.raises(RuntimeError, match=r"worker 1 of 2, but .* rank 0 of 1\. Leave devices"):
        helpers.prepare_trainer(lightning_trainer())


@pytest.mark.parametrize("rank", [0, 1])
def test_lightning_reports_metrics_of_all_and_the_checkpoint_of_worker_0(run, helpers, rank):
    queue = run(rank=rank)

    def save_checkpoint(path):
        if rank == 0:
            path.write_bytes(b"all of it")

    trainer = SimpleNamespace(
        callback_metrics={"loss": torch.tensor(0.5)},
        current_epoch=3,
        global_step=40,
        is_global_zero=rank == 0,
        save_checkpoint=save_checkpoint,
    )
    helpers.RayTrainReportCallback().on_train_epoch_end(trainer, None)
    (turn,) = queue.turns
    assert turn.metrics.items() >= {"loss": 0.5, "epoch": 3, "step": 40}.items()
    assert turn.has_checkpoint == (rank == 0)
    if rank == 0:
        assert files_in(turn) == {"checkpoint.ckpt": b"all of it"}


@pytest.fixture
def transformers():
    pytest.importorskip("accelerate", reason="Accelerate is not installed")
    pytest.importorskip("transformers", reason="Transformers is not installed")
    import raysgd.train.huggingface.transformers

    return raysgd.train.huggingface.transformers


@pytest.mark.parametrize("rank", [0, 1])
def test_transformers_reports_its_log_and_the_folder_of_worker_0(
    run, transformers, tmp_path, rank, monkeypatch
):
    queue = run(rank=rank)
    monkeypatch.chdir(tmp_path)
    for step, content in ((20, b"this"), (30, b"of a run before")):
        folder = tmp_path / "output" / f"checkpoint-{step}" / "deep"
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(content)
    log = [{"loss": 2.0, "step": 10}, {"eval_loss": 3.0}, {"loss": 1.0, "step": 20}]
    state = SimpleNamespace(global_step=20, log_history=log)
    arguments = SimpleNamespace(output_dir="output")
    transformers.RayTrainReportCallback().on_save(arguments, state, None)
    (turn,) = queue.turns
    assert turn.metrics.items() >= {"loss": 1.0, "step": 20, "eval_loss": 3.0}.items()
    assert turn.has_checkpoint == (rank == 0)
    if rank == 0:
        assert files_in(turn) == {"checkpoint/deep/weights": b"this"}


def test_a_trainer_of_transformers_reads_batches_of_ray_data(run, transformers, tmp_path):
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x, labels):
            seen.append(x.shape)
            return {"loss": (self.layer(x) - labels).square().mean()}

    class Batches:
        """Like the result of ``iter_torch_batches``: only iterable."""

        def __init__(self, size):
            self.size = size

        def __iter__(self):
            return iter([{"x": torch.ones(self.size, 1), "labels": torch.ones(self.size, 1)}] * 2)

    run(size=1)
    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True}
    arguments = TrainingArguments(str(tmp_path), max_steps=3, use_cpu=True, **quiet)
    seen = []
    trainer = Trainer(Model(), arguments, train_dataset=Batches(5), eval_dataset=Batches(7))
    assert transformers.prepare_trainer(trainer) is trainer
    trainer.train()
    trainer.evaluate()
    assert seen == [(5, 1)] * 3 + [(7, 1)] * 2
    trainer.train_dataset = [{"x": torch.ones(1), "labels": torch.ones(1)}] * 3
    (batch,) = trainer.get_train_dataloader()
    assert batch["x"].shape == (3, 1)
    run(size=2)
    with pytest.raises(RuntimeError, match=r"worker 0 of 2, but .* rank 0 of 1\. Create"):
        transformers.prepare_trainer(trainer)
