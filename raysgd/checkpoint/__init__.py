"""Checkpoint files and folders."""

from raysgd.checkpoint.file import read_file as read_file
from raysgd.checkpoint.file import read_manifest as read_manifest
from raysgd.checkpoint.file import write_file as write_file
from raysgd.checkpoint.manifest import Manifest as Manifest
from raysgd.checkpoint.store import CheckpointStore as CheckpointStore
from raysgd.checkpoint.store import RestoredCheckpoint as RestoredCheckpoint
from raysgd.checkpoint.weights import save_model as save_model

# Export every function and class above.
__all__ = sorted(name for name, value in globals().items() if callable(value))
