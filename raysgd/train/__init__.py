"""Train with a function that you write completely. raysgd runs the function on workers.

Importing this package imports neither Ray nor a framework.
"""

from raysgd._internal.imports import lazy_names
from raysgd.train.callbacks.callback import TrainingCallback
from raysgd.train.checkpoint import Checkpoint, CheckpointConfig, CheckpointStrategy
from raysgd.train.configs import FailureConfig, RunConfig, ScalingConfig
from raysgd.train.data_parallel_trainer import DataParallelTrainer
from raysgd.train.framework import Backend, BackendConfig
from raysgd.train.result import Result
from raysgd.train.session import (
    TrainContext,
    get_checkpoint,
    get_context,
    get_dataset_shard,
    load_checkpoint,
    local_rank,
    report,
    save_checkpoint,
    world_rank,
    world_size,
)
from raysgd.train.trainer import Trainer, TrainingIterator

__all__ = [
    "Backend",
    "BackendConfig",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointStrategy",
    "DataParallelTrainer",
    "FailureConfig",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "TrainContext",
    "Trainer",
    "TrainingCallback",
    "TrainingIterator",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "load_checkpoint",
    "local_rank",
    "report",
    "save_checkpoint",
    "world_rank",
    "world_size",
]


_MODULES = ("horovod", "lightning", "tensorflow", "torch")  # scripts need no second import
__getattr__ = lazy_names(__name__, {name: f"{__name__}.{name}" for name in _MODULES})
