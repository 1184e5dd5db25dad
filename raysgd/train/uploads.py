"""How the run stores a reported checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any

from raysgd._internal.arguments import set_fields
from raysgd.train.checkpoint import Checkpoint

__all__ = ["CheckpointUploadMode", "ReportOptions"]


class CheckpointUploadMode(Enum):
    """When to store a reported checkpoint."""

    ASYNC = "ASYNC"
    """In the background: `report` returns immediately."""
    SYNC = "SYNC"
    """Before `report` returns."""
    NO_UPLOAD = "NO_UPLOAD"
    """Never: the run records the path of the folder, which driver and workers must both see."""


@dataclass(frozen=True)
class ReportOptions:
    """Options of `raysgd.train.report`, which documents them. The names are those of Ray Train."""

    checkpoint_dir_name: str | None = None
    checkpoint_upload_mode: Any = CheckpointUploadMode.SYNC
    """The mode, as raysgd's enum or Ray's."""
    delete_local_checkpoint_after_upload: bool | None = None
    checkpoint_upload_fn: Callable[[Any, str], Any] | None = None
    validation: Any = False

    def __post_init__(self) -> None:
        given = self.checkpoint_upload_mode
        set_fields(
            self, checkpoint_upload_mode=CheckpointUploadMode(getattr(given, "value", given))
        )
        if not isinstance(self.validation, bool) and not hasattr(self.validation, "fn_kwargs"):
            raise TypeError(
                f"report(validation={self.validation!r}): must be True, False, or a "
                "ValidationTaskConfig."
            )

    @classmethod
    def names(cls) -> set[str]:
        return {field.name for field in fields(cls)}

    @property
    def waits(self) -> bool:
        """Whether `report` waits until the checkpoint is stored."""
        return self.checkpoint_upload_mode is not CheckpointUploadMode.ASYNC

    @property
    def _deletes(self) -> bool:
        given = self.delete_local_checkpoint_after_upload
        return not self.waits if given is None else given

    def check(self, checkpoint: Any, run_folder: str) -> None:
        if self.validation and checkpoint is None:
            raise ValueError("report(validation=...) needs a checkpoint to validate.")
        path = getattr(checkpoint, "path", None)
        if not (self._deletes and path and run_folder):
            return
        if Path(run_folder).resolve().is_relative_to(Path(path).resolve()):
            raise ValueError(
                f"report() would delete {path}, which contains the folder of the run, "
                f"{run_folder}. Write checkpoints to another folder, or pass "
                "delete_local_checkpoint_after_upload=False."
            )

    def packed(
        self, checkpoint: Any, iteration: int, metadata: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the packed checkpoint, after uploading it if there is an upload function."""
        stays = self.checkpoint_upload_mode is CheckpointUploadMode.NO_UPLOAD
        if self.checkpoint_upload_fn is not None and not stays:
            name = self.checkpoint_dir_name or f"checkpoint_{iteration:06d}"
            checkpoint, stays = self.checkpoint_upload_fn(checkpoint, name), True
        if not stays:
            return Checkpoint.taken_from(checkpoint).packed(metadata)
        path = getattr(checkpoint, "path", None)
        if path is None or not Path(path).is_dir():
            raise ValueError(
                f"report(checkpoint={checkpoint!r}): must be a folder that this node can read, "
                "with NO_UPLOAD and as the result of checkpoint_upload_fn."
            )
        return Checkpoint.linked(path, metadata)

    def discard(self, checkpoint: Any, packed: Mapping[str, Any]) -> None:
        """Remove the folder of a stored checkpoint if the options request it."""
        path = getattr(checkpoint, "path", None)
        if self._deletes and path and Checkpoint.link_in(packed) != os.path.abspath(path):
            shutil.rmtree(path, ignore_errors=True)
