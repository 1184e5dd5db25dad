"""Checks of the arguments of ``register``."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from raysgd._internal.arguments import check_flags, check_int, checked_dict
from raysgd.loop.train_state import listed
from raysgd.torch import ddp
from raysgd.torch.features.sharded_optimizer import ELEMENTWISE
from raysgd.torch.options import TorchOptions
from raysgd.torch.sharding.pieces import is_dense

__all__ = [
    "check_criteria",
    "check_divisible",
    "check_same_parameters",
    "check_shardable",
    "check_static_graphs",
    "check_step_freq",
    "check_untrained",
    "checked",
    "checked_sharding",
    "has_static_graph",
    "is_trained",
    "needs_metric",
    "warn_of_own_schedulers",
    "warn_of_strangers",
    "warn_of_unregistered",
]

logger = logging.getLogger(__name__)

_SHARDING_ARGS = {
    "optimizer": ("copies",),
    "full": ("copies", "init_fn", "offload", "reshard_after_forward", "wrap"),
}


def check_criteria(criteria: Sequence[Any]) -> None:
    for each in criteria:
        if isinstance(each, type):
            raise TypeError(
                f"register(criterion={each.__name__}): must be an object, not a class: "
                f"{each.__name__}()."
            )
        if not callable(each):
            raise TypeError(f"register(criterion={each!r}): must be a function or a module.")


def has_static_graph(models: list[torch.nn.Module]) -> bool:
    return any(isinstance(m, DistributedDataParallel) and m.static_graph for m in models)


def check_static_graphs(models: list[torch.nn.Module]) -> None:
    if has_static_graph(models):
        raise ValueError(
            "DistributedDataParallel(static_graph=True) does not work with "
            "register(gradient_accumulation_steps=...). Leave static_graph out, or do not "
            "accumulate."
        )


def check_untrained(
    unfrozen: Mapping[int, int],
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Reject training of parameters that were frozen at `register`.

    Args:
        unfrozen: ids of parameters that require gradients only since then, with the index of their
            model.
        models: the registered models.
        optimizers: the registered optimizers.
    """
    trained = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    for identity, index in unfrozen.items():
        if identity in trained:
            raise RuntimeError(
                f"Model {index} of those registered, a {type(models[index]).__name__}, has "
                "parameters that required no gradients at register() and do now. The workers would "
                "not average their gradients. Register the model first, with "
                'ddp_args={"find_unused_parameters": True}, and freeze parameters afterwards.'
            )


def check_same_parameters(
    models: Sequence[torch.nn.Module], dtypes: Mapping[torch.nn.Parameter, torch.dtype]
) -> None:
    """Reject training of parameters that are missing in `dtypes` or have changed their dtype."""
    for index, model in enumerate(models):
        for name, parameter in model.named_parameters():
            before = dtypes.get(parameter)
            if parameter.requires_grad and before is not parameter.dtype:
                how = "is new" if before is None else f"was cast from {before} to {parameter.dtype}"
                raise RuntimeError(
                    f"Model {index} of those registered, a {type(model).__name__}, changed after "
                    f"register(): its parameter {name} {how}. The workers would not average its "
                    "gradients. Complete and cast the model before you register it."
                )


def check_step_freq(
    schedulers: Sequence[Any], frequency: str | None, monitor: str | None = None
) -> None:
    if frequency is None:
        raise ValueError(
            'register(schedulers=...): pass scheduler_step_freq="batch", "epoch" or "manual" to '
            "the trainer."
        )
    if frequency != "manual" and monitor is None and any(map(needs_metric, schedulers)):
        raise ValueError(
            f"ReduceLROnPlateau needs a metric, and scheduler_step_freq={frequency!r} has none. "
            'Pass scheduler_step_freq="epoch" and monitor="val_loss" to the trainer, or "manual", '
            "and call trainer.update_scheduler(metric)."
        )


def needs_metric(scheduler: Any) -> bool:
    return isinstance(scheduler, ReduceLROnPlateau)


def checked(name: str, given: Any, kind: type | None) -> list[Any]:
    """Return the arguments as a list. Without a `kind`, each must have a method ``step``."""
    members = listed(given)
    for member in members:
        fits = isinstance(member, kind) if kind else hasattr(member, "step")
        if not fits:
            expected = f"torch {kind.__name__} objects" if kind else "learning-rate schedulers"
            raise TypeError(
                f"register({name}=...) must be one or a list of {expected}, but got "
                f"{repr(member)[:200]}."
            )
    if not members:
        raise ValueError(f"register({name}=...) is empty; at least one is needed.")
    return members


def checked_sharding(
    sharding: Any,
    arguments: Any,
    options: TorchOptions,
    optimizers: Sequence[torch.optim.Optimizer],
) -> Any:
    """Return ``sharding_args`` without the keys that are None."""
    if sharding not in (None, *_SHARDING_ARGS):
        raise ValueError(f'register(sharding={sharding!r}): must be "optimizer", "full" or None.')
    given = checked_dict("register", "sharding_args", arguments)
    if given and sharding is None:
        raise ValueError(
            f'register(sharding_args={given!r}): these are for sharding="optimizer" or "full"; '
            "pass it too."
        )
    allowed = _SHARDING_ARGS.get(sharding, ())
    if unknown := sorted(str(name) for name in given if name not in allowed):
        raise ValueError(
            f"register(sharding_args=...) has {unknown}; with sharding={sharding!r} it takes "
            f"{', '.join(map(repr, allowed))} alone."
        )
    given = {name: value for name, value in given.items() if value is not None}
    where = "register(sharding_args=...)"
    if "copies" in given:
        check_int(where, "copies", given["copies"], 0)
    check_flags(where, **{n: given[n] for n in ("offload", "reshard_after_forward") if n in given})
    _check_wrap(given.get("wrap"))
    if sharding is None:
        return {}
    others = {
        'backend="horovod"': options.use_horovod,
        'use_fp16="apex"': options.use_fp16 == "apex",
        "wrap_ddp=False": not options.wrap_ddp,
    }
    for name in (name for name, is_given in others.items() if is_given):
        raise ValueError(
            f'register(sharding="{sharding}") does not work with {name} of the trainer. Leave out '
            "one of the two."
        )
    for optimizer in optimizers:
        if type(optimizer) not in ELEMENTWISE:
            names = ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))
            raise ValueError(
                f'register(sharding="{sharding}") does not know {type(optimizer).__name__}. The '
                f"optimizer must update each element by itself: {names} of torch.optim do."
            )
    return given


def _check_wrap(wrap: Any) -> None:
    kinds = wrap if isinstance(wrap, list | tuple) else [wrap]
    are_kinds = kinds and all(isinstance(kind, type) for kind in kinds)
    is_function = callable(wrap) and not isinstance(wrap, torch.nn.Module)
    if not (wrap is None or are_kinds or is_function):
        raise TypeError(
            f"register(sharding_args={{'wrap': {wrap!r}}}): must be a class of modules, a list of "
            "them, or a function that takes a module and returns True or False."
        )


def check_shardable(
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    compile: bool,
    ddp_args: bool,
    scales: bool,
) -> None:
    """Reject arguments that do not work with sharded models."""
    given = 'register(sharding="full")'
    if len(optimizers) != 1:
        raise ValueError(f"{given} takes one optimizer, with groups, and got {len(optimizers)}.")
    is_compiled = any(ddp.plain(model) is not ddp.unwrap(model) for model in models)
    if compile or is_compiled:
        what = "torch.compile(model)" if is_compiled else "register(compile=...)"
        raise ValueError(f"{given} does not work with {what}. Leave out one of the two.")
    if ddp_args or any(isinstance(model, DistributedDataParallel) for model in models):
        raise ValueError(f"{given} uses no DistributedDataParallel: leave it, and ddp_args, out.")
    if scales:
        raise ValueError(
            f"{given} does not work with float16, whose gradients are scaled. Pass "
            "amp_dtype=torch.bfloat16 to the trainer."
        )
    for model in models:
        for name, parameter in model.named_parameters():
            if not parameter.dim() or not parameter.numel() or not parameter.is_contiguous():
                raise ValueError(
                    f"{given} divides parameters by rows, and {type(model).__name__}.{name}, of "
                    f"shape {tuple(parameter.shape)} and strides {tuple(parameter.stride())}, has "
                    "no contiguous rows. Give it a dimension, or make it contiguous()."
                )


def check_divisible(
    sharding: str,
    optimizers: Sequence[torch.optim.Optimizer],
    models: Sequence[torch.nn.Module],
) -> None:
    """Reject parameters whose update cannot be sharded."""
    for model in models:
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
                raise ValueError(
                    f'register(sharding="{sharding}"): {type(module).__name__}(sparse=True) has '
                    "sparse gradients, which cannot be divided. Leave sparse out."
                )
    registered = {id(parameter) for model in models for parameter in model.parameters()}
    for optimizer in optimizers:
        trained = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        if strangers := [p for p in trained if id(p) not in registered]:
            raise ValueError(
                f'register(sharding="{sharding}"): {type(optimizer).__name__} has '
                f"{len(strangers)} parameters that are in no registered model. Register it."
            )
        for parameter in trained:
            if not is_dense(parameter):
                raise ValueError(
                    f'register(sharding="{sharding}"): a parameter of shape '
                    f"{tuple(parameter.shape)} and strides {tuple(parameter.stride())} does not "
                    "fill its memory, and cannot be divided. Make it contiguous()."
                )


def warn_of_strangers(optimizers: list[torch.optim.Optimizer], modules: list[Any]) -> None:
    """Warn about an optimizer without parameters of the registered models or the criterion."""
    registered = {id(p) for m in modules if isinstance(m, torch.nn.Module) for p in m.parameters()}
    for optimizer in optimizers:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(parameter) in registered for parameter in held):
            warnings.warn(
                f"register(optimizers=...): {type(optimizer).__name__} updates no parameter of the "
                "registered models. Create it with the parameters() of a registered model.",
                RuntimeWarning,
                stacklevel=5,  # the line of register() in the user's setup
            )


def warn_of_own_schedulers(operator: Any, schedulers: Sequence[Any], frequency: str | None) -> None:
    """Warn about schedulers that no attribute holds. RaySGD v1 did not step them."""
    kept = [held for value in vars(operator).values() for held in listed(value)]
    lost = [each for each in schedulers if not any(each is held for held in kept)]
    if lost and frequency in ("batch", "epoch"):
        logger.warning(
            "%s registered a %s and keeps it in no attribute: with scheduler_step_freq=%r it steps "
            'nevertheless, unlike in RaySGD v1. Keep it as self.scheduler, or pass "manual".',
            type(operator).__name__,
            type(lost[0]).__name__,
            frequency,
        )


def warn_of_unregistered(operator: Any, registered: Sequence[Any]) -> None:
    """Warn about attributes that look trained but do not belong to registered objects."""
    known = {*map(id, registered), *map(id, operator.config.values())}
    for each in registered:  # an optimizer may contain another
        known.update(map(id, getattr(each, "__dict__", {}).values()))
    models = [each for each in registered if isinstance(each, torch.nn.Module)]
    known.update(id(parameter) for model in models for parameter in model.parameters())
    found = [
        f"{place} ({type(held).__name__})"
        for name, value in vars(operator).items()
        for place, held in _places(f"self.{name}", value)
        if id(held) not in known and _looks_trained(held, known)
    ]
    if found:
        logger.warning(
            "%s.setup did not register %s. The workers do not keep what is not registered equal, "
            "and checkpoints do not contain it. Pass modules and optimizers to self.register(...). "
            "If a module is not trained, call requires_grad_(False) on it.",
            type(operator).__name__,
            ", ".join(found),
        )


def _places(place: str, value: Any) -> list[tuple[str, Any]]:
    """Return the value of an attribute, or its items, each with its name."""
    if not isinstance(value, Mapping | list | tuple):
        return [(place, value)]
    members = value.items() if isinstance(value, Mapping) else enumerate(value)
    return [(f"{place}[{key!r}]", held) for key, held in members]


def _looks_trained(held: Any, registered: Collection[int]) -> bool:
    if isinstance(held, torch.nn.Parameter):
        return held.requires_grad
    if not isinstance(held, torch.nn.Module) or isinstance(held, AveragedModel):
        return isinstance(held, torch.optim.Optimizer)
    is_metric = any(kind.__module__.startswith("torchmetrics.") for kind in type(held).__mro__)
    return not is_metric and any(
        parameter.requires_grad and id(parameter) not in registered
        for parameter in held.parameters()
    )


def is_trained(
    criterion: Any, optimizers: list[torch.optim.Optimizer], models: list[torch.nn.Module]
) -> bool:
    """Return whether an optimizer trains parameters of the criterion, such as class centers."""
    if not isinstance(criterion, torch.nn.Module):
        return False
    stepped = {id(p) for o in optimizers for g in o.param_groups for p in g["params"]}
    in_models = {id(p) for model in models for p in model.parameters()}
    own = {id(p) for p in criterion.parameters() if p.requires_grad}
    return bool(own & stepped - in_models)
