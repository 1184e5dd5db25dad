"""All features of the updates of a PyTorch operator."""

from collections.abc import Iterator
from typing import Any

from raysgd.loop.feature import UpdateFeature
from raysgd.torch.features.averaging import WeightAveraging
from raysgd.torch.features.bad_steps import BadStepFilter
from raysgd.torch.features.gradient_clipping import GradientClipping
from raysgd.torch.features.guard import ReplicaGuard
from raysgd.torch.features.lr_scheduling import LRScheduling
from raysgd.torch.features.rollback import Rollback
from raysgd.torch.features.step_checks import StepChecks
from raysgd.torch.features.throughput import ThroughputMeter
from raysgd.torch.features.unregistered_tensors import UnregisteredTensors
from raysgd.torch.optimization import Optimization
from raysgd.torch.train_state import TorchTrainState


class OperatorFeatures:
    """The features that an operator or a callback calls itself."""

    def __init__(self, train_state: TorchTrainState) -> None:
        self.checks = StepChecks(train_state)  # which the next two use too
        self.optimization = Optimization(train_state, self.checks)
        self.lr_scheduling = LRScheduling(train_state, self.checks)
        self.averaging = WeightAveraging(train_state)
        self.unregistered_tensors = UnregisteredTensors(train_state)


def features_of(
    train_state: TorchTrainState, own: OperatorFeatures, max_grad_norm: Any
) -> Iterator[UpdateFeature]:
    """Yield the features in the order of their hooks. The hook `receive` has the reverse order.

    Shards roll back before `Rollback`, and the exchange commits before the buffers. The test
    ``test_phases.py`` has all pairs whose order matters, and why. `own` are those of the operator.

    After a failed update, `roll_back` restores:

    ===================  =======================================================================
    shards               the version of the shards, and parameters of an optimizer that raised
    precision, exchange  the scale of losses; hooks and flags of the backward passes
    `Optimization`       gradients: none
    `Rollback`           parameters, states and options of optimizers; schedulers
    `BufferBackup`       buffers
    ===================  =======================================================================
    """
    options = train_state.settings.options
    yield from train_state.placement.features  # shards
    yield train_state.precision  # autocast, and the scale of losses
    yield train_state.exchange  # averages of gradients; equal models
    yield own.optimization  # from losses to updates
    yield train_state.frozen_parameters  # which states can leave out
    yield own.checks  # errors for code that would make other updates
    if options.bad_steps is not None:
        yield BadStepFilter(train_state, options.bad_steps)  # updates that are not applied
    yield GradientClipping(train_state, max_grad_norm)  # clipping
    yield Rollback(train_state)
    yield train_state.buffer_backup  # for discarded updates
    yield train_state.micro_batching  # of batches that do not fit into memory
    yield own.lr_scheduling  # learning rates
    yield own.averaging  # averages of the weights
    if options.elastic.shares == "measured":
        yield ThroughputMeter(train_state)  # for shares that follow speed
    if options.guard is not None and train_state.settings.context.has_process_group:
        yield ReplicaGuard(train_state, own.averaging, options.guard)  # comparisons of the replicas
    yield own.unregistered_tensors  # warnings about tensors that are not registered
