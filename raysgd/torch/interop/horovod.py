"""Averaging of gradients by Horovod instead of DistributedDataParallel."""

from __future__ import annotations

import sys
from typing import Any

import torch

from raysgd._internal import step_timing
from raysgd.comm.horovod import check_dtypes
from raysgd.loop.transaction import UpdateTransaction
from raysgd.torch.gradient_exchange import GradientExchange
from raysgd.torch.register_checks import check_same_parameters
from raysgd.torch.registered_state import RegisteredState
from raysgd.torch.tensors import parameters_of


class HorovodGradients(GradientExchange):
    replicates = True

    def __init__(self, state: RegisteredState, arguments: dict[str, Any]) -> None:
        self._state = state
        buffers = [buffer for model in state.models for buffer in model.buffers()]
        trained = [p for model in state.models for p in model.parameters() if p.requires_grad]
        compressed = "compression" in arguments  # Horovod then averages another dtype
        check_dtypes([str(t.dtype) for t in (buffers if compressed else [*buffers, *trained])])
        arguments = {"backward_passes_per_step": state.accumulation_steps, **arguments}
        self._exchanges = {
            id(each): HorovodExchange(each, state.models, arguments) for each in state.optimizers
        }
        self._dtypes = {p: p.dtype for model in state.models for p in model.parameters()}

    def check_trained(self) -> None:
        check_same_parameters(self._state.models, self._dtypes)

    def start_together(self) -> None:
        state = self._state
        state.load_training_state(state.from_rank(state.training_state, 0))

    def enter(self) -> None:
        for exchange in self._exchanges.values():
            exchange.rebuild()

    def sync_buffers(self) -> None:
        models = self._state.models
        self._state.broadcast_buffers([buffer for model in models for buffer in model.buffers()])

    def begin(self, tx: UpdateTransaction) -> None:
        for exchange in self._exchanges.values():
            exchange.expect(tx.num_planned)

    def average(self, optimizer: torch.optim.Optimizer) -> None:
        if (exchange := self._exchanges.get(id(optimizer))) is not None:
            exchange.synchronize()

    def roll_back(self, tx: UpdateTransaction) -> None:
        for exchange in self._exchanges.values():
            exchange.abandon()


class HorovodExchange:
    """Averages the gradients of one optimizer over the workers.

    The user's optimizer makes the updates, so that schedulers and references stay valid. The
    DistributedOptimizer of Horovod only averages: backward passes start the exchange, and the
    user's optimizer waits for the result before its step.
    """

    def __init__(
        self, optimizer: Any, models: list[torch.nn.Module], arguments: dict[str, Any]
    ) -> None:
        self._optimizer, self._models, self._arguments = optimizer, models, arguments
        self._distributed: Any = None
        self.rebuild()

    def rebuild(self) -> None:
        """Create the DistributedOptimizer for the current group."""
        import horovod.torch as hvd

        if (before := self._distributed) is not None:
            before._grad_accs.clear()  # removes its hooks
            # If the graph of a failed step still exists, its hooks must never start an exchange.
            for parameter in before._allreduce_delay:
                before._allreduce_delay[parameter] = sys.maxsize
        own = set(map(id, parameters_of(self._optimizer)))
        named = [
            (f"{number}.{name}", parameter)
            for number, model in enumerate(self._models)
            for name, parameter in model.named_parameters()
            if id(parameter) in own
        ]
        self._distributed = hvd.DistributedOptimizer(
            self._optimizer, named_parameters=named, **self._arguments
        )

    def expect(self, passes: int) -> None:
        """Start the allreduce in the last of `passes` backward passes."""
        passes = max(passes, self._arguments["backward_passes_per_step"])
        if passes != self._distributed.backward_passes_per_step:
            self._distributed.set_backward_passes_per_step(passes)

    def synchronize(self) -> None:
        """Wait for the averaged gradients."""
        phase = step_timing.enter(step_timing.WAIT)
        self._distributed.synchronize()
        step_timing.resume(phase)

    def abandon(self) -> None:
        """Discard the pending allreduce of a discarded step."""
        distributed = self._distributed
        distributed._handles.clear()
        for parameter in distributed._allreduce_delay:
            distributed._allreduce_delay[parameter] = distributed.backward_passes_per_step
