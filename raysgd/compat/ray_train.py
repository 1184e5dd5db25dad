"""Names of Ray Train 1.13 and 2, as mixins of the classes of `raysgd.train`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_FILE = ".metadata.json"  # the file of Ray


def with_metadata(state: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a checkpoint with other metadata."""
    if state.keys() == {"_files"}:
        return {"_files": {**state["_files"], _FILE: json.dumps(metadata).encode()}}
    return {**state, "_metadata": dict(metadata)}


class RayCheckpoint:
    """Metadata of a checkpoint: those of its trainer, and those that user code sets."""

    _data: Any
    to_dict: Any

    def get_metadata(self) -> dict[str, Any]:
        """Return the metadata."""
        state = self.to_dict()
        text = state.get("_files", {}).get(_FILE)
        return dict(state.get("_metadata", {}) if text is None else json.loads(text))

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replace the metadata, until the checkpoint is reported in memory only."""
        self._data = with_metadata(self.to_dict(), metadata)

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Add or change metadata."""
        self.set_metadata({**self.get_metadata(), **metadata})


class OldNames:
    """Methods of the first versions of ``ray.util.sgd.v2``."""

    def get_latest_checkpoint(self) -> Any:
        """Return ``latest_checkpoint``."""
        return getattr(self, "latest_checkpoint")  # noqa: B009
