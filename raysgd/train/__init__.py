"""Train with a function that you write completely. raysgd runs the function on workers.

Importing this package imports neither Ray nor a framework.
"""

from __future__ import annotations

import importlib
from typing import Any

from raysgd.train.api import TrainContext as TrainContext
from raysgd.train.api import get_checkpoint as get_checkpoint
from raysgd.train.api import get_context as get_context
from raysgd.train.api import get_dataset_shard as get_dataset_shard
from raysgd.train.api import load_checkpoint as load_checkpoint
from raysgd.train.api import local_rank as local_rank
from raysgd.train.api import report as report
from raysgd.train.api import save_checkpoint as save_checkpoint
from raysgd.train.api import world_rank as world_rank
from raysgd.train.api import world_size as world_size
from raysgd.train.callbacks.callback import TrainingCallback as TrainingCallback
from raysgd.train.checkpoint import Checkpoint as Checkpoint
from raysgd.train.checkpoint import CheckpointStrategy as CheckpointStrategy
from raysgd.train.configs import CheckpointConfig as CheckpointConfig
from raysgd.train.configs import FailureConfig as FailureConfig
from raysgd.train.configs import RunConfig as RunConfig
from raysgd.train.configs import ScalingConfig as ScalingConfig
from raysgd.train.data_parallel_trainer import DataParallelTrainer as DataParallelTrainer
from raysgd.train.framework import Backend as Backend
from raysgd.train.framework import BackendConfig as BackendConfig
from raysgd.train.result import Result as Result
from raysgd.train.trainer import Trainer as Trainer
from raysgd.train.trainer import TrainingIterator as TrainingIterator

__all__ = sorted(name for name, value in globals().items() if callable(value) and value is not Any)


def __getattr__(name: str) -> Any:
    if name in ("horovod", "lightning", "tensorflow", "torch"):  # without a second import
        return importlib.import_module(f"raysgd.train.{name}")
    raise AttributeError(f"module 'raysgd.train' has no attribute {name!r}")
