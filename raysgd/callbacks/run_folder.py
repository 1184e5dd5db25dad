"""The run folder, and the callbacks that a trainer adds for it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from raysgd._internal.paths import checked_path
from raysgd.callbacks.base import Callback
from raysgd.callbacks.callback_list import checked_callbacks
from raysgd.callbacks.jsonl_logger import JsonlLogger
from raysgd.callbacks.progress import ProgressBar
from raysgd.callbacks.report import RunReport


def checked_logdir(logdir: str | os.PathLike[str] | None) -> Path | None:
    """Return the run folder as an absolute path. Raise ValueError for a URL or a file."""
    if logdir is None:
        return None
    advice = "Only checkpoints can go to a URL: CheckpointCallback('s3://...')."
    path = checked_path("logdir", logdir, advice).absolute()
    if path.exists() and not path.is_dir():
        raise ValueError(f"logdir={str(logdir)!r}: must be a folder, but it is a file.")
    return path


def trainer_callbacks(
    trainer_name: str, callbacks: Iterable[Callback], use_tqdm: bool, logdir: Path | None
) -> list[Callback]:
    """Return the user's callbacks, and those that ``use_tqdm`` and ``logdir`` add."""
    found = checked_callbacks(f"{trainer_name}(callbacks=...)", callbacks, logdir)
    if use_tqdm and not any(isinstance(callback, ProgressBar) for callback in found):
        found.insert(0, ProgressBar())
    if logdir is not None:
        if not any(isinstance(c, JsonlLogger) and c.folder in (None, logdir) for c in found):
            found.append(JsonlLogger())  # last, to run after callbacks that add metrics
        found.append(RunReport())
    return found
