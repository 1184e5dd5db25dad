"""Lightning in training functions, with the names of ``ray.train.lightning``.

These names are optional: ``lightning.Trainer()`` uses all workers without them::

    def train_func():
        trainer = lightning.Trainer(max_epochs=10, callbacks=[RayTrainReportCallback()])
        trainer.fit(Module(), loader, ckpt_path=get_checkpoint_path())
"""

import tempfile
from pathlib import Path
from typing import Any

import torch

from raysgd._internal.imports import import_extra
from raysgd.train.checkpoint import Checkpoint
from raysgd.train.integrations import check_rank, newest_checkpoint_path
from raysgd.train.session import get_context, local_rank, report, world_rank, world_size
from raysgd.train.torch.accelerator import get_device

import_extra("raysgd.train.lightning", "lightning.pytorch", "lightning")

from lightning.fabric.plugins.environments.lightning import LightningEnvironment  # noqa: E402
from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import Callback  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402

__all__ = [
    "RayDDPStrategy",
    "RayLightningEnvironment",
    "RayTrainReportCallback",
    "get_checkpoint_path",
    "prepare_trainer",
]


class RayDDPStrategy(DDPStrategy):
    """The ``DDPStrategy`` of Lightning over all workers. `TorchConfig` sets its backend."""

    @property
    def root_device(self) -> torch.device:
        return get_device()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": world_size(), "rank": world_rank()}


class RayLightningEnvironment(LightningEnvironment):
    """Gives Lightning the ranks of this worker."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    world_size = staticmethod(world_size)
    global_rank = staticmethod(world_rank)
    local_rank = staticmethod(local_rank)

    def node_rank(self) -> int:
        return get_context().get_node_rank()

    def teardown(self) -> None:
        pass  # the process group stays alive


class RayTrainReportCallback(Callback):
    """Reports metrics and a checkpoint at the end of each training epoch.

    The metrics are ``trainer.callback_metrics``, ``epoch``, and ``step``. The checkpoint is a
    folder with the checkpoint of Lightning in the file `CHECKPOINT_NAME`.
    """

    CHECKPOINT_NAME = "checkpoint.ckpt"

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics: dict[str, Any] = {k: v.item() for k, v in trainer.callback_metrics.items()}
        metrics |= {"epoch": trainer.current_epoch, "step": trainer.global_step}
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_checkpoint(Path(folder, self.CHECKPOINT_NAME))  # call on all workers
            report(metrics, Checkpoint.from_directory(folder) if trainer.is_global_zero else None)


def get_checkpoint_path() -> str | None:
    """Return a temporary path of the newest checkpoint, or None, for ``fit(ckpt_path=...)``."""
    return newest_checkpoint_path(RayTrainReportCallback.CHECKPOINT_NAME)


def prepare_trainer(trainer: Trainer) -> Trainer:
    """Check that the trainer has the rank and the world size of this worker, and return it."""
    check_rank(
        trainer.global_rank,
        trainer.world_size,
        "Leave devices, num_nodes, accelerator, and strategy out of Trainer(...), or pass "
        "strategy=RayDDPStrategy() and plugins=[RayLightningEnvironment()].",
    )
    return trainer
