"""The strategies of training: who has which state, and how gradients meet.

What `StatePlacement` and `GradientExchange` answer in each strategy, and which workers average:

==================  ============  ==============  =============  =================  =============
strategy            `replicates`  `is_unsharded`  `is_complete`  `keeps_all_equal`  these average
==================  ============  ==============  =============  =================  =============
equal bits          yes           all             yes            yes                none: adds up
one worker          yes           all             yes            no                 1
Horovod             yes           all             yes            yes                all
independent models  if wrapped    all             yes            no                 all, or 1
replicated          yes           all             yes            yes                all
optimizer           yes           models          no             yes                all
full                yes           nothing         no             yes                all
==================  ============  ==============  =============  =================  =============

Only equal bits has `divides_by_counts`, `sums_exactly`, `counts_in_commit`, and `gathers_metrics`.
"""

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

from raysgd._internal.arguments import as_dict, as_int
from raysgd.loop.state_placement import StatePlacement
from raysgd.torch.options import TorchOptions
from raysgd.torch.register_checks import check_fully_shardable, check_shardable
from raysgd.torch.strategies import conflicts
from raysgd.torch.strategies.equal_bits import EqualBitsExchange
from raysgd.torch.strategies.exchange import GradientExchange
from raysgd.torch.strategies.horovod import HorovodExchange
from raysgd.torch.strategies.replicated_exchange import (
    DDPExchange,
    IndependentModelsPlacement,
    UserDDPExchange,
)
from raysgd.torch.strategies.sharded_optimizer import ShardedOptimizersPlacement
from raysgd.torch.train_state import TorchTrainState


class Strategy(NamedTuple):
    """Makes the `StatePlacement` and the `GradientExchange` of a strategy.

    `register` calls `check` and `new_placement`, moves the models, and calls `new_exchange`.
    `Options.layout` is the third part of a strategy.
    """

    new_exchange: Callable[[TorchTrainState], GradientExchange]
    new_placement: Callable[[TorchTrainState, Mapping[str, Any]], StatePlacement] = lambda *_: (
        StatePlacement()
    )
    """Gets ``sharding_args``. By default, every worker has the whole state."""
    sharding_args: Sequence[str] | None = None
    """Keys of ``sharding_args``, if the strategy is a value of ``sharding``."""
    check: Callable[[str, Sequence[torch.nn.Module], Sequence[torch.optim.Optimizer]], None] = (
        lambda *_: None
    )
    """Raises ValueError if it cannot shard the models or optimizers of a call of ``register``."""


def _fully_sharded() -> ModuleType:
    from raysgd.torch.strategies import fully_sharded  # imports for a second

    return fully_sharded


STRATEGIES = {
    "equal bits": Strategy(EqualBitsExchange),
    "one worker": Strategy(UserDDPExchange),
    "Horovod": Strategy(HorovodExchange),
    "independent models": Strategy(UserDDPExchange, IndependentModelsPlacement),
    "replicated": Strategy(DDPExchange),
    "optimizer": Strategy(
        DDPExchange, ShardedOptimizersPlacement, ("num_copies",), check_shardable
    ),
    "full": Strategy(
        lambda train_state: _fully_sharded().FullyShardedExchange(train_state),
        lambda *arguments: _fully_sharded().FullyShardedPlacement(*arguments),
        sharding_args=("num_copies", "wrap_classes"),
        check=check_fully_shardable,
    ),
}


def as_sharding_args(
    train_state: TorchTrainState,
    sharding: Any,
    arguments: Any,
    models: Sequence[torch.nn.Module],
    ddp_args: Mapping[str, Any],
) -> Mapping[str, Any]:
    """Check the value of ``sharding``. Return ``sharding_args`` without the keys that are None."""
    known = [name for name, row in STRATEGIES.items() if row.sharding_args is not None]
    shown = ", ".join(f'"{name}"' for name in known)
    if sharding not in (None, *known):
        raise ValueError(f"register(sharding={sharding!r}): sharding must be {shown}, or None.")
    sharding_args = as_dict("register", "sharding_args", arguments)
    if sharding is None:
        if sharding_args:
            raise ValueError(
                f"register(sharding_args={sharding_args!r}) has no effect without sharding. Pass "
                f"sharding too: {shown}."
            )
        return {}
    strategy, options = STRATEGIES[sharding], train_state.settings.options
    allowed = strategy.sharding_args or ()
    if unknown := sorted(str(name) for name in sharding_args if name not in allowed):
        raise ValueError(
            f"register(sharding_args=...) has {unknown}. With sharding={sharding!r} it takes only "
            f"{', '.join(map(repr, allowed))}."
        )
    sharding_args = {name: value for name, value in sharding_args.items() if value is not None}
    if (given := sharding_args.get("num_copies")) is not None:
        sharding_args["num_copies"] = as_int("register(sharding_args=...)", "num_copies", given, 0)
    caller, scales = f'register(sharding="{sharding}")', train_state.precision.scales_loss
    conflicts.check(sharding, caller, options, models, ddp_args, scales)
    if (name := strategy_name(options, sharding, distributed=True)) != sharding:
        conflicts.refuse(caller, f'the strategy "{name}", which options of the trainer have chosen')
    strategy.check(caller, models, train_state.optimizers)
    return sharding_args


def strategy_name(options: TorchOptions, sharding: str | None, distributed: bool) -> str:
    """Return the key of the strategy for the arguments of the trainer and of ``register``.

    Options win over `sharding`: `conflicts.py` lists those that a value of `sharding` refuses.
    """
    if options.exact is not None:
        return "equal bits"
    if not (options.wrap_ddp or options.use_horovod):
        return "independent models"
    if not distributed:
        return "one worker"
    if options.use_horovod:
        return "Horovod"
    return sharding or "replicated"
