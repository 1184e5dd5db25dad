"""How the workers combine their gradients."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from raysgd.loop.feature import UpdateFeature
from raysgd.torch.tensors import total_norm


class GradientExchange(UpdateFeature):
    """Combines the gradients of the workers. `table.py` chooses the subclass.

    `Optimization` calls the methods below for losses and steps, and `TrainState` calls the hooks,
    such as `begin_micro_batch` and `commit`. The defaults are those of a worker alone.
    """

    keeps_all_equal = False
    """Whether raysgd keeps all registered objects equal, and not only models that user code wraps.
    Workers can then train only parameters that were registered."""
    num_averaging_workers = 1
    """Number of workers that average their gradients. 1 if they add them up, or for one worker."""
    divides_by_counts = False
    """Whether `complete_gradients` divides sums by all items that losses count, if they do. Losses
    are then divided by the samples of the update."""
    gradient_factor = 1.0
    """Factor of the newest gradients in `complete_gradients`, if it divides by counts."""
    sums_exactly = False
    """Whether sums, such as those of losses and metrics, must not depend on the workers."""

    def wrap(self, ddp_args: Mapping[str, Any], horovod_args: Mapping[str, Any]) -> None:
        """Prepare the models and optimizers, in `register`, with two of its arguments."""

    def use_wrappers(self, wrappers: Sequence[DistributedDataParallel]) -> None:
        """After ``setup``, replace models with `wrappers` that user code has made in it."""

    def all_reduce_sum(self, number: float) -> float:
        """Return the sum of a number, such as items, over the workers whose gradients meet."""
        return number

    def take_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Take gradients of any micro-batch but the last. The caller keeps those that remain."""

    def complete_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Combine the gradients that the backward passes have not, before an optimizer steps."""

    def gradients_and_norm(self, parameters: Sequence[Any]) -> tuple[Sequence[Any], torch.Tensor]:
        """Return the tensors with this worker's gradients of some parameters, and their norm.

        The norm covers all workers. Features need it in `before_optimizer_step`.
        """
        gradients = [
            p.grad.coalesce().values() if p.grad.is_sparse else p.grad  # for embeddings
            for p in parameters
            if p.grad is not None
        ]
        return parameters, total_norm(gradients)
