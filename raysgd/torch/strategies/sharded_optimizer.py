"""Shard the state of an optimizer over the workers.

Every worker has the complete parameters and gradients, and updates its shard of the elements. Then
the workers exchange the updated elements. With copies, a worker also updates shards of other
workers, so that the state of these shards survives a worker loss. Copies need no extra messages.

An update goes into a separate buffer. Parameters change when all shards have arrived, so that a
step that loses a worker is repeated from the same parameters.
"""

import functools
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from raysgd._internal.nested import map_leaves
from raysgd._internal.worker_status import StateStatus
from raysgd.checkpoint.shards import PARAMETER, SavedPiece
from raysgd.loop.feature import UpdateFeature
from raysgd.loop.state_placement import StatePlacement
from raysgd.loop.update import Update
from raysgd.torch.strategies.shards import (
    Piece,
    ShardBuffers,
    ShardLayout,
    Transfer,
    flat,
    is_per_element,
    plan_transfers,
)
from raysgd.torch.tensors import copy_all, copy_leaf, parameters_of
from raysgd.torch.train_state import TorchTrainState

_PARTIAL = -1
"""Version of a partly updated state, which is unusable."""


class OptimizerShards(UpdateFeature):
    """Lets the user's optimizer update this worker's shard.

    Hooks, schedulers, and parameter groups stay valid. Within a step, the groups have the pieces of
    the shard instead of the parameters. Between steps, the optimizer has the parameters and no
    state. A step from version v, the number of updates so far, moves these to the next version:

    ==============================  ==========  ===========================  ====================
    after                           parameters  `Piece.version` and `state`  `Piece.values`
    ==============================  ==========  ===========================  ====================
    the previous commit             v           v                            none
    `_begin_step`                   v           v, state in the optimizer    v + 1: copies of v
    `_end_step`, before the others  v           v + 1                        v + 1
    `apply_updates`                 v + 1       v + 1                        v + 1
    `commit`                        v + 1       v + 1                        none
    `roll_back`, without the others v           v + 1, for the next attempt  v + 1
    `roll_back` within the step     v           `_PARTIAL`, unusable         unusable
    ==============================  ==========  ===========================  ====================

    Full sharding replaces these methods:

    ===================  =======================  ===============================================
    method               here, with all elements  `FullyShardedPlacement`, with rows
    ===================  =======================  ===============================================
    `receive_gradients`  does nothing             receives those of the shards that it copies
    `gradient`           from the parameter       from this worker's rows, or those received
    `current_elements`   from the parameter       `Piece.base`
    `apply_updates`      exchanges all updates    waits for all workers, and applies its updates
    `base_at`            None                     `Piece.base`, with the update if it is behind
    ===================  =======================  ===============================================

    Args:
        optimizer: one of `raysgd.torch.tensors.ELEMENTWISE`, with averaged gradients.
        num_copies: see `ShardLayout`.
        train_state: the training state.
        parameters: parameters that are sharded too, by rows. None if each worker has the complete
            parameters. The layout then covers those of the optimizer, also if they are frozen.
    """

    state_status = StateStatus(is_complete=False)

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        num_copies: int | None,
        train_state: TorchTrainState,
        parameters: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self._train_state, self._device = train_state, train_state.settings.device
        optimized: list[Any] = parameters_of(optimizer)
        self._parameters: Sequence[torch.Tensor] = parameters or optimized
        indices = {parameter: index for index, parameter in enumerate(self._parameters)}
        self._numbers = {indices[p]: number for number, p in enumerate(optimized) if p in indices}
        """Maps the index of each parameter of the optimizer to its number there."""
        updated, by_rows = self._find_updated(), parameters is not None
        self._shard_layout = ShardLayout(self._parameters, updated, num_copies, by_rows)
        self._pieces: list[Piece] = []
        self._running: tuple[list[list[torch.Tensor]], list[Piece]] | None = None
        """Within a step: the parameters of each group, and the pieces that it has instead."""
        self._buffers: dict[int, ShardBuffers] = {}
        # Number of updates of the parameters, now and at the last commit.
        self._version = self._committed_version = 0
        self.is_in_sync = True  # all pieces have the version of the last commit
        # Identifies the run and the number of loaded states. Shards fit together if it is equal.
        self._token: tuple[bytes, int] = os.urandom(16), 0
        # Register this hook first, so that other hooks see the updated parameters.
        optimizer.register_step_post_hook(self._end_step)

    def begin_sharding(self) -> None:
        self.shard_state()
        self.optimizer.register_step_pre_hook(self._begin_step)

    def _find_updated(self) -> set[int]:
        """Return the indices of the parameters that the next step may update."""
        pairs = [(index, self._parameters[index]) for index in self._numbers]
        return {index for index, p in pairs if p.requires_grad or p.grad is not None}

    # ---- what full sharding replaces

    def receive_gradients(self) -> None:
        """Receive gradients of copied shards, if workers have only those of their shards."""

    def gradient(self, shard: int, piece: Piece) -> torch.Tensor | None:
        gradient = self._parameters[piece.param_index].grad
        return None if gradient is None else gradient.reshape(-1)[piece.start : piece.stop]

    def current_elements(self, piece: Piece) -> torch.Tensor:
        return flat(self._parameters[piece.param_index])[piece.start : piece.stop]

    def apply_updates(self) -> None:
        """Copy the updates of all workers into the parameters."""
        pairs = []
        updates = self._shard_layout.all_gather_updates(self._buffers, self._device)
        for shard, buffers in updates.items():
            for param_index, updated in buffers.views.items():
                start, stop = self._shard_layout.shards[shard][param_index]
                pairs.append((flat(self._parameters[param_index])[start:stop], updated))
        copy_all(pairs)

    def base_at(self, piece: Piece, version: int) -> torch.Tensor | None:
        """Return `Piece.base` for workers whose parameters have this `version`."""

    # ---- training step

    @torch.no_grad()
    def _begin_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._check_step(args[1:], kwargs)
        self._await_workers()
        self.receive_gradients()
        layout = self._shard_layout
        layout.updated = self._find_updated()
        self._buffers = {
            shard: layout.new_buffers(shard, self._device) for shard in layout.held_shards()
        }
        groups = optimizer.param_groups
        group_of = [number for number, group in enumerate(groups) for _ in group["params"]]
        params: list[list[torch.Tensor]] = [[] for _ in groups]
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        contents, stepped = [], []
        for shard, buffers in self._buffers.items():
            for piece in layout.pieces_of(shard, self._pieces):
                if (updated := buffers.views.get(piece.param_index)) is None:
                    continue
                first, _ = layout.shards[shard][piece.param_index]
                view = updated[piece.start - first : piece.stop - first]
                if piece.version > self._version:  # it has its update
                    contents.append((piece, view, piece.values[self._version + 1]))
                    continue
                contents.append((piece, view, self.current_elements(piece)))
                view.grad = self.gradient(shard, piece)
                params[group_of[self._numbers[piece.param_index]]].append(view)
                if piece.state:
                    state[view] = piece.state
                stepped.append(piece)
        copy_all((view, content) for _, view, content in contents)
        for piece, view, _ in contents:
            piece.values[self._version + 1] = view
        self._running = [group["params"] for group in groups], stepped
        for group, views in zip(groups, params, strict=True):
            group["params"] = views
        optimizer.state = state

    def _check_step(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        kind = type(self.optimizer).__name__
        if any(argument is not None for argument in (*args, *kwargs.values())):
            raise RuntimeError(
                f"register(sharding=...) does not support {kind}.step(closure). Compute the "
                "gradients first, and call step() without a closure."
            )
        if len(parameters_of(self.optimizer)) != len(self._numbers):
            raise RuntimeError(
                f"The number of parameters of {kind} has changed since register(sharding=...). "
                "Call add_param_group before register."
            )

    def _await_workers(self) -> None:
        """Wait until all workers have come this far, so that either all or none update."""
        if self._shard_layout.size > 1:
            self._train_state.collectives.barrier()

    @torch.no_grad()
    def _end_step(self, *_: Any) -> None:
        self._restore_params()
        for piece in self._pieces:
            piece.version = max(piece.version, self._version + 1)
        if self._train_state.update.optimizer_steps.is_requested:
            for parameter in self._parameters:
                parameter.grad = None  # frees memory for the shards of other workers
        self.apply_updates()
        self._version += 1
        if not self._train_state.update.is_open:
            self.commit(self._train_state.update)  # outside of updates, no step is undone

    def _restore_params(self) -> None:
        """Restore the parameters of the optimizer, and keep the state of the pieces."""
        assert self._running is not None
        params_by_group, pieces = self._running
        for group, parameters in zip(self.optimizer.param_groups, params_by_group, strict=True):
            group["params"] = parameters
        for piece in pieces:
            updated = piece.values[self._version + 1]
            piece.state = self.optimizer.state.get(updated, {})
            updated.grad = None
        self.optimizer.state = defaultdict(dict)
        self._running = None

    def commit(self, update: Update) -> None:
        self._committed_version = self._version
        self._buffers = {}
        self.is_in_sync = all(piece.version == self._version for piece in self._pieces)
        for piece in self._pieces:
            piece.values = {n: v for n, v in piece.values.items() if n > self._version}

    def roll_back(self, update: Update) -> None:
        if self._running is not None:  # the optimizer raised within its step
            for piece in self._running[1]:
                piece.version = _PARTIAL
            self._restore_params()
        self._buffers = {}  # pieces with an uncommitted update keep their buffers
        if update.is_open:
            self._version = self._committed_version  # `Rollback` restores the parameters

    # ---- state of this worker

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Load this worker's shards from a complete state of the optimizer."""
        numbers = [n for group in state["param_groups"] for n in group["params"]]
        pairs = zip(parameters_of(self.optimizer), numbers, strict=True)
        states = {p: dict(state["state"][n]) for p, n in pairs if n in state["state"]}
        # As `load_state_dict` does last: this converts states of old versions.
        self.optimizer.__setstate__({"state": defaultdict(dict, states)})
        self.shard_state()

    def shard_state(self) -> None:
        """Keep this worker's shards of the full state of the optimizer, on the device."""
        full_state, layout = self.optimizer.state, self._shard_layout
        self.optimizer.state = defaultdict(dict)
        self._pieces, self._buffers = [], {}
        layout.compute_shards()
        for shard in layout.held_shards():
            for index, (start, stop) in layout.shards[shard].items():
                parameter = self._parameters[index]
                state = {
                    name: self._convert(name, value, parameter, slice(start, stop))
                    for name, value in full_state.get(parameter, {}).items()
                }
                self._pieces.append(Piece(index, start, stop, self._version, state))
        self._token = self._token[0], self._token[1] + 1
        self.is_in_sync, self.state_status = True, StateStatus(is_complete=False)

    def _convert(self, name: str, value: Any, parameter: torch.Tensor, span: slice) -> Any:
        """Return a copy of a value of the state, for some elements of a parameter.

        It has the dtype and the device that the optimizer needs.
        """
        if not isinstance(value, torch.Tensor):
            return copy_leaf(value)
        value = copy_leaf(value.reshape(-1)[span] if value.shape == parameter.shape else value)
        if name == "step":  # on the CPU, unless a kernel increments it
            groups = self.optimizer.param_groups
            (group,) = (g for g in groups if any(p is parameter for p in g["params"]))
            counts = group.get("fused") or group.get("capturable")
            return value.to(self._device, torch.float32) if counts else value
        casts = is_per_element(value) and parameter.is_floating_point()
        return value.to(self._device, parameter.dtype if casts else value.dtype)

    def sync_initial_state(self) -> None:
        self._token = self._train_state.collectives.broadcast(lambda: self._token, 0)

    def pieces_to_save(self, names: Mapping[int, Any] | None = None) -> list[SavedPiece]:
        """Return this worker's pieces of the optimizer's state, and of models with `names`."""
        return [
            {
                "number": self._numbers.get(piece.param_index),
                "names": tuple(names[piece.param_index]) if names else (),
                "start": piece.start,
                "stop": piece.stop,
                "shape": tuple(self._parameters[piece.param_index].shape),
                "values": piece.state
                | ({PARAMETER: self.current_elements(piece)} if names else {}),
            }
            for piece in self._shard_layout.pieces_of(self._shard_layout.rank, self._pieces)
            if piece.state or names
        ]

    def export_shards(self) -> Any:
        messages = [self._message(p, p.start, p.stop, self._version) for p in self._pieces]
        return self._token, self._version, messages

    def import_shards(self, shards: Any) -> None:
        """Keep shards of the same step. Ignore shards of another step."""
        token, version, messages = shards
        if (token, version) == (self._token, self._version):
            device = self._device  # values that are not sharded, such as steps, stay on the CPU
            moved = map_leaves(messages, lambda x: x.to(device) if is_per_element(x) else x)
            self._pieces += [Piece(*message) for message in moved]

    def receive(self, leader_rank: int) -> Callable[[], None]:
        """Send each rank its shard and its copies of others. All ranks must call this.

        A worker keeps its old shards until all workers have the new ones.
        """
        rank, size, layout = dist.get_rank(), dist.get_world_size(), self._shard_layout
        held_pieces = [(p.param_index, p.start, p.stop, p.version) for p in self._pieces]
        reports: list[Any] = [None] * size
        dist.all_gather_object(reports, (self._token, self._version, held_pieces))
        token, version, _ = reports[leader_rank]
        pieces_by_rank = [held if its_token == token else [] for its_token, _, held in reports]
        shards = [layout.shard(number, size) for number in range(size)]
        transfers = plan_transfers(shards, layout.num_copies(size), version, pieces_by_rank)
        self.state_status = StateStatus(False, condition="lost" if transfers is None else "good")
        if transfers is None:
            return super().receive(leader_rank)
        transfers_by_src: dict[int, list[Transfer]] = defaultdict(list)
        for transfer in transfers:
            transfers_by_src[transfer.src].append(transfer)
        pieces: list[Piece] = []
        for src, outgoing in transfers_by_src.items():
            kept = [transfer for transfer in outgoing if src in transfer.dst]
            sent = [transfer for transfer in outgoing if src not in transfer.dst]
            messages = self._messages(kept, version) if rank == src else []
            if sent:
                make = functools.partial(self._messages, sent, version)
                wanted = any(rank in transfer.dst for transfer in sent)
                broadcasts = self._train_state.collectives.broadcast(make, src, wanted)
                messages += [m for t, m in zip(sent, broadcasts, strict=True) if rank in t.dst]
            pieces += [Piece(*message) for message in messages]
        self._train_state.collectives.barrier()  # after this, no worker needs the old shards
        self._pieces, self._buffers = pieces, {}
        self._token, self._version, self._committed_version = token, version, version
        layout.compute_shards()
        self.is_in_sync = all(transfer.version == version for transfer in transfers)
        return super().receive(leader_rank)

    def _messages(self, transfers: Sequence[Transfer], version: int) -> list[tuple[Any, ...]]:
        """Return the elements of each transfer, of the newest piece that contains them."""
        messages = []
        for index, start, stop, *_ in transfers:
            candidates = (piece for piece in self._pieces if piece.param_index == index)
            fitting = (p for p in candidates if p.start <= start and stop <= p.stop)
            newest = max(fitting, key=lambda piece: piece.version)
            messages.append(self._message(newest, start, stop, version))
        return messages

    def _message(self, piece: Piece, start: int, stop: int, version: int) -> tuple[Any, ...]:
        """Return a copy of some elements, as the fields of a piece.

        Include the updated elements if they are ahead of parameters of this `version`.
        """
        first, last = start - piece.start, stop - piece.start
        state = {
            name: copy_leaf(value[first:last] if is_per_element(value) else value)
            for name, value in piece.state.items()
        }
        is_ahead = piece.version > version
        values = {n: v[first:last].clone() for n, v in piece.values.items() if is_ahead}
        base = self.base_at(piece, version)
        base = None if base is None else base[first:last].clone()
        return piece.param_index, start, stop, piece.version, state, values, base


class ShardedOptimizersPlacement(StatePlacement):
    """Several sharded optimizers. Every worker has the complete models."""

    def __init__(self, train_state: TorchTrainState, sharding_args: Mapping[str, Any]) -> None:
        self.features: list[OptimizerShards] = [
            OptimizerShards(optimizer, sharding_args.get("num_copies"), train_state)
            for optimizer in train_state.optimizers
        ]

    @property
    def state_status(self) -> StateStatus:  # type: ignore[override]
        states = (feature.state_status for feature in self.features)
        return next((s for s in states if s.condition == "lost"), StateStatus(is_complete=False))

    is_in_sync: Any = property(lambda self: all(feature.is_in_sync for feature in self.features))

    def is_unsharded(self, owner: Any) -> bool:
        return all(owner is not feature.optimizer for feature in self.features)

    def begin_sharding(self) -> None:
        for feature in self.features:
            feature.begin_sharding()

    def export_shards(self) -> Any:
        return [feature.export_shards() for feature in self.features]

    def import_shards(self, shards: Any) -> None:
        for feature, exported in zip(self.features, shards, strict=True):
            feature.import_shards(exported)

    def shards_to_save(self) -> list[list[SavedPiece]]:
        return [feature.pieces_to_save() for feature in self.features]

    def load_shards(self, state: Mapping[str, Any]) -> None:
        for feature, saved in zip(self.features, state["optimizers"], strict=True):
            feature.load_optimizer_state(saved)
