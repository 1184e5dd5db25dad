"""Lightning in training functions, with the names of ``ray.train.lightning``.

``lightning.Trainer()`` forms one world of all workers without any of them::

    def train_func():
        trainer = lightning.Trainer(max_epochs=10, callbacks=[RayTrainReportCallback()])
        trainer.fit(Module(), loader, ckpt_path=get_checkpoint_path())
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from raysgd._internal.imports import import_extra
from raysgd.train.api import get_context, local_rank, report, world_rank, world_size
from raysgd.train.checkpoint import Checkpoint
from raysgd.train.external import check_place, newest_checkpoint_path
from raysgd.train.torch.accelerator import get_device
from raysgd.train.uploads import CheckpointUploadMode

import_extra("raysgd.train.lightning", "lightning.pytorch", "lightning")

from lightning.fabric.plugins.environments.lightning import LightningEnvironment  # noqa: E402
from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import Callback  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy  # noqa: E402

__all__ = [
    "RayDDPStrategy",
    "RayFSDPStrategy",
    "RayLightningEnvironment",
    "RayTrainReportCallback",
    "get_checkpoint_path",
    "prepare_trainer",
]


class _OnWorkers:
    """Takes the device and the share of the data from this worker's place."""

    @property
    def root_device(self) -> torch.device:
        """The device of this worker."""
        return get_device()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments for the samplers that Lightning adds to loaders."""
        return {"num_replicas": world_size(), "rank": world_rank()}


class RayDDPStrategy(_OnWorkers, DDPStrategy):
    """Lightning's ``DDPStrategy`` over all workers.

    Args:
        arguments: those of ``DDPStrategy``. The process group exists already, so its backend and
            timeout are those of :class:`raysgd.train.torch.TorchConfig`.
    """


class RayFSDPStrategy(_OnWorkers, FSDPStrategy):
    """Lightning's ``FSDPStrategy`` over all workers, which need GPUs.

    Args:
        arguments: those of ``FSDPStrategy``. The process group exists already, so its backend and
            timeout are those of :class:`raysgd.train.torch.TorchConfig`.
    """


class RayLightningEnvironment(LightningEnvironment):
    """Tells Lightning the ranks of this worker."""

    @property
    def creates_processes_externally(self) -> bool:
        """True: the workers run already."""
        return True

    def world_size(self) -> int:
        """Return the number of workers."""
        return world_size()

    def global_rank(self) -> int:
        """Return the rank among all workers."""
        return world_rank()

    def local_rank(self) -> int:
        """Return the rank among the workers of this node."""
        return local_rank()

    def node_rank(self) -> int:
        """Return the rank of this node among those that have workers."""
        return get_context().get_node_rank()

    def teardown(self) -> None:
        """Do nothing, because the process group stays."""


class RayTrainReportCallback(Callback):
    """Reports metrics and a checkpoint at the end of each training epoch.

    The metrics are ``trainer.callback_metrics``, ``epoch``, and ``step``. The checkpoint is a
    folder with Lightning's own checkpoint in the file `CHECKPOINT_NAME`.

    Args:
        checkpoint_upload_mode: an option of :func:`raysgd.train.report`; None for its default.
        validation: an option of :func:`raysgd.train.report`.

    Raises:
        ValueError: if the mode is NO_UPLOAD, because the checkpoint is a temporary folder.
    """

    CHECKPOINT_NAME = "checkpoint.ckpt"

    def __init__(self, checkpoint_upload_mode: Any = None, validation: Any = False) -> None:
        super().__init__()
        mode = checkpoint_upload_mode or CheckpointUploadMode.SYNC
        if getattr(mode, "value", mode) == CheckpointUploadMode.NO_UPLOAD.value:
            raise ValueError(
                "RayTrainReportCallback(checkpoint_upload_mode=NO_UPLOAD): its checkpoints are "
                "temporary folders, so they must be uploaded. Use SYNC or ASYNC."
            )
        self.checkpoint_upload_mode = mode
        self.validation = validation

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report."""
        metrics: dict[str, Any] = {k: v.item() for k, v in trainer.callback_metrics.items()}
        metrics |= {"epoch": trainer.current_epoch, "step": trainer.global_step}
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_checkpoint(Path(folder, self.CHECKPOINT_NAME))  # all workers take part
            if trainer.is_global_zero:
                report(
                    metrics,
                    checkpoint=Checkpoint.from_directory(folder),
                    checkpoint_upload_mode=self.checkpoint_upload_mode,
                    validation=self.validation,
                )
            else:
                report(metrics)


def get_checkpoint_path() -> str | None:
    """Return the newest checkpoint of :class:`RayTrainReportCallback`, for ``fit(ckpt_path=...)``.

    None if there is none yet. The path is a temporary copy on this node.

    Raises:
        FileNotFoundError: if the run's newest checkpoint comes from something else.
    """
    return newest_checkpoint_path(RayTrainReportCallback.CHECKPOINT_NAME)


def prepare_trainer(trainer: Trainer) -> Trainer:
    """Return the trainer; check that its world is the group of workers.

    Raises:
        RuntimeError: if this worker has another rank or world size in Lightning.
    """
    check_place(
        trainer.global_rank,
        trainer.world_size,
        "Leave devices, num_nodes, accelerator, and strategy out of Trainer(...), or pass "
        "strategy=RayDDPStrategy() and plugins=[RayLightningEnvironment()].",
    )
    return trainer
