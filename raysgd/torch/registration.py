"""Check and wrap what a PyTorch operator registers.

The order of `register` matters. The placement knows which tensors move to the device. The precision
sees unwrapped models there. The digests of frozen parameters precede `exchange.wrap`, in which
other workers write them. Buffers and features see wrapped models. The hooks that shard a step come
last. After a step, parameters are whole before other hooks see them.
"""

from typing import Any

import torch

from raysgd._internal.arguments import as_dict, as_int
from raysgd.loop.operator_base import in_shape_of
from raysgd.torch.feature_list import OperatorFeatures, features_of
from raysgd.torch.features.buffer_backup import BufferBackup
from raysgd.torch.features.frozen_parameters import FrozenParameters
from raysgd.torch.register_checks import (
    as_criteria,
    as_registered,
    check_related,
    check_step_freq,
    trained_among,
)
from raysgd.torch.strategies.table import STRATEGIES, as_sharding_args, strategy_name
from raysgd.torch.train_state import TorchTrainState


def register(
    train_state: TorchTrainState,
    features: OperatorFeatures,
    models: Any,
    optimizers: Any,
    criterion: Any = None,
    schedulers: Any = None,
    ddp_args: Any = None,
    apex_args: Any = None,
    gradient_accumulation_steps: Any = 1,
    max_grad_norm: Any = None,
    horovod_args: Any = None,
    sharding: Any = None,
    sharding_args: Any = None,
) -> Any:
    if train_state.is_registered:
        raise RuntimeError(
            "register() was called twice. Pass lists to register several models or optimizers."
        )
    criteria = as_criteria(criterion)
    ddp_args = as_dict("register", "ddp_args", ddp_args)
    apex_args = _as_apex_args(train_state, apex_args)
    horovod_args = as_dict("register", "horovod_args", horovod_args)
    modules = as_registered("models", models, torch.nn.Module)
    given = as_registered("optimizers", optimizers, torch.optim.Optimizer)
    train_state.optimizers[:] = _with_own_tensors(given)
    options, precision = train_state.settings.options, train_state.precision
    trained = trained_among(criteria, train_state.optimizers, modules)
    train_state.num_trained_criteria = len(trained)
    modules += trained
    sharding_args = as_sharding_args(train_state, sharding, sharding_args, modules, ddp_args)
    if schedulers is not None:
        train_state.schedulers = as_registered("schedulers", schedulers, None)
        check_step_freq(train_state.schedulers, train_state.scheduler_step_freq)
    if warning := check_related(modules, train_state.optimizers, train_state.schedulers):
        train_state.settings.warn_once("untrained", "%s", warning)
    distributed = train_state.settings.context.has_process_group
    strategy = STRATEGIES[strategy_name(options, sharding, distributed)]
    train_state.models = modules
    train_state.placement = strategy.new_placement(train_state, sharding_args)
    _move_models(train_state)
    train_state.exchange = strategy.new_exchange(train_state)
    train_state.accumulation_steps = as_int(
        "register", "gradient_accumulation_steps", gradient_accumulation_steps, 1
    )
    train_state.models = precision.prepare(train_state.models, train_state.optimizers, apex_args)
    train_state.frozen_parameters = FrozenParameters(train_state.models, train_state.collectives)
    train_state.exchange.wrap(ddp_args, horovod_args)
    train_state.buffer_backup = BufferBackup(train_state.models, train_state.collectives)
    train_state.set_features(list(features_of(train_state, features, max_grad_norm)))
    features.optimization.register_hooks()
    train_state.placement.begin_sharding()
    features.averaging.use_training_weights()  # as a loaded state
    train_state.criteria = criteria = _move_criteria(train_state, criteria, trained)
    train_state.is_registered = True
    losses = None if criterion is None else in_shape_of(criterion, criteria)
    results = in_shape_of(models, train_state.registered_models), optimizers, losses, schedulers
    return tuple(each for each in results if each is not None)


def _as_apex_args(train_state: TorchTrainState, arguments: Any) -> dict[str, Any]:
    apex_args = as_dict("register", "apex_args", arguments)
    if apex_args and train_state.settings.options.use_fp16 != "apex":
        unused = 'register(apex_args=%r) does nothing with %s. It needs use_fp16="apex".'
        train_state.settings.warn_once("apex", unused, apex_args, train_state.precision.name)
    return apex_args


def _with_own_tensors(optimizers: list[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
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


def _move_models(train_state: TorchTrainState) -> None:
    """Move models to the device. If models are sharded, workers move only their rows."""
    moves_parameters = train_state.has_all_parameters

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moves = moves_parameters or not isinstance(tensor, torch.nn.Parameter)
        return tensor.to(train_state.settings.device) if moves else tensor

    for model in train_state.models:
        model._apply(move)


def _move_criteria(
    train_state: TorchTrainState, criteria: list[Any], trained: list[Any]
) -> list[Any]:
    """Return the criteria on the device. Replace trained criteria by their wrappers."""
    num_models, device = len(train_state.models) - len(trained), train_state.settings.device
    wrapped = dict(zip(map(id, trained), train_state.models[num_models:], strict=True))
    return [
        wrapped.get(id(c), c.to(device) if isinstance(c, torch.nn.Module) else c) for c in criteria
    ]
