"""Training functions for TensorFlow."""

from dataclasses import dataclass
from typing import Any

from raysgd._internal.arguments import check_timeout
from raysgd.backends import CollectiveBackend
from raysgd.comm.tensorflow import TensorflowBackend, check_tensorflow
from raysgd.train.backend import BackendConfig
from raysgd.train.data_parallel_trainer import DataParallelTrainer

__all__ = ["TensorflowConfig", "TensorflowTrainer", "prepare_dataset_shard"]


@dataclass
class TensorflowConfig(BackendConfig):
    """Settings of the TensorFlow backend.

    Each worker gets ``TF_CONFIG`` and the driver's ``TF_USE_LEGACY_KERAS`` before it imports
    TensorFlow. Create a ``tf.distribute.MultiWorkerMirroredStrategy`` in the function. A process
    can join only one group, so all workers restart after an error.
    """

    timeout_s: float = 1800

    def __post_init__(self) -> None:
        check_tensorflow('backend="tensorflow"')
        check_timeout(type(self).__name__, self.timeout_s)

    def collective_backend(self, use_gpu: bool = False) -> CollectiveBackend:
        return TensorflowBackend("tensorflow", self.timeout_s)


class TensorflowTrainer(DataParallelTrainer):
    """A `DataParallelTrainer` for TensorFlow, with the settings of `tensorflow_config`."""

    def __init__(
        self, *arguments: Any, tensorflow_config: TensorflowConfig | None = None, **others: Any
    ) -> None:
        super().__init__(
            *arguments, backend_config=tensorflow_config or TensorflowConfig(), **others
        )


def prepare_dataset_shard(tf_dataset_shard: Any) -> Any:
    """Return a ``tf.data.Dataset`` with auto-sharding switched off.

    The argument already is this worker's shard, such as ``get_dataset_shard().to_tf(...)``. With
    auto-sharding, the strategy would shard it again.
    """
    import tensorflow as tf

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return tf_dataset_shard.with_options(options)
