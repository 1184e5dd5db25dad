"""What may be registered."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau

from raysgd.loop.registration import listed

__all__ = [
    "check_plateau",
    "check_static_graphs",
    "check_still_frozen",
    "checked",
    "is_trained",
    "warn_of_strangers",
]


def check_static_graphs(models: list[torch.nn.Module]) -> None:
    """Refuse models whose wrappers cannot leave out an exchange of gradients.

    Raises:
        ValueError: if there is one.
    """
    if any(isinstance(m, DistributedDataParallel) and m.static_graph for m in models):
        raise ValueError(
            "DistributedDataParallel with static_graph=True exchanges gradients in its first "
            "batch, or fails there, and register(gradient_accumulation_steps=...) does so in the "
            "last one of a group. Leave static_graph out, or do not accumulate."
        )


def check_still_frozen(
    frozen: list[tuple[int, torch.nn.Module, list[torch.nn.Parameter]]],
    optimizers: list[torch.optim.Optimizer],
) -> None:
    """Refuse to train parameters whose gradients no wrapper averages.

    Args:
        frozen: those of a model that required no gradients when it was registered, with the model
            and its index.
        optimizers: all that are registered.

    Raises:
        RuntimeError: if one requires gradients by now, and an optimizer has it.
    """
    for index, model, parameters in frozen:
        ids = {id(parameter) for parameter in parameters if parameter.requires_grad}
        if ids and any(
            id(p) in ids for o in optimizers for group in o.param_groups for p in group["params"]
        ):
            raise RuntimeError(
                f"Model {index} of those registered, a {type(model).__name__}, has parameters that "
                "required no gradients at register() and do now. Their gradients would not be "
                "averaged over the workers. Register the model while they require gradients, and "
                'freeze them afterwards, with ddp_args={"find_unused_parameters": True} where a '
                "loss does not reach all of those that its forward pass has."
            )


def check_plateau(schedulers: list[Any], frequency: str) -> None:
    """Refuse schedulers that need a metric where they would step without one.

    Raises:
        ValueError: if there is one.
    """
    for scheduler in schedulers:
        if isinstance(scheduler, ReduceLROnPlateau) and frequency != "manual":
            raise ValueError(
                f"ReduceLROnPlateau steps with a metric, which scheduler_step_freq={frequency!r} "
                'does not give it. Use "manual", and call trainer.update_scheduler(metric).'
            )


def checked(name: str, given: Any, kind: type | None) -> list[Any]:
    """Return what was given as a list, each of its members checked.

    Raises:
        TypeError: if a member is not of `kind`, or, without a kind, has no ``step``.
        ValueError: if there is none.
    """
    members = listed(given)
    for member in members:
        fits = isinstance(member, kind) if kind else hasattr(member, "step")
        if not fits:
            expected = f"torch {kind.__name__} objects" if kind else "learning-rate schedulers"
            raise TypeError(
                f"register({name}=...) must be one or a list of {expected}, but got {member!r}."
            )
    if not members:
        raise ValueError(f"register({name}=...) is empty; at least one is needed.")
    return members


def warn_of_strangers(optimizers: list[torch.optim.Optimizer], modules: list[Any]) -> None:
    """Warn of an optimizer that has no parameter of any registered model, or of the criterion."""
    registered = {id(p) for m in modules if isinstance(m, torch.nn.Module) for p in m.parameters()}
    for optimizer in optimizers:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(parameter) in registered for parameter in held):
            warnings.warn(
                f"register(optimizers=...): {type(optimizer).__name__} updates no parameter of the "
                "registered models. Make it with the parameters() of the model that you register.",
                RuntimeWarning,
                stacklevel=5,  # the line of register() in the user's setup
            )


def is_trained(
    criterion: Any, optimizers: list[torch.optim.Optimizer], models: list[torch.nn.Module]
) -> bool:
    """Whether an optimizer has parameters of the criterion, such as class centers, to train."""
    if not isinstance(criterion, torch.nn.Module):
        return False
    stepped = {id(p) for o in optimizers for g in o.param_groups for p in g["params"]}
    in_models = {id(p) for model in models for p in model.parameters()}
    own = {id(p) for p in criterion.parameters() if p.requires_grad}
    return bool(own & stepped - in_models)
