"""Replicated models with DistributedDataParallel."""

from __future__ import annotations

import contextlib

import torch
from torch.nn.parallel import DistributedDataParallel

from raysgd.loop.transaction import UpdateTransaction
from raysgd.torch import collectives, ddp
from raysgd.torch.gradient_exchange import GradientExchange
from raysgd.torch.register_checks import check_same_parameters
from raysgd.torch.registered_state import RegisteredState


class Replication(GradientExchange):
    """Tracks the wrappers of models. `wraps` means that raysgd has wrapped the models."""

    def __init__(self, state: RegisteredState, wraps: bool) -> None:
        self._state, self._wraps = state, wraps
        self._dtypes = {p: p.dtype for model in state.models for p in model.parameters()}
        self._averaged: list[dict[str, bool] | None] = [None] * len(state.models)

    def note_wrappers(self) -> None:
        """Record the wrappers at the end of ``setup``."""
        models = self._state.models
        self._averaged = [
            ddp.averaged_parameters(model) if isinstance(model, DistributedDataParallel) else None
            for model in models
        ]

    @property
    def replicates(self) -> bool:  # type: ignore[override]
        return any(map(ddp.replicated, self._state.models))

    def start_together(self) -> None:
        models = self._state.models if self._state.settings.options.wrap_ddp else []
        tensors = [t.detach() for m in models for t in (*m.parameters(), *m.buffers())]
        # Models with DistributedDataParallel are equal at `register`, but setup may change them.
        digest = collectives.fingerprint(tensors)
        differs = digest != self._state.from_rank(lambda: digest, 0)
        if models and self._state.minimum(-int(differs)) < 0:
            received = self._state.from_rank(lambda: tensors, 0)
            for own, value in zip(tensors, received, strict=False):
                if own.shape == value.shape:  # a buffer of another shape is a cache
                    own.copy_(value)
            self._state.buffers.update()

    def enter(self) -> None:
        for model, names in zip(self._state.models, self._averaged, strict=True):
            if isinstance(model, DistributedDataParallel) and names is not None:
                ddp.rebuild(model, names)

    def sync_buffers(self) -> None:
        buffers: list[torch.Tensor] = []
        for model in self._state.models:
            if ddp.replicated(model):
                buffers += model.buffers()
            elif self._state.settings.options.wrap_ddp:
                buffers += ddp.running_statistics(model)
        self._state.broadcast_buffers(buffers)

    def check_trained(self) -> None:
        models = [ddp.unwrap(model) for model in self._state.models]
        if self._wraps:
            check_same_parameters(models, self._dtypes)

    def average(self, optimizer: torch.optim.Optimizer) -> None:
        if self._wraps:
            ddp.average(optimizer, self._state.models)

    def begin_micro_batch(self, tx: UpdateTransaction) -> None:
        self._set_sync(tx.is_last)

    def _set_sync(self, wanted: bool) -> None:
        """Set whether the next backward passes average gradients."""
        for model in self._state.models:
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = wanted

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        return ddp.no_forward_sync(self._state.models)

    def before_commit(self, tx: UpdateTransaction) -> None:
        ddp.check_skipped(self._state.models, tx.has_optimizer_steps)

    def commit(self, tx: UpdateTransaction) -> None:
        ddp.end_update(self._state.models)
        self._set_sync(True)

    roll_back = commit
