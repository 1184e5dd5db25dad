"""Check and wrap what a PyTorch operator registers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from raysgd._internal.arguments import check_int, checked_dict
from raysgd._internal.step_timing import OTHER
from raysgd.loop.operator_base import listed, shaped_like
from raysgd.torch import ddp
from raysgd.torch.feature_list import features_of
from raysgd.torch.features.equal_bits import EqualBitsReplication
from raysgd.torch.features.gradient_norms import GradientNorms
from raysgd.torch.features.replication import Replication
from raysgd.torch.features.rollback import BufferCopies
from raysgd.torch.features.sharded_optimizer import ShardedOptimizer
from raysgd.torch.interop.horovod import HorovodGradients
from raysgd.torch.precision.native import NativeAmp
from raysgd.torch.register_checks import (
    check_sharding,
    check_step_freq,
    checked,
    checked_criteria,
    checked_sharding_args,
    is_trained,
)
from raysgd.torch.tensors import parameters_of

if TYPE_CHECKING:
    from raysgd.torch.features.fully_sharded import FullyShardedModel
    from raysgd.torch.train_state import TorchTrainState


def register(
    state: TorchTrainState,
    models: Any,
    optimizers: Any,
    criterion: Any = None,
    schedulers: Any = None,
    ddp_args: Any = None,
    apex_args: Any = None,
    accumulation_steps: Any = 1,
    max_grad_norm: Any = None,
    horovod_args: Any = None,
    sharding: Any = None,
    sharding_args: Any = None,
) -> Any:
    if state.registered:
        raise RuntimeError(
            "register() was called twice. Pass lists to register several models or optimizers."
        )
    criteria = checked_criteria(criterion)
    ddp_args = checked_dict("register", "ddp_args", ddp_args)
    apex_args = checked_dict("register", "apex_args", apex_args)
    horovod_args = checked_dict("register", "horovod_args", horovod_args)
    modules = checked("models", models, torch.nn.Module)
    state.optimizers = _separated(checked("optimizers", optimizers, torch.optim.Optimizer))
    options, precision = state.settings.options, state.optimization.precision
    trained = [each for each in criteria if is_trained(each, state.optimizers, modules)]
    state.num_criteria = len(trained)
    modules += trained
    sharding_args = checked_sharding_args(sharding, sharding_args)
    if sharding is not None:
        has_ddp_args, scales = bool(ddp_args), precision.scales
        check_sharding(sharding, options, modules, state.optimizers, has_ddp_args, scales)
    _move_models(state, modules, keeps_parameters=sharding == "full")
    if apex_args and options.use_fp16 != "apex":
        unused = 'register(apex_args=%r) does nothing with %s. It needs use_fp16="apex".'
        state.settings.warn_once("apex", unused, apex_args, precision.name)
    sharded = _shard(state, sharding, sharding_args) if state.context.distributed else []
    if schedulers is not None:
        state.schedulers = checked("schedulers", schedulers, None)
        check_step_freq(state.schedulers, options.scheduler_step_freq)
    state.accumulation_steps = check_int(
        "register", "gradient_accumulation_steps", accumulation_steps, 1
    )
    norms = GradientNorms(state.optimization, max_grad_norm)
    state.models = precision.prepare(state.models, state.optimizers, apex_args)
    is_full = any(each.is_fully_sharded for each in sharded)
    replication = None if is_full else _replicate(state, ddp_args, horovod_args)
    state.buffers = BufferCopies(state.models, state)
    state.features = list(features_of(state, sharded, replication, norms))
    state.optimization.register_hooks()
    state.criteria = criteria = _moved_criteria(state, criteria, trained)
    state.note_frozen_modes()
    state.transaction.optimizers = state.optimizers
    state.registered = True
    results = [shaped_like(models, state.given_models), optimizers]
    if criterion is not None:
        results.append(shaped_like(criterion, criteria))
    if schedulers is not None:
        results.append(schedulers)
    return tuple(results)


def _separated(optimizers: list[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Give each parameter group its own tensors as options.

    PyTorch gives all groups the tensor that it gets as learning rate, so that a scheduler could not
    give them different rates. The groups of a loaded state have their own tensors.
    """
    seen: set[int] = set()
    for group in (group for each in optimizers for group in each.param_groups):
        for name, value in group.items():
            if isinstance(value, torch.Tensor):
                group[name] = value.clone() if id(value) in seen else value
                seen.add(id(value))
    return optimizers


def _move_models(
    state: TorchTrainState, models: list[torch.nn.Module], keeps_parameters: bool
) -> None:
    """Move models to the device. If models are sharded, workers move only their rows."""
    keeps_parameters = keeps_parameters and state.context.distributed

    def move(tensor: torch.Tensor) -> torch.Tensor:
        stays = keeps_parameters and isinstance(tensor, torch.nn.Parameter)
        return tensor if stays else tensor.to(state.settings.device)

    state.models = [model._apply(move) for model in models]


def _moved_criteria(state: TorchTrainState, criteria: list[Any], trained: list[Any]) -> list[Any]:
    """Return the criteria on the device. Replace trained criteria by their wrappers."""
    num_models, device = len(state.models) - len(trained), state.settings.device
    wrapped = dict(zip(map(id, trained), state.models[num_models:], strict=True))
    return [
        wrapped.get(id(c), c.to(device) if isinstance(c, torch.nn.Module) else c) for c in criteria
    ]


def _shard(
    state: TorchTrainState, sharding: str | None, arguments: dict[str, Any]
) -> list[ShardedOptimizer]:
    if sharding is None:
        return []
    if sharding == "full":
        return [_shard_fully(state, arguments)]
    return [
        ShardedOptimizer(each, arguments.get("copies"), state)
        for each in state.optimizers
        if any(parameter.requires_grad for parameter in parameters_of(each))
    ]


def _replicate(
    state: TorchTrainState, ddp_args: dict[str, Any], horovod_args: dict[str, Any]
) -> HorovodGradients | Replication:
    options, distributed = state.settings.options, state.context.distributed
    if options.num_shards is not None:
        shards = EqualBitsReplication(state, options.num_shards, state.optimization.precision)
        state.gathers_metrics = True
        return shards
    if distributed and options.use_horovod:
        return HorovodGradients(state, horovod_args)
    wraps = distributed and options.wrap_ddp
    if wraps:
        device, count = state.settings.device, len(state.given_models)
        state.models = [
            ddp.wrapped(model, device, ddp_args, is_criterion=index >= count)
            for index, model in enumerate(state.models)
        ]
        state.timing.batch_phase = OTHER  # the wrappers know when a forward pass runs
    return Replication(state, wraps)


def _shard_fully(state: TorchTrainState, arguments: dict[str, Any]) -> FullyShardedModel:
    from torch.distributed.fsdp import FSDPModule  # takes a second to import

    if not hasattr(FSDPModule, "reset_iter_state"):
        raise ImportError(
            'register(sharding="full") needs PyTorch 2.13 or newer, but this is PyTorch '
            f'{torch.__version__}. Upgrade it, or use sharding="optimizer".'
        )
    from raysgd.torch.features.fully_sharded import FullyShardedModel

    precision, (optimizer,) = state.optimization.precision, state.optimizers
    dtype = precision.dtype if isinstance(precision, NativeAmp) else None
    model = FullyShardedModel(optimizer, state, arguments, dtype)
    if state.micro_batching.batch_norms:
        state.micro_batching.why_not_split = (
            "batch normalization may need fewer parts on some workers"
        )
    return model


def adopt_wrappers(state: TorchTrainState, attributes: Iterable[Any]) -> None:
    """Replace registered models with DistributedDataParallel wrappers from user code."""
    values = [value for attribute in attributes for value in listed(attribute)]
    wrapped = {id(v.module): v for v in values if isinstance(v, DistributedDataParallel)}
    state.models = [wrapped.get(id(model), model) for model in state.models]
    if (replication := state.feature(Replication)) is not None:
        replication.note_wrappers()
    if any(isinstance(m, DistributedDataParallel) and m.static_graph for m in state.models):
        state.micro_batching.why_not_split = (
            "DistributedDataParallel(static_graph=True) cannot accumulate"
        )
        if state.accumulation_steps > 1:
            raise ValueError(
                f"{state.micro_batching.why_not_split} gradients. Leave out one of the two."
            )
