"""The strategies of training: who has which state, and how gradients meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from raysgd.loop.replication import Replication
from raysgd.torch.conflicts import MODES_OF_SHARDING
from raysgd.torch.options import TorchOptions
from raysgd.torch.strategies.equal_bits import EqualBitsGradients
from raysgd.torch.strategies.exchange import GradientExchange
from raysgd.torch.strategies.horovod import HorovodGradients
from raysgd.torch.strategies.replicated import OwnModels, ReplicatedGradients, UserWrappers
from raysgd.torch.strategies.sharded_optimizer import ShardedOptimizers

if TYPE_CHECKING:
    from raysgd.torch.train_state import TorchTrainState


class Strategy(NamedTuple):
    """Makes the two ports of a mode. `Options.layout` is the third part of a strategy."""

    replication: Callable[[TorchTrainState, Mapping[str, Any]], Replication]
    """Gets ``sharding_args``."""
    exchange: Callable[[TorchTrainState], GradientExchange]


def _replicated_everywhere(*_: Any) -> Replication:
    return Replication()


def _fully_sharded_model(state: TorchTrainState, sharding_args: Mapping[str, Any]) -> Replication:
    from raysgd.torch.strategies.fully_sharded import FullyShardedModel  # imports for a second

    return FullyShardedModel(state, sharding_args)


def _fully_sharded_gradients(state: TorchTrainState) -> GradientExchange:
    from raysgd.torch.strategies.fully_sharded import FullyShardedGradients

    return FullyShardedGradients(state)


STRATEGIES = {
    "equal bits": Strategy(_replicated_everywhere, EqualBitsGradients),
    "one worker": Strategy(_replicated_everywhere, UserWrappers),
    "Horovod": Strategy(_replicated_everywhere, HorovodGradients),
    "own models": Strategy(OwnModels, UserWrappers),
    "replicated": Strategy(_replicated_everywhere, ReplicatedGradients),
    "sharded optimizers": Strategy(ShardedOptimizers, ReplicatedGradients),
    "fully sharded": Strategy(_fully_sharded_model, _fully_sharded_gradients),
}


def choose_strategy(
    state: TorchTrainState, sharding: str | None, sharding_args: Mapping[str, Any]
) -> None:
    """Give a state the two ports of its mode."""
    strategy = STRATEGIES[mode_of(state.settings.options, sharding, state.context.distributed)]
    state.replication = strategy.replication(state, sharding_args)
    state.exchange = strategy.exchange(state)


def mode_of(options: TorchOptions, sharding: str | None, distributed: bool) -> str:
    """Return the key of the strategy for the arguments of the trainer and of ``register``."""
    if options.layout.is_fixed:
        return "equal bits"
    if not (options.wrap_ddp or options.use_horovod):
        return "own models"
    if not distributed:
        return "one worker"
    if options.use_horovod:
        return "Horovod"
    return MODES_OF_SHARDING[sharding]
