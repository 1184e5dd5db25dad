"""How the workers combine their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from raysgd.loop.feature import StepFeature
from raysgd.torch import collectives
from raysgd.torch.register_checks import check_same_parameters
from raysgd.torch.strategies import ddp
from raysgd.torch.tensors import parameters_of, total_norm


class GradientExchange(StepFeature):
    """Combines the gradients of the workers. `table.py` chooses the subclass.

    This class combines nothing, for one worker or for models that user code synchronizes.
    """

    keeps_equal = False
    """Whether raysgd keeps all registered objects equal, and not only models that user code wraps.
    Workers can then train only parameters that were registered."""

    def __init__(self, state: Any) -> None:
        self._state = state  # a `RegisteredState`, whose module imports this one
        self._dtypes: Mapping[Any, torch.dtype] = {}

    def wrap(self, **arguments: Mapping[str, Any]) -> None:
        """Prepare the registered models and optimizers. `arguments`: those of ``register``."""
        models = self._state.models
        self._dtypes = {p: p.dtype for model in models for p in model.parameters()}

    def use_wrappers(self, wrappers: Sequence[DistributedDataParallel]) -> None:
        """Replace models with `wrappers`, which user code has made in ``setup``."""
        wrapped = {id(wrapper.module): wrapper for wrapper in wrappers}
        self._state.models = [wrapped.get(id(model), model) for model in self._state.models]

    @property
    def needs_warm_up(self) -> bool:  # type: ignore[override]
        on_gpu = self._state.settings.device.type == "cuda"
        return on_gpu or any(map(ddp.is_compiled, self._state.models))

    def check_trained(self) -> None:
        models, dtypes = list(map(ddp.unwrap, self._state.models)), self._dtypes
        if not self.keeps_equal:  # a worker may add parameters, or cast them
            stepped = [p for each in self._state.optimizers for p in parameters_of(each)]
            dtypes = {p: p.dtype for p in (*dtypes, *stepped)}
        check_same_parameters(models, dtypes)

    def sync_buffers(self) -> None:
        models = self._state.models
        self._state.broadcast_buffers([buffer for model in models for buffer in model.buffers()])

    # ---- losses

    @property
    def num_workers(self) -> int:
        """Number of workers that average their gradients."""
        return self._state.context.world_size if self._averages else 1

    def total(self, number: float) -> float:
        """Return the sum of a number over the workers whose gradients meet."""
        return collectives.total(number, self._state.settings.device) if self._averages else number

    @property
    def _averages(self) -> bool:
        return bool(self._state.settings.context.distributed and self._state.replication.replicates)

    # ---- gradients

    def take_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        """Take the gradients of a micro-batch. If False, the caller accumulates them."""
        return False

    def average(self, optimizer: torch.optim.Optimizer) -> None:
        """Average gradients of an optimizer that the workers have not averaged."""

    def norm(self, parameters: Sequence[Any]) -> tuple[Sequence[Any], torch.Tensor]:
        """Return the tensors with this worker's gradients of some parameters, and their norm.

        The norm covers all workers.
        """
        gradients = [p.grad for p in parameters if p.grad is not None]
        return parameters, total_norm(gradients)
