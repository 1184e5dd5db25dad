"""Sharded parameters, gradients and optimizer state: ``sharding="full"``.

``fully_shard`` of PyTorch gathers parameters for the modules that need them, and leaves each worker
the gradients of its rows. Updates work as in `ShardedOptimizer`. Parameters change after all
workers have made their updates. In a new generation, the same modules are sharded again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from raysgd.torch import collectives, ddp
from raysgd.torch.features.sharded_optimizer import ShardedOptimizer
from raysgd.torch.meta import Init, materialize
from raysgd.torch.sharding.fsdp import ShardedModels
from raysgd.torch.sharding.layout import RowLayout
from raysgd.torch.sharding.merge import PARAMETER
from raysgd.torch.sharding.pieces import Piece, is_divided, slot_view
from raysgd.torch.state import copy_to_cpu, model_state, renamed_states
from raysgd.torch.tensors import copy_all

if TYPE_CHECKING:
    import contextlib

    from raysgd.torch.train_state import TorchTrainState

__all__ = ["FullyShardedModel"]


class FullyShardedModel(ShardedOptimizer):
    """Shards models, and the optimizer that updates them.

    Args:
        optimizer: an elementwise optimizer. It gets the new parameters after each sharding.
        state: the training state with the user's models.
        arguments: ``copies``, and the arguments of `ShardedModels`.
        dtype: dtype of the computation; None for that of the parameters.
        init: function that initializes a module on the meta device, see `materialize`.
        is_alone: whether this worker joins others later, and receives the models from them.
    """

    _layout: RowLayout
    is_fully_sharded = True
    replicates = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        state: TorchTrainState,
        arguments: Mapping[str, Any],
        dtype: torch.dtype | None,
        init: Init | None = None,
        is_alone: bool = False,
    ) -> None:
        models, device = state.models, state.settings.device
        wrap, again = arguments.get("wrap"), arguments.get("reshard_after_forward")
        offload = arguments.get("offload", False)
        self.models = ShardedModels(models, wrap, again, dtype, device, offload)
        for model in models:
            if not ddp.only_running_statistics(model):
                self.models.call_before(model, _share_buffers)
        self._values: Sequence[torch.Tensor] = [p.detach() for p in self.models.parameters]
        self._init = init
        self._made: dict[tuple[int, int, int], torch.Tensor] = {}
        """Initialized elements, by parameter and range."""
        self._lacks_content = init is not None
        self._received: dict[tuple[int, int], torch.Tensor] = {}
        """Gradients for the copies, by shard and parameter."""
        if dist.get_world_size() > 1:
            there = [value for value in self._values if not value.is_meta]
            collectives.broadcast_tensors(there, source=0)
        if init is not None and is_alone:
            for _ in materialize(models, init, device):  # for the buffers
                pass
        self._is_alone = is_alone
        copies, parameters = arguments.get("copies"), list(self.models.parameters)
        super().__init__(optimizer, copies, state, parameters, RowLayout)
        state.optimization.rows, state.optimization.whole_norm = _rows, _whole_norm
        state.optimization.sums_each_batch = True

    # ---- a step

    def _meet(self) -> None:
        super()._meet()
        self._received = {}
        layout, device = self._layout, self._device
        size, rank = layout.size, layout.rank
        room = layout.room(rank, device)
        for slot in layout.slots[rank][0]:
            if (gradient := self.models.gradient(slot.which)) is not None:
                slot_view(room, slot, slot, gradient.dtype).copy_(gradient)
        sent = []
        for each in range(1, layout.num_copies(size) + 1):
            to, source = (rank + each) % size, (rank - each) % size
            received = layout.room(source, device)
            for slot in layout.slots[source][0]:
                dtype = self._parameters[slot.which].dtype
                self._received[source, slot.which] = slot_view(received, slot, slot, dtype)
            if len(room):
                sent.append(dist.P2POp(dist.isend, room, to))
            if len(received):
                sent.append(dist.P2POp(dist.irecv, received, source))
        for work in dist.batch_isend_irecv(sent) if sent else ():
            work.wait()

    def _now(self, piece: Piece) -> torch.Tensor:
        assert piece.base is not None
        return piece.base

    def _gradient(self, share: int, piece: Piece) -> torch.Tensor | None:
        gradient = self.models.gradient(piece.which)
        if gradient is None:
            return None
        if share != self._layout.rank:
            gradient = self._received[share, piece.which]
        first, _ = self._layout.part(piece.which, share, self._layout.size)
        return gradient[piece.start - first : piece.stop - first]

    def _put_in_place(self) -> None:
        """Copy the updates into the parameters, after all workers have made theirs."""
        self._wait_for_updates()
        pieces = [p for block in self._blocks for p in block.pieces if len(p.stepped)]
        copy_all([self._now(piece) for piece in pieces], [piece.stepped for piece in pieces])
        self._received = {}

    def _wait_for_updates(self) -> None:
        if self._layout.size > 1:
            collectives.minimum(self._version, self._parameters[0].device)

    def roll_back(self) -> None:
        """Also reset a forward or backward pass that failed."""
        super().roll_back()
        self._received = {}
        self.models.reset()

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        return self.models.on_demand()

    def sync_buffers(self) -> None:
        assert self._train_state is not None
        models = self.models.models
        buffers = [buffer for model in models for buffer in model.buffers()]
        self._train_state.broadcast_buffers(buffers)

    def start_together(self) -> None:
        super().start_together()
        assert self._train_state is not None
        buffers = self._train_state.buffers
        buffers.set(self._train_state.from_rank(buffers.tensors, 0))

    # ---- what this worker holds

    def without_shards(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        (of_optimizer,) = state["optimizers"]
        return {**state, "optimizers": [{**of_optimizer, "state": {}}]}

    def load_shards(self, state: Mapping[str, Any]) -> None:
        """Shard the complete states of models and optimizer. Only rows move to the device."""
        (of_optimizer,) = state["optimizers"]
        states = renamed_states(self.models.models, state["models"])
        values: list[Any] = [None] * len(self._parameters)
        for names, state in zip(self.models.names, states, strict=False):
            for name, which in names.items():
                values[which] = state[name]
        pairs = zip(self._parameters, values, strict=True)
        self._values = [(p if v is None else v).detach() for p, v in pairs]
        self._lacks_content = False
        numbers = [n for group in of_optimizer["param_groups"] for n in group["params"]]
        everything = [p for group in self.optimizer.param_groups for p in group["params"]]
        given: dict[Any, Any] = {
            parameter: dict(of_optimizer["state"][number])
            for parameter, number in zip(everything, numbers, strict=True)
            if number in of_optimizer["state"]
        }
        held = {"state": defaultdict(dict, given), "param_groups": self.optimizer.param_groups}
        self.optimizer.__setstate__(held)  # converts states of older files
        self.take_state()

    def _convert(self, name: str, value: Any, parameter: torch.Tensor) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if name == "step":  # on the CPU, except for fused and capturable kernels
            groups = self.optimizer.param_groups
            (group,) = (g for g in groups if any(p is parameter for p in g["params"]))
            counts = group.get("fused") or group.get("capturable")
            return value.to(self._device, torch.float32) if counts else value
        dtype = parameter.dtype if parameter.is_floating_point() else value.dtype
        return value.to(self._device, dtype)

    def take_state(self) -> None:
        """Take the shards of models as well."""
        if self._lacks_content and not self._is_alone:
            self._make(source=0)
        super().take_state()
        self._values, self._made = (), {}
        # otherwise `reshard` does this
        if dist.is_initialized() and not self._lacks_content:
            self._place()

    def reshard(self, leader: int) -> None:
        """Shard models and optimizer over the group."""
        if self._init is not None:
            told = self._lacks_content, self._token
            lacks_content, token = collectives.broadcast_object(told, leader)
            if lacks_content:  # the workers set up alone, and begin as a group
                self._make(leader)
                super().take_state()
                self._token, self._made = token, {}
        super().reshard(leader)
        self._lacks_content = False
        if not self.lacks_shards:
            self._place()

    def import_replica(self, replica: Any) -> None:
        """Hold a replica of the same step. Ignore another."""
        version, content = replica
        if version == self._version:
            super().import_replica(content)

    def export_replica(self) -> Any:
        """Return the replica with its step."""
        return self._version, super().export_replica()

    def model_shards(self) -> list[list[tuple[Any, ...]]]:
        (_, blocks), *_ = self._shares()
        pieces: dict[int, list[Piece]] = defaultdict(list)
        for block in blocks:
            for piece in block.pieces:
                pieces[piece.which].append(piece)
        found = []
        for names in self.models.names:
            of_model: dict[int, tuple[str, ...]] = defaultdict(tuple)
            for name, which in names.items():
                of_model[which] += (name,)
            found.append(
                [
                    (
                        known_as,
                        piece.start,
                        piece.stop,
                        tuple(self._parameters[which].shape),
                        tuple(self._parameters[which].stride()),
                        {PARAMETER: self._now(piece)},
                    )
                    for which, known_as in of_model.items()
                    for piece in pieces[which]
                ]
            )
        return found

    def tensors(self) -> dict[str, Any]:
        """Return this worker's rows of models and of the optimizer's state, by their names."""
        (_, blocks), *_ = self._shares()
        pieces: dict[int, list[Piece]] = defaultdict(list)
        for piece in (piece for block in blocks for piece in block.pieces):
            pieces[piece.which].append(piece)
        found: dict[str, Any] = {}
        seen: set[int] = set()
        for index, names in enumerate(self.models.names):
            for name, which in names.items():
                if which in pieces:
                    own = self.models.local(which)
                    if which in seen:  # the file cannot hold tied tensors
                        own = own.clone()
                    seen.add(which)
                    found[f"models.{index}.{name}"] = self.models.rows_as(which, own)
        for which, of_it in pieces.items():
            of_it.sort(key=lambda piece: piece.start)
            held = [self._state.get(piece.stepped, {}) for piece in of_it]
            for name, value in held[0].items():
                if not is_divided(value, of_it[0].stop - of_it[0].start):
                    continue
                rows = value if len(held) == 1 else torch.cat([each[name] for each in held])
                key = f"optimizers.0.{self._numbers[which]}.{name}"
                found[key] = self.models.rows_as(which, rows)
        return found

    def _make(self, source: int) -> None:
        """Initialize this worker's rows of the models, with the generator of rank `source`."""
        assert self._init is not None
        numbers = collectives.broadcast_object(torch.get_rng_state(), source)
        rank, size = dist.get_rank(), dist.get_world_size()
        empty = [torch.empty(p.shape, dtype=p.dtype, device="meta") for p in self._parameters]
        self.models.put_whole(empty)
        index = {id(parameter): n for n, parameter in enumerate(self.models.parameters)}
        self._lacks_content = False
        # if setup seeds all ranks alike, keep their generators alike
        differ = not torch.equal(numbers, torch.get_rng_state())
        with torch.random.fork_rng(devices=[], enabled=differ):
            torch.set_rng_state(numbers)
            for parameter, content in materialize(
                self.models.models, self._init, self.models.device
            ):
                number = index[id(parameter)]
                for each in range(self._layout.num_copies(size) + 1):
                    start, stop = self._layout.part(number, (rank - each) % size, size)
                    rows = content.view(-1)[start:stop].to(self._device, copy=True)
                    self._made[number, start, stop] = rows

    @property
    def _device(self) -> torch.device:
        return self.models.rows_device

    def _held_shares(self) -> list[int]:
        return [] if self._lacks_content else super()._held_shares()

    def _elements_of(self, index: int, start: int, stop: int) -> torch.Tensor | None:
        if (rows := self._made.get((index, start, stop))) is not None:
            return rows
        parameter = self._parameters[index]
        given = self._values[index].to(self._device, parameter.dtype)
        return given.reshape(-1)[start:stop].clone()

    def _held_base(self, piece: Piece, version: int) -> torch.Tensor | None:
        # a worker that is behind has made the update, but not copied it into the parameters
        is_behind = self._version < version and len(piece.stepped)
        return piece.stepped if is_behind else self._now(piece)

    # ---- the division

    def _place(self) -> None:
        """Shard the models over the current group, and copy this worker's elements into them."""
        new = dict(zip(map(id, self._parameters), range(len(self._parameters)), strict=True))
        self.models.shard()
        parameters = self.models.parameters
        for group in self.optimizer.param_groups:
            group["params"] = [parameters[new[id(each)]] for each in group["params"]]
        kept: dict[torch.Tensor, Any] = {
            parameters[new[id(p)]]: state for p, state in self._undivided.items()
        }
        self._undivided = self.optimizer.state = defaultdict(dict, kept)
        self._parameters = list(parameters)
        self.bind()

    @torch.no_grad()
    def bind(self) -> None:
        """Copy this worker's elements into the memory of the models, and use that memory."""
        if self._lacks_content:
            return
        (_, blocks), *_ = self._shares()
        layout = self._layout
        for block in blocks:
            for piece in block.pieces:
                first, _ = layout.part(piece.which, layout.rank, layout.size)
                room = self.models.local(piece.which)[piece.start - first : piece.stop - first]
                piece.base = room.copy_(self._now(piece))

    # ---- whole models

    def copies(self, count: int) -> list[torch.nn.Module]:
        """Return copies of the first models, whole, on rank 0. All ranks must call it."""
        # collectives of DTensor hold the GIL while they wait, and the gloo threads need it
        layout, is_first = self._layout, self._layout.rank == 0
        values = [torch.empty(p.shape if is_first else 0, dtype=p.dtype) for p in self._parameters]
        for number in range(layout.size):
            parts = [layout.part(index, number, layout.size) for index in range(len(values))]
            rows = [self.models.local(index) for index in range(len(values))]
            if number != layout.rank:
                rows = [
                    own.new_empty(stop - start)
                    for own, (start, stop) in zip(rows, parts, strict=True)
                ]
            collectives.broadcast_tensors(rows, source=number)
            for value, (start, stop), content in zip(values, parts, rows, strict=True):
                if is_first:
                    value.view(-1)[start:stop] = content
        if not is_first:
            return []
        try:
            self.models.put_whole(values)
            return [copy_to_cpu(model) for model in self.models.models[:count]]
        finally:
            self._place()

    def check_trained(self) -> None:
        for parameter, trained in zip(self._parameters, self.models.trained, strict=True):
            if parameter.requires_grad != trained:
                raise RuntimeError(
                    f"requires_grad of a parameter of shape {tuple(parameter.shape)} was {trained} "
                    'at register(sharding="full") and changed. Do not change it, or freeze them '
                    "before register."
                )

    def unsharded(self) -> list[UnshardedModel]:
        """Return what models have beside parameters, as objects that load it."""
        return [
            UnshardedModel(model, names)
            for model, names in zip(self.models.models, self.models.names, strict=True)
        ]


def _rows(parameters: Sequence[torch.Tensor]) -> list[Any]:
    """Return objects whose ``grad`` is that of this worker's rows."""
    held: list[Any] = [p.grad for p in parameters if p.grad is not None]
    return [SimpleNamespace(grad=gradient.to_local()) for gradient in held]


def _whole_norm(norm: torch.Tensor) -> torch.Tensor:
    """Return the norm of all workers' gradients, from that of this worker's."""
    squared = norm.square()
    dist.all_reduce(squared)
    return squared.sqrt()


def _share_buffers(model: torch.nn.Module, *_: Any) -> None:
    """Broadcast buffers before a forward pass, as DistributedDataParallel does."""
    if torch.is_grad_enabled():
        collectives.broadcast_tensors(list(model.buffers()), source=0)


class UnshardedModel:
    """The state of a model without its sharded parameters."""

    def __init__(self, model: torch.nn.Module, names: Mapping[str, int]) -> None:
        self._model, self._names = model, names

    def state_dict(self) -> dict[str, Any]:
        """Return the rest of the model's state."""
        return {k: v for k, v in model_state(self._model).items() if k not in self._names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the rest of a state."""
        rest = {key: value for key, value in state.items() if key not in self._names}
        self._model.load_state_dict(rest, strict=False)
