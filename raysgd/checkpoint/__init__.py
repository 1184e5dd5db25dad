"""State on disk. The names load on first use: some of their modules need torch, others do not."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raysgd.checkpoint.file import (
        check_writable,
        prepare_write,
        read_file,
        read_manifest,
        write_file,
    )
    from raysgd.checkpoint.manifest import Manifest
    from raysgd.checkpoint.store import CheckpointStore, Restored
    from raysgd.checkpoint.weights import save_model
    from raysgd.checkpoint.writer import BackgroundWriter

__all__ = [
    "BackgroundWriter",
    "CheckpointStore",
    "Manifest",
    "Restored",
    "check_writable",
    "prepare_write",
    "read_file",
    "read_manifest",
    "save_model",
    "write_file",
]

_HOMES = {
    "BackgroundWriter": "writer",
    "CheckpointStore": "store",
    "Manifest": "manifest",
    "Restored": "store",
    "check_writable": "file",
    "prepare_write": "file",
    "read_file": "file",
    "read_manifest": "file",
    "save_model": "weights",
    "write_file": "file",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'raysgd.checkpoint' has no attribute {name!r}")
    return getattr(importlib.import_module(f"raysgd.checkpoint.{_HOMES[name]}"), name)
