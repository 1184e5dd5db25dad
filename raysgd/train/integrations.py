"""Helpers for Lightning and Transformers."""

from __future__ import annotations

import shutil
import weakref
from pathlib import Path

from raysgd.train.session import get_checkpoint, world_rank, world_size
from raysgd.train.worker_session import process_state


def newest_checkpoint_path(name: str) -> str | None:
    """Return the path of a file or folder in the newest checkpoint; None without a checkpoint.

    The files are a temporary copy, which is removed after the run.
    """
    checkpoint = get_checkpoint()
    if checkpoint is None:
        return None
    folder = checkpoint.to_directory()
    weakref.finalize(process_state.session, shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder, name)
    if not path.exists():
        raise FileNotFoundError(
            f"get_checkpoint_path(): the newest checkpoint contains no {name!r}. For a checkpoint "
            "that is not from RayTrainReportCallback, call raysgd.train.get_checkpoint()."
        )
    return str(path)


def check_rank(rank: int, size: int, advice: str) -> None:
    """Check the rank and the world size that another library has found."""
    if process_state.context is not None and (rank, size) != (world_rank(), world_size()):
        raise RuntimeError(
            f"prepare_trainer(): this is worker {world_rank()} of {world_size()}, but the trainer "
            f"has rank {rank} of {size}. {advice}"
        )
