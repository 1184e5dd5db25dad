"""Runs a TensorFlow operator in a worker: environment, operator, and state."""

import contextlib
import os
import sys
from collections.abc import Mapping
from typing import Any

from raysgd._internal.dynamo import postpone_dynamo
from raysgd._internal.imports import frozen_imports, refuse_triton
from raysgd._internal.runner import WorkerContext
from raysgd.comm.tensorflow import check_tensorflow
from raysgd.loop.operator_base import create_operator
from raysgd.loop.operator_runner import OperatorRunner
from raysgd.tf.options import KerasOptions, KerasSettings


class KerasRunner(OperatorRunner):
    """Runs one operator. `prepare` sets the environment, and then imports TensorFlow."""

    _options: KerasOptions

    # ---- lifecycle

    def prepare(self, context: WorkerContext) -> None:
        check_tensorflow("TFTrainer")
        if context.is_in_driver:
            return
        refuse_triton()
        os.environ.update(self._options.environment)
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        if context.gpu_index is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = context.visible_gpus[context.gpu_index]
        elif not self._options.use_gpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
        if "torch" in sys.modules:  # for the backend
            postpone_dynamo()
        with frozen_imports():
            import tensorflow as tf

        threads = max(1, int(context.num_cpus))
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)

    def setup(self, context: WorkerContext) -> None:
        with contextlib.nullcontext() if context.is_in_driver else frozen_imports():
            import keras
            import tensorflow as tf

            from raysgd.tf.private_keras import get_global_attribute, set_global_attribute
            from raysgd.tf.state_access import KerasStateAccess

        # dtype_policy() would set a missing policy, and set_floatx in `setup` would come too late.
        policy = get_global_attribute("dtype_policy")
        restore = self.restoring.callback
        restore(keras.config.set_floatx, keras.config.floatx())
        restore(set_global_attribute, "dtype_policy", policy)
        restore(tf.config.run_functions_eagerly, tf.config.functions_run_eagerly())
        options = self._options
        if options.use_gpu and not tf.config.list_physical_devices("GPU"):
            raise RuntimeError(
                f"TensorFlow on worker {context.world_rank} ({context.node_ip}) finds no GPU. "
                "Install TensorFlow with CUDA there, or pass use_gpu=False."
            )
        operator_cls, config, arguments = self._worker_arguments(context)
        operator = build_operator(operator_cls, config, KerasSettings(**arguments))
        self.start_operator(operator, KerasStateAccess(operator._train_state))

    # ---- answers to requests

    def update_schedulers(self, call_number: int, metric: float) -> None:
        raise NotImplementedError(
            "TFTrainer does not support update_scheduler(metric). Give the optimizer a "
            "LearningRateSchedule, or set operator.optimizer.learning_rate with "
            "trainer.apply_all_operators(fn)."
        )


def build_operator(
    operator_cls: type[Any], config: Mapping[str, Any], settings: KerasSettings
) -> Any:
    """Create an operator and run its ``setup``."""
    import keras
    import tensorflow as tf

    from raysgd.tf.keras import policy_name
    from raysgd.tf.private_keras import get_random_seed
    from raysgd.tf.registration import build_registered
    from raysgd.tf.train_state import KerasTrainState

    if (policy := policy_name(settings.options.use_fp16)) is not None:
        keras.mixed_precision.set_global_policy(policy)
    # With this seed, data sets without a seed of their own shuffle equally on all workers.
    tf.random.set_seed(settings.options.seed % 2**31)
    train_state = KerasTrainState(settings)
    operator = create_operator(operator_cls, config, train_state)
    if (seed := get_random_seed()) is not None:
        train_state.data.reseed(seed)  # also the order of arrays, as in fit()
    train_state.attributes = vars(operator)
    build_registered(train_state)
    return operator
