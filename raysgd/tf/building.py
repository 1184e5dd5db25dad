"""A TensorFlow operator, built and set up in the scope of its strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from raysgd.context import WorkerContext
from raysgd.loop.operator_base import create_operator
from raysgd.tf.communication import Alone, Communication, HorovodGroup, StrategyGroup
from raysgd.tf.operator import TrainingOperator
from raysgd.tf.precision import policy_name, set_policy
from raysgd.tf.registration import KerasRegistration, TFSettings

__all__ = ["build_operator", "communication_of"]


def communication_of(
    context: WorkerContext, use_horovod: bool = False, timeout_s: float = 1800
) -> Communication:
    """Return how this worker talks to the others; their group exists already.

    Raises:
        RuntimeError: if the strategy would train several replicas in this worker.
    """
    if not context.distributed:
        return Alone()
    if use_horovod:
        return HorovodGroup(context.world_size, context.world_rank)
    options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=timeout_s)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    if strategy.num_replicas_in_sync != context.world_size:
        raise RuntimeError(
            f"The strategy has {strategy.num_replicas_in_sync} replicas for {context.world_size} "
            "workers; each worker must see one GPU, or none."
        )
    return StrategyGroup(strategy, context.world_size, context.world_rank)


def build_operator(
    operator_cls: type[TrainingOperator],
    config: Mapping[str, Any],
    settings: TFSettings,
    communication: Communication,
    seed: int,
) -> TrainingOperator:
    """Create an operator and run its ``setup`` in the strategy's scope.

    Raises:
        RuntimeError: if its setup registered nothing, or a model that cannot be built.
    """
    policy = policy_name(settings.options.use_fp16)
    if policy is not None:
        set_policy(policy)
    # data sets that shuffle without a seed of their own do it alike on all workers
    tf.random.set_seed(seed % 2**31)
    registration = KerasRegistration(settings, communication, seed)
    operator: TrainingOperator = create_operator(operator_cls, config, registration)
    with communication.strategy.scope():
        operator.setup(operator.config)
        if not registration.registered:
            raise RuntimeError(
                f"{operator_cls.__name__}.setup did not register anything. Call "
                "self.register(models=..., optimizers=...) in it."
            )
        registration.complete()
    registration.broadcast_initial_state()
    return operator
