"""All features of the updates of a PyTorch operator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from raysgd.loop.feature import ShardedFeature, StepFeature
from raysgd.torch.features.gradient_norms import GradientNorms
from raysgd.torch.features.guard import ReplicaGuard
from raysgd.torch.features.rollback import Rollback
from raysgd.torch.features.speed import Speed

if TYPE_CHECKING:
    from raysgd.torch.train_state import TorchTrainState


def features_of(
    state: TorchTrainState,
    sharded: Sequence[ShardedFeature],
    replication: StepFeature | None,
    norms: GradientNorms,
) -> Iterator[StepFeature]:
    """Yield the features in the order of their hooks. The hook `receive` has the reverse order.

    To add a feature, add a line. `TorchTrainState` creates those that work before ``register``.
    """
    options, optimization = state.settings.options, state.optimization
    yield from sharded  # shards of optimizers and models; must roll back before Rollback
    yield optimization.precision  # autocast, and the scale of losses
    if replication is not None:
        yield replication  # averages of gradients; equal models
    yield optimization  # from losses to updates
    yield state.checks  # errors for code that would make other updates
    yield norms  # clipping
    # Parameters and optimizers of discarded updates. Full sharding restores its own.
    watched = ([], []) if replication is None else (state.optimizers, state.models)
    yield Rollback(*watched, updates_late=bool(sharded))
    yield state.buffers  # buffers of discarded updates
    yield state.micro_batching  # parts of batches that do not fit into memory
    yield state.schedules  # learning rates
    yield state.averaging  # averages of the weights
    if options.elastic.shares == "measured":
        yield Speed(state)  # for shares that follow speed
    if options.guard is not None and state.context.distributed:
        yield ReplicaGuard(state, options.guard)  # comparisons of the replicas
    yield state.untracked  # warnings about tensors that are not registered
