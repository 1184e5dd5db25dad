"""Replicated models with DistributedDataParallel, of user code or of raysgd."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from raysgd._internal.step_timing import OTHER
from raysgd.comm.mesh import SAME_COLLECTIVES
from raysgd.errors import ReplicasDifferError
from raysgd.loop.state_placement import StatePlacement
from raysgd.loop.update import Update
from raysgd.torch.collectives import average_gradients
from raysgd.torch.modules import is_ddp, running_statistics
from raysgd.torch.strategies import replicated_model
from raysgd.torch.strategies.collective_exchange import CollectiveExchange
from raysgd.torch.strategies.replicated_model import (
    BackwardPasses,
    ReplicatedModel,
    gradient_version,
)
from raysgd.torch.tensors import backward_pass_number, parameters_of
from raysgd.torch.train_state import TorchTrainState


class IndependentModelsPlacement(StatePlacement):
    """Each worker keeps its own models, unless user code has wrapped some of them."""

    def __init__(self, train_state: TorchTrainState, sharding_args: Mapping[str, Any]) -> None:
        self._train_state = train_state

    replicates: Any = property(lambda self: any(map(is_ddp, self._train_state.models)))


class UserDDPExchange(CollectiveExchange):
    """Averages gradients by wrappers that user code has made. One worker usually has none."""

    _wrappers: Sequence[DistributedDataParallel] = ()
    _averaged: Sequence[dict[str, bool]] = ()
    """Which parameters each wrapper averages."""

    def use_wrappers(self, wrappers: Sequence[DistributedDataParallel]) -> None:
        super().use_wrappers(wrappers)
        train_state = self._train_state
        self._wrappers = [m for m in train_state.models if isinstance(m, DistributedDataParallel)]
        self._averaged = list(map(replicated_model.averaged_parameters, self._wrappers))
        if any(wrapper.static_graph for wrapper in self._wrappers):
            why = "DistributedDataParallel(static_graph=True) cannot accumulate"
            train_state.micro_batching.refuse_split(why)
            if train_state.accumulation_steps > 1:
                raise ValueError(f"{why} gradients. Leave out one of the two.")

    def begin_generation(self) -> None:
        warnings = map(replicated_model.rebuild_reducer, self._wrappers, self._averaged)
        self.warning = "\n".join(filter(None, [*warnings]))

    def _shared_buffers(self) -> list[torch.Tensor]:
        buffers: list[torch.Tensor] = []
        for model in self._train_state.models:
            if is_ddp(model):
                buffers += model.buffers()
            elif self.keeps_all_equal:
                buffers += running_statistics(model)
        return buffers

    def begin_micro_batch(self, update: Update) -> None:
        self._set_sync(update.in_last_micro_batch)

    def _set_sync(self, wanted: bool) -> None:
        """Set whether the next backward passes average gradients."""
        for wrapper in self._wrappers:
            if wrapper.require_backward_grad_sync != wanted:  # to set it takes many calls
                wrapper.require_backward_grad_sync = wanted

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Keep models that user code wrapped from broadcasting buffers in their forward pass."""
        before = [wrapper.require_forward_param_sync for wrapper in self._wrappers]
        for wrapper in self._wrappers:
            wrapper.require_forward_param_sync = False
        try:
            yield
        finally:
            for wrapper, value in zip(self._wrappers, before, strict=True):
                wrapper.require_forward_param_sync = value

    def roll_back(self, update: Update) -> None:
        self._set_sync(True)  # a commit follows the last micro-batch, which has set it


class DDPExchange(UserDDPExchange):
    """Wraps all models that user code has not wrapped."""

    keeps_all_equal = True

    def wrap(self, ddp_args: Mapping[str, Any], horovod_args: Mapping[str, Any]) -> None:
        train_state = self._train_state
        device, num_given = train_state.settings.device, len(train_state.registered_models)
        train_state.models = [
            replicated_model.wrap(model, device, ddp_args, is_criterion=index >= num_given)
            for index, model in enumerate(train_state.models)
        ]
        train_state.step_timing.batch_phase = OTHER  # the wrappers know when a forward pass runs
        super().wrap(ddp_args, horovod_args)

    def use_wrappers(self, wrappers: Sequence[DistributedDataParallel]) -> None:
        super().use_wrappers(wrappers)
        self._passes = [w._passes for w in self._wrappers if isinstance(w, ReplicatedModel)]

    def complete_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Average the gradients of an optimizer, unless wrappers of models have averaged them.

        Every rank must call this.
        """
        if backward_pass_number() != -1:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() runs within a backward pass, such as in a "
                "hook. The workers average gradients until the end of the pass. Call step() after "
                "it."
            )
        if len(self._passes) > 1 and not self._train_state.update.optimizer_steps.need_backup:
            _join_averages(self._skipped())  # in the commit, a lost worker would undo the step
        of_user = (w for w in self._wrappers if not isinstance(w, ReplicatedModel))
        others = {p for wrapper in of_user for p in wrapper.parameters()}  # user code averages them
        stepped = dict.fromkeys(p for p in parameters_of(optimizer) if p not in others)
        averaged: dict[torch.nn.Parameter, Any] = {}
        for passes in self._passes:
            averaged |= passes.take_averages(stepped)
        if not any(p.grad is not None and averaged.get(p) != gradient_version(p) for p in stepped):
            return
        try:
            average_gradients(list(stepped))
            return
        except RuntimeError as error:
            # The other workers are in another collective, because they have no changes.
            if not averaged or SAME_COLLECTIVES not in str(error):
                raise
        rank = dist.get_rank()  # outside of the handler, because the error has another cause
        raise ReplicasDifferError(
            f"Worker {rank} changed gradients after the workers had averaged them, and other "
            "workers did not. Change them on all workers, or clip them with "
            "register(max_grad_norm=...).",
            ranks=[rank],
        )

    def before_commit(self, update: Update) -> None:
        """Raise an error if this worker has skipped a model that other workers have trained.

        Without it, the other workers would average their gradients with those of a later pass. A
        model counts as skipped if it had a backward pass in the previous update. Without a pass and
        without steps of optimizers, the first one counts. Every rank must call this.
        """
        skipped, has_trained = self._skipped(), any(p.first_pass is not None for p in self._passes)
        if not (has_trained or update.optimizer_steps.counts):
            skipped = (skipped or self._passes)[:1]
        _join_averages(skipped)

    def _skipped(self) -> list[BackwardPasses]:
        """Return those that had a pass in the previous update, in its order, but not in this."""
        untrained = [passes for passes in self._passes if passes.first_pass is None]
        skipped = [passes for passes in untrained if passes.previous_first_pass is not None]
        return sorted(skipped, key=lambda passes: passes.previous_first_pass or 0)

    def commit(self, update: Update) -> None:
        for passes in self._passes:
            passes.end_update()

    def roll_back(self, update: Update) -> None:
        super().roll_back(update)
        self.commit(update)  # forgets the passes


def _join_averages(skipped: Sequence[BackwardPasses]) -> None:
    """Join the averages of models that this worker has not trained in this update."""
    parameters = [parameter for passes in skipped for parameter in passes.model.parameters()]
    if any(parameter.grad is not None for parameter in parameters):
        return  # user code accumulates gradients
    for passes in skipped:
        passes.complete_skipped()
