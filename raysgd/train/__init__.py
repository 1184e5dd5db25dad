"""Train with a function that you write completely. raysgd runs the function on workers.

Importing this package imports neither Ray nor a framework.
"""

from raysgd._internal import imports
from raysgd.train.backend import Backend as Backend
from raysgd.train.backend import BackendConfig as BackendConfig
from raysgd.train.callbacks.callback import TrainingCallback as TrainingCallback
from raysgd.train.checkpoint import Checkpoint as Checkpoint
from raysgd.train.checkpoint import CheckpointConfig as CheckpointConfig
from raysgd.train.checkpoint import CheckpointStrategy as CheckpointStrategy
from raysgd.train.configs import FailureConfig as FailureConfig
from raysgd.train.configs import RunConfig as RunConfig
from raysgd.train.configs import ScalingConfig as ScalingConfig
from raysgd.train.data_parallel_trainer import DataParallelTrainer as DataParallelTrainer
from raysgd.train.result import Result as Result
from raysgd.train.session import TrainContext as TrainContext
from raysgd.train.session import get_checkpoint as get_checkpoint
from raysgd.train.session import get_context as get_context
from raysgd.train.session import get_dataset_shard as get_dataset_shard
from raysgd.train.session import load_checkpoint as load_checkpoint
from raysgd.train.session import local_rank as local_rank
from raysgd.train.session import report as report
from raysgd.train.session import save_checkpoint as save_checkpoint
from raysgd.train.session import world_rank as world_rank
from raysgd.train.session import world_size as world_size
from raysgd.train.trainer import Trainer as Trainer
from raysgd.train.trainer import TrainingIterator as TrainingIterator

# Export every function and class above.
__all__ = sorted(name for name, value in globals().items() if callable(value))

_MODULES = ("horovod", "lightning", "tensorflow", "torch")  # scripts need no second import
__getattr__ = imports.lazy_names(__name__, {name: f"{__name__}.{name}" for name in _MODULES})
