"""All features of the updates of a PyTorch operator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from raysgd.loop.feature import StepFeature
from raysgd.torch.features.bad_steps import BadStepFilter
from raysgd.torch.features.gradient_norms import GradientNorms
from raysgd.torch.features.guard import ReplicaGuard
from raysgd.torch.features.rollback import Rollback
from raysgd.torch.features.speed import Speed

if TYPE_CHECKING:
    from raysgd.torch.train_state import TorchTrainState


def features_of(state: TorchTrainState, max_grad_norm: Any) -> Iterator[StepFeature]:
    """Yield the features in the order of their hooks. The hook `receive` has the reverse order.

    To add a feature, add a line. `TorchTrainState` creates those that work before ``register``.
    """
    options, optimization = state.settings.options, state.optimization
    yield from state.replication.features  # shards; must roll back before Rollback
    yield optimization.precision  # autocast, and the scale of losses
    yield state.exchange  # averages of gradients; equal models
    yield optimization  # from losses to updates
    yield state.frozen  # which states can leave out
    yield state.checks  # errors for code that would make other updates
    if options.bad_steps is not None:
        # Updates that are not applied. This must come before clipping and buffers.
        yield BadStepFilter(state, options.bad_steps)
    yield GradientNorms(state, max_grad_norm)  # clipping
    if state.has_all_parameters:  # otherwise, the shards restore parameters and their optimizer
        yield Rollback(state.optimizers, state.models, options.bad_steps is not None)
    yield state.buffers  # buffers of discarded updates
    yield state.micro_batching  # parts of batches that do not fit into memory
    yield state.schedules  # learning rates
    yield state.averaging  # averages of the weights
    if options.elastic.shares == "measured":
        yield Speed(state)  # for shares that follow speed
    if options.guard is not None and state.context.distributed:
        yield ReplicaGuard(state, options.guard)  # comparisons of the replicas
    yield state.untracked  # warnings about tensors that are not registered
