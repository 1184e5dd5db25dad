"""The Trainer of Transformers in training functions, with the names of Ray Train.

These names are optional: the Trainer uses all workers without them::

    def train_func():
        trainer = transformers.Trainer(model, arguments, train_dataset=dataset)
        trainer.add_callback(RayTrainReportCallback())
        trainer.train(resume_from_checkpoint=get_checkpoint_path())
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from raysgd._internal.imports import import_extra
from raysgd.train.checkpoint import Checkpoint
from raysgd.train.integrations import check_rank, newest_checkpoint_path
from raysgd.train.session import report, world_rank

for _module in ("transformers", "accelerate"):
    import_extra("raysgd.train.huggingface.transformers", _module, "huggingface")

from transformers import TrainerCallback  # noqa: E402

__all__ = ["RayTrainReportCallback", "get_checkpoint_path", "prepare_trainer"]


class RayTrainReportCallback(TrainerCallback):  # type: ignore[misc]
    """Reports metrics and a checkpoint each time that the Trainer saves.

    The metrics are the newest of each name in ``trainer.state.log_history``. The checkpoint is a
    folder. Its subfolder `CHECKPOINT_NAME` has the content of the Trainer's ``checkpoint-<step>``
    on the node of worker 0. ``save_strategy`` and ``save_steps`` decide when the Trainer saves.
    """

    CHECKPOINT_NAME = "checkpoint"

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        metrics = {name: value for log in state.log_history for name, value in log.items()}
        if dist.is_initialized():
            dist.barrier()  # each worker writes files of its own into the folder
        if world_rank() != 0:
            report(metrics)
            return
        saved = Path(args.output_dir, f"checkpoint-{state.global_step}").absolute()
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(saved, Path(folder, self.CHECKPOINT_NAME), copy_function=os.symlink)
            report(metrics, checkpoint=Checkpoint.from_directory(folder))


def get_checkpoint_path() -> str | None:
    """Return a temporary path of the newest checkpoint, or None, to resume from."""
    return newest_checkpoint_path(RayTrainReportCallback.CHECKPOINT_NAME)


class _Batches(IterableDataset[Any]):
    """Batches from an iterable, such as ``shard.iter_torch_batches()`` of Ray Data."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def prepare_trainer(trainer: Any) -> Any:
    """Let the trainer read batches of Ray Data, check its rank and world size, and return it.

    Its ``train_dataset`` and ``eval_dataset`` may be the result of
    ``get_dataset_shard().iter_torch_batches()``, which sets the batch size.
    """
    check_rank(
        trainer.args.process_index,
        trainer.args.world_size,
        "Create TrainingArguments in the training function, and leave TorchConfig(init_method="
        '"env") as it is by default.',
    )
    train_dataloader, eval_dataloader = trainer.get_train_dataloader, trainer.get_eval_dataloader

    def get_train_dataloader() -> Any:
        data = trainer.train_dataset
        return _loader(data) if _is_batches(data) else train_dataloader()

    def get_eval_dataloader(eval_dataset: Any = None) -> Any:
        data = trainer.eval_dataset if eval_dataset is None else eval_dataset
        data = trainer.eval_dataset[data] if isinstance(data, str) else data
        return _loader(data) if _is_batches(data) else eval_dataloader(eval_dataset)

    trainer.get_train_dataloader = get_train_dataloader
    trainer.get_eval_dataloader = get_eval_dataloader
    return trainer


def _is_batches(data: Any) -> bool:
    is_dataset = isinstance(data, IterableDataset) or hasattr(data, "__getitem__")
    return hasattr(data, "__iter__") and not is_dataset


def _loader(data: Any) -> DataLoader[Any]:
    return DataLoader(_Batches(data), batch_size=None)
