"""Create a Keras operator with its training state and its features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from raysgd.loop.operator_base import check_registered, create_operator
from raysgd.tf.communication import Communication
from raysgd.tf.features import KerasAverages, KerasOptimization, KerasReplication
from raysgd.tf.keras import policy_name
from raysgd.tf.operator import TrainingOperator
from raysgd.tf.train_state import KerasTrainState, TFSettings


def build_operator(
    operator_cls: type[TrainingOperator],
    config: Mapping[str, Any],
    settings: TFSettings,
    communication: Communication,
    seed: int,
) -> TrainingOperator:
    """Create an operator and run its ``setup``."""
    policy = policy_name(settings.options.use_fp16)
    if policy is not None:
        keras.mixed_precision.set_global_policy(policy)
    # With this seed, data sets without a seed of their own shuffle equally on all workers.
    tf.random.set_seed(seed % 2**31)
    train_state = KerasTrainState(settings, communication, seed)
    optimization = KerasOptimization(train_state)
    train_state.features = [
        KerasReplication(train_state),
        optimization,
        train_state.parts,
        KerasAverages(train_state),
    ]
    operator: TrainingOperator = create_operator(operator_cls, config, train_state, optimization)
    operator.setup(operator.config)
    check_registered(operator)
    _complete(train_state)
    return operator


def _complete(state: KerasTrainState) -> None:
    """Build unbuilt models and optimizers, with the shapes of the data."""
    if len(state.models) == 1 and not state.models[0].built:
        sources = map(state.data.readable, filter(state.data.has, ("train", "validation")))
        spec = next((source.reads() for source in sources if source.sharded), None)
        if spec is not None:
            features, *_ = keras.utils.unpack_x_y_sample_weight(spec)
            state.models[0](tf.nest.map_structure(_sample_of, features))
    for model in state.models:
        if not model.built:
            raise RuntimeError(
                f"The model {model.name!r} is not built. Add an Input layer, or call the model "
                "once in setup."
            )
    for optimizer, variables in state.trained():
        if not optimizer.built:
            optimizer.build(variables)


def _sample_of(spec: Any) -> Any:
    shape = [1 if size is None else size for size in spec.shape[1:]]
    return tf.zeros([1, *shape], spec.dtype)
