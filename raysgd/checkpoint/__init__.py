"""Checkpoint files and folders."""

from raysgd.checkpoint.file import read_file, read_manifest, write_file
from raysgd.checkpoint.manifest import Manifest
from raysgd.checkpoint.store import CheckpointStore, Restored
from raysgd.checkpoint.weights import save_model

__all__ = [
    "CheckpointStore",
    "Manifest",
    "Restored",
    "read_file",
    "read_manifest",
    "save_model",
    "write_file",
]
