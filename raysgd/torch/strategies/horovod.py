"""Averaging of gradients by Horovod instead of DistributedDataParallel."""

import sys
from collections.abc import Mapping
from typing import Any

import torch

from raysgd._internal import step_timing
from raysgd.comm.horovod import check_dtypes
from raysgd.loop.update import Update
from raysgd.torch.strategies.collective_exchange import CollectiveExchange
from raysgd.torch.tensors import parameters_of


class HorovodExchange(CollectiveExchange):
    """Averages the gradients of each optimizer over the workers.

    The user's optimizers make the updates, so that schedulers and references stay valid. The
    DistributedOptimizer of Horovod only averages: backward passes start the exchange, and the
    user's optimizer waits for the result before its step.
    """

    keeps_all_equal = True

    def wrap(self, ddp_args: Mapping[str, Any], horovod_args: Mapping[str, Any]) -> None:
        super().wrap(ddp_args, horovod_args)
        train_state = self._train_state
        buffers = [buffer for model in train_state.models for buffer in model.buffers()]
        trained = [p for model in train_state.models for p in model.parameters() if p.requires_grad]
        compressed = "compression" in horovod_args  # Horovod then averages another dtype
        check_dtypes([str(t.dtype) for t in (buffers if compressed else [*buffers, *trained])])
        num_passes = train_state.accumulation_steps
        self._arguments = {"backward_passes_per_step": num_passes, **horovod_args}
        self._distributed: dict[int, Any] = {}
        self.begin_generation()

    def begin_generation(self) -> None:
        """Create the DistributedOptimizers for the current group."""
        import horovod.torch as hvd

        for before in self._distributed.values():
            before._grad_accs.clear()  # removes its hooks
            # If the graph of a failed step still exists, its hooks must never start an exchange.
            before.set_backward_passes_per_step(sys.maxsize)
        for optimizer in self._train_state.optimizers:
            optimized = set(map(id, parameters_of(optimizer)))
            named = [
                (f"{number}.{name}", parameter)
                for number, model in enumerate(self._train_state.models)
                for name, parameter in model.named_parameters()
                if id(parameter) in optimized
            ]
            self._distributed[id(optimizer)] = hvd.DistributedOptimizer(
                optimizer, named_parameters=named, **self._arguments
            )

    def begin_update(self, update: Update) -> None:
        """Start the allreduce in the last backward pass of the update."""
        passes = max(update.num_micro_batches, self._arguments["backward_passes_per_step"])
        for distributed in self._distributed.values():
            if passes != distributed.backward_passes_per_step:
                distributed.set_backward_passes_per_step(passes)

    def complete_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        if (distributed := self._distributed.get(id(optimizer))) is not None:
            phase = step_timing.begin_phase(step_timing.WAIT)
            distributed.synchronize()
            step_timing.resume_phase(phase)

    def roll_back(self, update: Update) -> None:
        for distributed in self._distributed.values():
            distributed._handles.clear()
            distributed.set_backward_passes_per_step(distributed.backward_passes_per_step)
