"""Checks of the arguments of ``register``, and of registered objects that change later."""

import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter  # has no public name

from raysgd._internal.nested import is_user_object
from raysgd.data.source import size_and_rank_of
from raysgd.loop.operator_base import as_list
from raysgd.torch.tensors import ELEMENTWISE, parameters_of

logger = logging.getLogger(__name__)

_MAX_ITEMS = 1000
"""Maximum size of a container of an operator whose items are checked."""

_OF_SCHEDULER = ("step", "state_dict", "load_state_dict")
_SCHEDULER = f"a scheduler with the methods {', '.join(_OF_SCHEDULER)}"
_SCRIPTED = "Register the module itself. For speed, register torch.compile(module)."
_UNUSABLE = {
    "RecursiveScriptModule": _SCRIPTED,
    "TopLevelTracedModule": _SCRIPTED,
    "ZeroRedundancyOptimizer": "Register the optimizer itself, with "
    'register(..., sharding="optimizer").',
}


def required_arguments(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments without which a function cannot be called."""
    parameters = inspect.signature(function).parameters.values()
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]


def as_registered(name: str, argument: Any, kind: type | None) -> list[Any]:
    """Return the arguments as a list. Without a `kind`, each must have a scheduler's methods."""
    members = as_list(argument)
    for member in members:
        fits = isinstance(member, kind) if kind else all(hasattr(member, m) for m in _OF_SCHEDULER)
        if not fits:
            expected = f"a torch {kind.__name__}" if kind else _SCHEDULER
            raise TypeError(
                f"register({name}=...) got {member!r:.200}. Pass {expected}, or a list."
            )
        modules = member.modules() if isinstance(member, torch.nn.Module) else [member]
        if unusable := _UNUSABLE.keys() & {type(each).__name__ for each in modules}:
            cls_name = unusable.pop()
            raise TypeError(f"register({name}=...) cannot use a {cls_name}. {_UNUSABLE[cls_name]}")
        if kind is torch.optim.Optimizer and not hasattr(member, "_optimizer_step_pre_hooks"):
            raise TypeError(
                f"register({name}=...) cannot use a {type(member).__name__}, whose __init__ does "
                "not call super().__init__(). Register the optimizer that it wraps."
            )
    if not members:
        raise ValueError(f"register({name}=...) is empty. Pass at least one.")
    return members


def as_criteria(criterion: Any) -> list[Any]:
    criteria = [] if criterion is None else as_list(criterion)
    for each in criteria:
        if isinstance(each, type) or not callable(each):
            raise TypeError(
                f"register(criterion={each!r:.200}): criterion must be a function, or an object "
                "such as torch.nn.MSELoss()."
            )
    return criteria


def check_step_freq(schedulers: Sequence[Any], frequency: str | None) -> None:
    if frequency is None:
        raise ValueError(
            'register(schedulers=...): pass scheduler_step_freq="batch", "epoch", or "manual" to '
            "the trainer."
        )
    for each in schedulers if frequency != "manual" else ():
        if names := required_arguments(each.step):
            raise ValueError(
                f"{type(each).__name__}.step() needs {', '.join(names)}, but raysgd calls step() "
                'without arguments. Pass scheduler_step_freq="manual" to the trainer, and call '
                "trainer.update_scheduler(value) after each epoch."
            )


def check_related(
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    schedulers: Sequence[Any],
) -> str:
    """Reject optimizers and schedulers of other models. Return a warning about replaced layers."""
    registered = _parameter_ids(models)
    for each in optimizers:
        if registered.isdisjoint(map(id, parameters_of(each))):
            raise ValueError(
                f"register(optimizers=...): no registered model has a parameter of "
                f"{type(each).__name__}. Give it the parameters of the models that you register."
            )
    groups = {id(group) for each in optimizers for group in each.param_groups}
    for each in schedulers:
        scheduled = getattr(getattr(each, "optimizer", None), "param_groups", ())
        if scheduled and groups.isdisjoint(map(id, scheduled)):
            raise ValueError(
                f"register(schedulers=...): {type(each).__name__} changes an optimizer that is not "
                "registered. Create it with an optimizer that you register."
            )
    stepped = {id(p) for each in optimizers for p in parameters_of(each) if p.requires_grad}
    named = (pair for model in models for pair in model.named_parameters())
    untrained = [name for name, p in named if p.requires_grad and id(p) not in stepped]
    if not untrained or not (strangers := stepped - registered):
        return ""
    return (
        f"Optimizers have {len(strangers)} parameters that are in no registered model, and none "
        f"has {', '.join(untrained[:3])}{', …' * (len(untrained) > 3)}. Create optimizers after "
        "replacing layers, and call requires_grad_(False) on parameters that are not trained."
    )


def trained_among(criteria: list[Any], optimizers: list[Any], models: list[Any]) -> list[Any]:
    """Return the criteria with parameters that an optimizer trains, such as class centers."""
    stepped = {id(p) for each in optimizers for p in parameters_of(each) if p.requires_grad}
    stepped -= _parameter_ids(models)
    modules = [each for each in criteria if isinstance(each, torch.nn.Module)]
    return [each for each in modules if stepped & _parameter_ids([each])]


def _parameter_ids(models: Iterable[torch.nn.Module]) -> set[int]:
    return {id(parameter) for model in models for parameter in model.parameters()}


# ---- sharding


def check_shardable(
    caller: str, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Reject optimizers and parameters whose update cannot be sharded."""
    for module in (module for model in models for module in model.modules()):
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
            raise ValueError(
                f"{caller} cannot shard the sparse gradients of {type(module).__name__}"
                "(sparse=True). Leave sparse out."
            )
    registered = _parameter_ids(models)
    for optimizer in optimizers:
        kind = type(optimizer)
        if kind not in ELEMENTWISE:
            names = ", ".join(sorted(each.__name__ for each in ELEMENTWISE))
            raise ValueError(
                f"{caller} cannot shard {kind.__name__}. Use an optimizer of torch.optim that "
                f"updates each element independently of the others: {names}."
            )
        trained = [p for p in parameters_of(optimizer) if p.requires_grad]
        if strangers := [p for p in trained if id(p) not in registered]:
            raise ValueError(
                f"{caller}: {kind.__name__} has {len(strangers)} parameters that are in no "
                "registered model. Register their model."
            )
        for parameter in trained:
            if not parameter.is_contiguous():
                raise ValueError(
                    f"{caller}: a parameter of shape {tuple(parameter.shape)} is not contiguous. "
                    "Make it contiguous(), for example without channels_last."
                )


def check_fully_shardable(
    caller: str, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Reject what `check_shardable` rejects, several optimizers, and parameters without rows."""
    if len(optimizers) != 1:
        raise ValueError(
            f"{caller} got {len(optimizers)} optimizers. Pass one, with parameter groups."
        )
    check_shardable(caller, models, optimizers)
    named = ((model, *each) for model in models for each in model.named_parameters())
    for model, name, parameter in named:
        if not parameter.dim() or not parameter.numel() or not parameter.is_contiguous():
            raise ValueError(
                f"{caller} divides parameters by rows. {type(model).__name__}.{name} has no "
                f"contiguous rows: its shape is {tuple(parameter.shape)}, and its strides are "
                f"{tuple(parameter.stride())}. Use a contiguous parameter that has a dimension "
                "and is not empty."
            )


# ---- what changes after register


def check_same_parameters(
    models: Sequence[torch.nn.Module], dtypes: Mapping[Any, torch.dtype]
) -> None:
    """Reject training of parameters that are missing in `dtypes` or have changed their dtype."""
    for index, model in enumerate(models):
        for name, parameter in model.named_parameters():
            before = dtypes.get(parameter)
            if parameter.requires_grad and before is not parameter.dtype:
                how = "is new" if before is None else f"was cast from {before} to {parameter.dtype}"
                raise RuntimeError(
                    f"The registered model {index}, a {type(model).__name__}, changed after "
                    f"register(): its parameter {name} {how}. Its gradients would not be averaged, "
                    "or no optimizer has it. Complete and cast the model before you register it."
                )


def warn_of_unregistered(operator: Any, registered: Sequence[Any], kinds: tuple[type, ...]) -> None:
    """Warn about attributes that are unregistered modules, if trained, or objects of `kinds`."""
    models = [each for each in registered if isinstance(each, torch.nn.Module)]
    known = {*map(id, registered), *map(id, operator.config.values()), *_parameter_ids(models)}
    for each in registered:  # an optimizer may contain another
        known.update(map(id, getattr(each, "__dict__", {}).values()))
    unregistered = [
        f"{name} ({type(value).__name__})"
        for name, value in attributes_of(operator)
        if id(value) not in known and (isinstance(value, kinds) or _looks_trained(value, known))
    ]
    if unregistered:
        logger.warning(
            "%s.setup did not register %s. Workers do not synchronize unregistered objects, and "
            "checkpoints do not contain them. Pass modules, optimizers, and schedulers to "
            "self.register(...). If a module is not trained, call requires_grad_(False) on it.",
            type(operator).__name__,
            ", ".join(unregistered),
        )


def warn_of_other_loaders(operator: Any, registered: Iterable[Any]) -> None:
    """Warn about DataLoaders in attributes that every worker reads whole."""
    known = set(map(id, (*registered, *operator.config.values())))
    named = [(name, each) for name, each in attributes_of(operator) if id(each) not in known]
    if loaders := [name for name, each in named if _reads_all(each)]:
        logger.warning(
            "Every worker reads all of %s, because raysgd partitions only the loaders of "
            "register_data. To split another loader, give it the sampler DistributedSampler("
            "data, self.world_size, self.world_rank) in on_world_change(self).",
            ", ".join(loaders),
        )


def _reads_all(value: Any) -> bool:
    """Return whether an object is a DataLoader or its iterator, and reads all samples."""
    is_loader = isinstance(value, DataLoader | _BaseDataLoaderIter)
    return is_loader and not any(map(size_and_rank_of, (value, value._index_sampler)))


def is_metric(module: torch.nn.Module) -> bool:
    return any(kind.__module__.startswith("torchmetrics.") for kind in type(module).__mro__)


def attributes_of(operator: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over the attributes of an operator, with names.

    Instead of a small container or an object of user code, yield its items or attributes.
    """
    for name, value in vars(operator).items():
        if name in ("_train_state", "_update_features"):
            continue
        members: Iterable[tuple[str, Any]] = [("", value)]
        if isinstance(value, Mapping | list | tuple):
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            if len(value) <= _MAX_ITEMS:
                members = ((f"[{key!r}]", member) for key, member in items)
        elif hasattr(value, "__dict__") and is_user_object(value):
            members = ((f".{key}", member) for key, member in vars(value).items())
        yield from ((f"self.{name}{key}", member) for key, member in members)


def _looks_trained(value: Any, registered: Collection[int]) -> bool:
    if isinstance(value, torch.nn.Parameter):
        return value.requires_grad
    if not isinstance(value, torch.nn.Module) or isinstance(value, AveragedModel):
        return False
    trained = {id(p) for p in value.parameters() if p.requires_grad}
    return not is_metric(value) and not trained <= set(registered)
