"""The base of all exchanges of gradients by collectives."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from raysgd.torch.modules import is_compiled, without_ddp
from raysgd.torch.register_checks import check_same_parameters
from raysgd.torch.strategies.exchange import GradientExchange
from raysgd.torch.tensors import parameters_of, state_digest
from raysgd.torch.train_state import TorchTrainState


class CollectiveExchange(GradientExchange):
    """Exchanges gradients of the registered models by the collectives of the group."""

    def __init__(self, train_state: TorchTrainState) -> None:
        self._train_state = train_state
        self._dtypes: Mapping[Any, torch.dtype] = {}

    @property
    def needs_warm_up(self) -> bool:  # type: ignore[override]
        models, device = self._train_state.models, self._train_state.settings.device
        return device.type == "cuda" or any(map(is_compiled, models))

    @property
    def num_averaging_workers(self) -> int:  # type: ignore[override]
        return self._train_state.settings.context.world_size if self._averages_gradients else 1

    def wrap(self, ddp_args: Mapping[str, Any], horovod_args: Mapping[str, Any]) -> None:
        self._dtypes = {p: p.dtype for m in self._train_state.models for p in m.parameters()}
        # Also sets up subclasses. `build_operator` calls it again with the wrappers of `setup`.
        self.use_wrappers(())

    def use_wrappers(self, wrappers: Sequence[DistributedDataParallel]) -> None:
        wrapped = {id(wrapper.module): wrapper for wrapper in wrappers}
        self._train_state.models = [wrapped.get(id(m), m) for m in self._train_state.models]

    def sync_initial_state(self) -> None:
        if self.keeps_all_equal and self._train_state.has_all_parameters:
            broadcast_models(self._train_state)

    def check_parameters(self) -> None:
        models = list(map(without_ddp, self._train_state.models))
        dtypes = self._dtypes
        if not self.keeps_all_equal:  # a worker may add parameters, or cast them
            stepped = [p for o in self._train_state.optimizers for p in parameters_of(o)]
            dtypes = {p: p.dtype for p in (*dtypes, *stepped)}
        check_same_parameters(models, dtypes)

    def sync_buffers(self) -> None:
        buffers = [buffer for buffer in self._shared_buffers() if buffer.layout is torch.strided]
        if buffers:
            collectives = self._train_state.collectives
            collectives.barrier()  # an error if another worker still averages
            collectives.broadcast_tensors(buffers, src=0)
            self._train_state.buffer_backup.take()

    def _shared_buffers(self) -> list[torch.Tensor]:
        return [buffer for model in self._train_state.models for buffer in model.buffers()]

    def all_reduce_sum(self, number: float) -> float:
        collectives = self._train_state.collectives
        return collectives.all_reduce_sum(number) if self._averages_gradients else number

    @property
    def _averages_gradients(self) -> bool:
        train_state = self._train_state
        return train_state.settings.context.has_process_group and train_state.placement.replicates


def broadcast_models(train_state: TorchTrainState) -> None:
    """Copy the models of rank 0 to all ranks. Every rank must call this."""
    tensors = [t.detach() for m in train_state.models for t in (*m.parameters(), *m.buffers())]
    # Models with DistributedDataParallel are equal at `register`, but setup may change them.
    if not train_state.collectives.all_ranks_equal(int.from_bytes(state_digest(tensors)[:7])):
        received = train_state.collectives.broadcast(lambda: tensors, 0)
        for tensor, value in zip(tensors, received, strict=False):
            if tensor.shape == value.shape:  # a buffer of another shape is a cache
                tensor.copy_(value)
        train_state.buffer_backup.take()
