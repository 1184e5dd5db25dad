"""All features of the updates of a PyTorch operator."""

from collections.abc import Iterator
from typing import Any

from raysgd.loop.feature import UpdateFeature
from raysgd.torch.features.averaging import WeightAveraging
from raysgd.torch.features.bad_steps import BadStepFilter
from raysgd.torch.features.gradient_norms import GradientNorms
from raysgd.torch.features.guard import ReplicaGuard
from raysgd.torch.features.rollback import Rollback
from raysgd.torch.features.sample_rate import SampleRate
from raysgd.torch.features.schedules import Schedules
from raysgd.torch.features.step_checks import StepChecks
from raysgd.torch.features.unregistered_tensors import UnregisteredTensors
from raysgd.torch.optimization import Optimization
from raysgd.torch.registered import RegisteredObjects


class OperatorFeatures:
    """The features that an operator or a callback calls itself."""

    def __init__(self, registered: RegisteredObjects) -> None:
        self.checks = StepChecks(registered)  # which the next three use too
        self.optimization = Optimization(registered, self.checks)
        self.schedules = Schedules(registered, self.checks)
        self.averaging = WeightAveraging(registered, self.checks)
        self.unregistered_tensors = UnregisteredTensors(registered)


def features_of(
    registered: RegisteredObjects, own: OperatorFeatures, max_grad_norm: Any
) -> Iterator[UpdateFeature]:
    """Yield the features in the order of their hooks. The hook `receive` has the reverse order.

    Shards roll back before `Rollback`, and the exchange commits before the buffers. The test
    ``test_phases.py`` has all pairs whose order matters, and why. `own` are those of the operator.
    """
    options = registered.options
    yield from registered.placement.features  # shards
    yield registered.precision  # autocast, and the scale of losses
    yield registered.exchange  # averages of gradients; equal models
    yield own.optimization  # from losses to updates
    yield registered.baseline  # which states can leave out
    yield own.checks  # errors for code that would make other updates
    if options.bad_steps is not None:
        yield BadStepFilter(registered, options.bad_steps)  # updates that are not applied
    yield GradientNorms(registered, max_grad_norm)  # clipping
    if registered.has_all_parameters:  # otherwise, the shards restore them and their optimizer
        objects = registered.optimizers, registered.models
        yield Rollback(*objects, registered.refuse_split, options.bad_steps is not None)
    yield registered.buffer_copies  # for discarded updates
    yield registered.micro_batching  # of batches that do not fit into memory
    yield own.schedules  # learning rates
    yield own.averaging  # averages of the weights
    if options.elastic.shares == "measured":
        yield SampleRate(registered)  # for shares that follow speed
    if options.guard is not None and registered.settings.context.distributed:
        yield ReplicaGuard(registered, own.averaging, options.guard)  # comparisons of the replicas
    yield own.unregistered_tensors  # warnings about tensors that are not registered
