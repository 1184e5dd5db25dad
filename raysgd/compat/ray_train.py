"""Names of Ray Train 1.13 and 2, as mixins of the classes of `raysgd.train`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_METADATA = "_metadata"
_METADATA_FILE = ".metadata.json"


def with_metadata(state: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a checkpoint with further metadata. Its own take precedence."""
    return _replaced(state, {**metadata, **_metadata_of(state)}) if metadata else dict(state)


def _metadata_of(state: Mapping[str, Any]) -> dict[str, Any]:
    text = state.get("_files", {}).get(_METADATA_FILE)
    return dict(state.get(_METADATA, {}) if text is None else json.loads(text))


def _replaced(state: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    if state.keys() == {"_files"}:
        return {"_files": {**state["_files"], _METADATA_FILE: json.dumps(metadata).encode()}}
    return {**state, _METADATA: dict(metadata)}


class RayCheckpoint:
    """Metadata of a checkpoint. They stay with it when it is reported."""

    _data: Any
    to_dict: Any

    def get_metadata(self) -> dict[str, Any]:
        """Return the metadata: those of the trainer, and those that `set_metadata` has set."""
        return _metadata_of(self.to_dict())

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replace the metadata of this object, in memory. The values must fit into JSON."""
        self._data = _replaced(self.to_dict(), metadata)

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Add metadata, or change them."""
        self.set_metadata({**self.get_metadata(), **metadata})


class RayContext:
    """Names of the run that older scripts read."""

    name: str
    run: str
    folder: str

    def get_trial_name(self) -> str:
        """Return the name of the run or the trial."""
        return self.name

    def get_trial_id(self) -> str:
        """Return the unique ID of the run."""
        return self.run

    def get_trial_dir(self) -> str:
        """Return the folder of the run on the driver; empty in a trial of Tune."""
        return self.folder


class RayResult:
    """Other names for the content of a result."""

    path: str
    best_checkpoints: Any

    @property
    def log_dir(self) -> Path:
        """The folder of the run."""
        return Path(self.path)

    def get_best_checkpoint(self, metric: str, mode: str) -> Any:
        """Return the checkpoint on disk with the best `metric`; None if none has that number."""
        found = [each for each in self.best_checkpoints if metric in each[1]]
        pick = {"min": min, "max": max}[mode]
        return pick(found, key=lambda each: each[1][metric])[0] if found else None


class RayTrainer:
    """Another name for the newest checkpoint of a trainer."""

    _executor: Any

    @property
    def latest_checkpoint_path(self) -> Path | None:
        """Path of the newest checkpoint of the newest run; None if no checkpoint is on disk."""
        path: Path | None = self._executor.latest_checkpoint_path
        return path
