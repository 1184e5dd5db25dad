"""Shard parameters, gradients, and optimizer state over the workers: ``sharding="full"``.

PyTorch's ``fully_shard`` gathers parameters before a module needs them, and reduces the gradients
to each worker's rows. `FullyShardedExchange` uses these rows. `FullyShardedPlacement` extends
`OptimizerShards`, and also shards the parameters.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from raysgd.checkpoint.shards import SavedPiece
from raysgd.loop.state_placement import StatePlacement
from raysgd.loop.update import Update
from raysgd.torch.modules import has_only_running_statistics
from raysgd.torch.register_checks import check_same_parameters
from raysgd.torch.strategies.collective_exchange import CollectiveExchange
from raysgd.torch.strategies.sharded_modules import ShardedModules
from raysgd.torch.strategies.sharded_optimizer import OptimizerShards
from raysgd.torch.strategies.shards import Piece, ShardBuffers
from raysgd.torch.tensors import copy_all, copy_to_cpu
from raysgd.torch.train_state import TorchTrainState


class FullyShardedPlacement(OptimizerShards, StatePlacement):
    """Shards models and their optimizer: a `StatePlacement`, and the only feature that it lists.

    A worker sends its gradients to the workers that hold copies of its shard, so that these workers
    can repeat its update. `OptimizerShards` has a table of what differs.

    Args:
        train_state: the training state, with the user's models and an elementwise optimizer. The
            module objects stay the same. The optimizer gets new parameters in each generation.
        arguments: ``sharding_args`` of ``register``.
    """

    def __init__(self, train_state: TorchTrainState, arguments: Mapping[str, Any]) -> None:
        if train_state.micro_batching.batch_norms:
            why = "batch normalization may need fewer parts on some workers"
            train_state.micro_batching.refuse_split(why)
        models, (optimizer,) = train_state.models, train_state.optimizers
        device, dtype = train_state.settings.device, train_state.precision.dtype
        self.modules = ShardedModules(models, arguments.get("wrap_classes"), dtype, device)
        # Rows of a new worker come from the group, or from a state that it loads.
        whole = () if train_state.settings.context.is_alone else self.modules.parameters
        self._values: Mapping[int, torch.Tensor] = dict(enumerate(whole))
        """Complete parameters for `shard_state`, by index."""
        self._received: dict[int, ShardBuffers] = {}
        """Received gradients of the shards that this worker holds as copies, by shard."""
        self.features = (self,)
        if dist.get_world_size() > 1:
            parameters = [p.detach() for p in self.modules.parameters]
            train_state.collectives.broadcast_tensors(parameters, src=0)
        num_copies = arguments.get("num_copies")
        super().__init__(optimizer, num_copies, train_state, list(self.modules.parameters))

    def is_unsharded(self, owner: Any) -> bool:
        return False

    # ---- what full sharding replaces

    def receive_gradients(self) -> None:
        layout, device = self._shard_layout, self._device
        size, rank = layout.size, layout.rank
        self._received, requests = {}, []
        if not (num_copies := layout.num_copies(size)):
            return
        local = layout.new_buffers(rank, device)
        for param_index, view in local.views.items():
            if (gradient := self.modules.gradient(param_index)) is not None:
                view.copy_(gradient)
        for distance in range(1, num_copies + 1):
            dst, src = (rank + distance) % size, (rank - distance) % size
            rows = self._received[src] = layout.new_buffers(src, device)
            requests += [dist.P2POp(dist.isend, buffer, dst) for buffer in local.bytes()]
            requests += [dist.P2POp(dist.irecv, buffer, src) for buffer in rows.bytes()]
        for work in dist.batch_isend_irecv(requests) if requests else ():
            work.wait()

    def gradient(self, shard: int, piece: Piece) -> torch.Tensor | None:
        gradient = self.modules.gradient(piece.param_index)
        if gradient is None:  # the loss does not depend on the parameter on any worker
            return None
        if shard != self._shard_layout.rank:
            gradient = self._received[shard].views[piece.param_index]
        first, _ = self._shard_layout.shards[shard][piece.param_index]
        return gradient[piece.start - first : piece.stop - first]

    def current_elements(self, piece: Piece) -> torch.Tensor:
        assert piece.base is not None
        return piece.base

    def apply_updates(self) -> None:
        self._await_workers()
        new, pieces = self._version + 1, self._pieces
        copy_all((self.current_elements(p), p.values[new]) for p in pieces if new in p.values)
        self._received = {}

    def base_at(self, piece: Piece, version: int) -> torch.Tensor:
        # A rank that is behind has computed the update, but has not applied it.
        if self._version < version and version in piece.values:
            return piece.values[version]
        if piece.base is not None:
            return piece.base
        parameter = self._parameters[piece.param_index]  # what `setup` has made
        return parameter.detach().reshape(-1)[piece.start : piece.stop]

    # ---- training step

    def roll_back(self, update: Update) -> None:
        super().roll_back(update)
        self._received = {}
        self.modules.reset()

    def sync_initial_state(self) -> None:
        super().sync_initial_state()
        self._train_state.buffer_backup.receive(0)()

    # ---- state of this worker

    def load_shards(self, state: Mapping[str, Any]) -> None:
        """Load this worker's rows from complete states of models and optimizer."""
        pairs = zip(self.modules.names, state["models"], strict=False)
        self._values = {
            index: saved[name] for names, saved in pairs for name, index in names.items()
        }
        self.load_optimizer_state(state["optimizers"][0])

    def shard_state(self) -> None:
        super().shard_state()
        for piece in self._pieces:
            if (value := self._values.get(piece.param_index)) is not None:
                rows = value.detach().reshape(-1)[piece.start : piece.stop]
                dtype = self._parameters[piece.param_index].dtype
                piece.base = rows.to(self._device, dtype, copy=True)
        self._values = {}
        context = self._train_state.settings.context  # a replacement places its rows when it joins
        if dist.is_initialized() and not context.is_alone:
            self._shard_models()

    def receive(self, leader_rank: int) -> Callable[[], None]:
        load = super().receive(leader_rank)
        if self.state_status.condition != "lost":
            self._shard_models()
        return load

    def shards_to_save(self) -> list[list[SavedPiece]]:
        names: dict[int, list[tuple[int, str]]] = defaultdict(list)
        for index, param_indices in enumerate(self.modules.names):
            for name, param_index in param_indices.items():
                names[param_index].append((index, name))
        return [self.pieces_to_save(names)]

    @torch.no_grad()
    def _shard_models(self) -> None:
        """Shard the models over the current group, and copy this worker's rows into them."""
        before = self._parameters
        self.modules.shard()
        self._parameters = list(self.modules.parameters)
        new = dict(zip(map(id, before), self._parameters, strict=True))
        for group in self.optimizer.param_groups:
            group["params"] = [new[id(parameter)] for parameter in group["params"]]
        self.optimizer.state = defaultdict(dict)
        layout = self._shard_layout
        for piece in layout.pieces_of(layout.rank, self._pieces):
            first, _ = layout.shards[layout.rank][piece.param_index]
            rows = self.modules.rows(piece.param_index)[piece.start - first : piece.stop - first]
            piece.base = rows.copy_(self.current_elements(piece))

    # ---- complete models

    def export_models(self, num_models: int) -> list[torch.nn.Module]:
        # The collectives of DTensor would block, because they hold the GIL, which gloo needs.
        layout, is_first = self._shard_layout, self._shard_layout.rank == 0
        values = [torch.empty(p.shape if is_first else 0, dtype=p.dtype) for p in self._parameters]
        for number, shard in enumerate(layout.shards):
            rows = {param_index: self.modules.rows(param_index) for param_index in shard}
            if number != layout.rank:
                rows = {n: rows[n].new_empty(stop - start) for n, (start, stop) in shard.items()}
            self._train_state.collectives.broadcast_tensors(list(rows.values()), src=number)
            for param_index, (start, stop) in shard.items() if is_first else ():
                values[param_index].view(-1)[start:stop] = rows[param_index]
        if not is_first:
            return []
        try:
            self.modules.unshard_with(values)
            return [copy_to_cpu(model) for model in self.modules.models[:num_models]]
        finally:
            self._shard_models()


class FullyShardedExchange(CollectiveExchange):
    """Gradients of sharded models. A backward pass leaves each worker the mean of its rows."""

    keeps_all_equal = True
    needs_warm_up = False  # a replacement worker has no rows yet

    def __init__(self, train_state: TorchTrainState) -> None:
        super().__init__(train_state)
        sharded: Any = train_state.placement
        self._modules: ShardedModules = sharded.modules
        self._synced_models = [m for m in train_state.models if not has_only_running_statistics(m)]
        """Models with other buffers than the statistics of batch normalization."""

    def check_parameters(self) -> None:
        check_same_parameters(self._modules.models, {p: p.dtype for p in self._modules.parameters})
        for parameter, trained in zip(self._modules.parameters, self._modules.trained, strict=True):
            if parameter.requires_grad != trained:
                raise RuntimeError(
                    f"requires_grad of a parameter of shape {tuple(parameter.shape)} was {trained} "
                    'in register(sharding="full"), and has changed. Set requires_grad earlier.'
                )

    def begin_micro_batch(self, update: Update) -> None:
        """Broadcast buffers, as DistributedDataParallel does before a forward pass."""
        buffers = [buffer for model in self._synced_models for buffer in model.buffers()]
        self._train_state.collectives.broadcast_tensors(buffers, src=0)

    def gradients_and_norm(self, parameters: Sequence[Any]) -> tuple[Sequence[Any], torch.Tensor]:
        local = [SimpleNamespace(grad=p.grad.to_local()) for p in parameters if p.grad is not None]
        tensors, norm = super().gradients_and_norm(local)
        squared = norm.square()
        dist.all_reduce(squared)
        return tensors, squared.sqrt()

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        return self._modules.gathering_on_demand()
