"""Shard the state of an optimizer over the workers.

Every worker has the complete parameters and gradients. It updates its share of the elements, and
the workers exchange the updated elements. With copies, a worker also updates the shares of others,
so that their state survives them. This sends no messages.

An update goes into a separate buffer. Parameters change when all shares have arrived, so that a
step that loses a worker is repeated from the same parameters. A worker that has updated a share
already keeps that update and does not repeat it.
"""

from __future__ import annotations

import bisect
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import optim

from raysgd.loop.feature import ShardedFeature
from raysgd.torch import collectives
from raysgd.torch.sharding.layout import Layout, Transfer, transfers
from raysgd.torch.sharding.pieces import (
    Block,
    Content,
    Piece,
    cut_like,
    cut_value,
    flat,
    move_content,
    slot_view,
)
from raysgd.torch.tensors import copy_all

if TYPE_CHECKING:
    from raysgd.torch.train_state import TorchTrainState

__all__ = ["ELEMENTWISE", "ShardedOptimizer"]

ELEMENTWISE = (
    optim.ASGD,
    optim.SGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.Adamax,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
)
"""Optimizers that update each element independently of the others."""
_PARTIAL = -1
"""Version of a partly updated state, which is unusable."""


class ShardedOptimizer(ShardedFeature):
    """Lets the user's optimizer update this worker's share.

    Hooks, schedulers, and groups remain. Within a step, the groups have the elements of the share
    in place of the parameters. Between steps, the optimizer has the parameters and no state.

    Args:
        optimizer: one of `ELEMENTWISE`, with averaged gradients.
        copies: see `Layout`.
        state: the training state; None for an optimizer alone.
        parameters: the parameters to shard; None for the trained ones of the optimizer.
        layout: the kind of layout.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        copies: int | None,
        state: TorchTrainState | None = None,
        parameters: Sequence[torch.Tensor] | None = None,
        layout: type[Layout] = Layout,
    ) -> None:
        self.optimizer = optimizer
        self._train_state = state
        everything = [p for group in optimizer.param_groups for p in group["params"]]
        self._num_given = len(everything)
        numbers = {parameter: number for number, parameter in enumerate(everything)}
        if parameters is None:
            parameters = [parameter for parameter in everything if parameter.requires_grad]
        self._parameters: Sequence[torch.Tensor] = parameters
        self._numbers = [numbers.get(p) if p.requires_grad else None for p in parameters]
        self._layout = layout(parameters, [n is not None for n in self._numbers], copies)
        self._state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        self._undivided = self._state  # of frozen parameters; Adagrad has it from the start
        self._blocks: list[Block] = []
        self._swapped: list[list[torch.Tensor]] | None = None
        self._buffers: dict[int, torch.Tensor] = {}
        # Number of updates of the parameters, now and at the last commit.
        self._version = self._committed = 0
        # Identifies the run and the states that it loaded. Workers with another token have other
        # shards.
        self._token: tuple[bytes, int] = os.urandom(16), 0
        self.take_state()
        # Register this hook first, so that other hooks see the updated parameters.
        optimizer.register_step_post_hook(self._end_step)

    def begin(self) -> None:
        """Shard the steps from now on. Register this hook after hooks that inspect a step."""
        self.optimizer.register_step_pre_hook(self._begin_step)

    # ---- training step

    @torch.no_grad()
    def _begin_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._check_step(args[1:], kwargs)
        self._meet()
        params: list[list[torch.Tensor]] = [[] for _ in optimizer.param_groups]
        groups = enumerate(optimizer.param_groups)
        group_of = [number for number, group in groups for _ in group["params"]]
        layout, shares = self._layout, self._shares()
        self._buffers = {share: layout.room(share, self._device) for share, _ in shares}
        into, content, uncommitted = [], [], []
        for share, blocks in shares:
            room = self._buffers[share]
            places = {slot.which: slot for slot in layout.slots[share][0]}
            for block in blocks:
                for piece in block.pieces:
                    if (number := self._numbers[piece.which]) is None:
                        continue
                    dtype = self._parameters[piece.which].dtype
                    view = slot_view(room, places[piece.which], piece, dtype)
                    into.append(view)
                    if block.version > self._version:
                        content.append(piece.stepped)
                        uncommitted.append((piece, view))
                        continue
                    content.append(self._now(piece))
                    piece.stepped.grad = None
                    piece.stepped.data = view
                    piece.stepped.grad = self._gradient(share, piece)
                    params[group_of[number]].append(piece.stepped)
        copy_all(into, content)
        for piece, view in uncommitted:  # last, so that an error leaves them unchanged
            if piece.stepped in self._state:
                self._state[view] = self._state.pop(piece.stepped)
            piece.stepped = view
        self._swapped = [group["params"] for group in optimizer.param_groups]
        for group, pieces in zip(optimizer.param_groups, params, strict=True):
            group["params"] = pieces
        optimizer.state = self._state

    def _meet(self) -> None:
        """Wait until all workers have computed the gradients, so that either all or none update."""
        if self._layout.size > 1:
            collectives.minimum(self._version, self._device)

    def _now(self, piece: Piece) -> torch.Tensor:
        return flat(self._parameters[piece.which])[piece.start : piece.stop]

    def _gradient(self, share: int, piece: Piece) -> torch.Tensor | None:
        parameter = self._parameters[piece.which]
        if parameter.grad is None:
            return None
        return flat(parameter.grad, like=parameter)[piece.start : piece.stop]

    @torch.no_grad()
    def _end_step(self, *_: Any) -> None:
        if self._swapped is None:
            return
        self._give_back()
        for block in self._blocks:
            block.version = self._version + 1
        if self._train_state is not None and self._train_state.optimization.in_helper:
            for parameter in self._parameters:
                parameter.grad = None  # frees memory for the shares of other workers
        self._put_in_place()
        self._version += 1

    def _put_in_place(self) -> None:
        """Copy the updates of all workers into the parameters."""
        into, content = [], []
        for share, room in self._exchange().items():
            for slot in self._layout.slots[share][0]:
                parameter = self._parameters[slot.which]
                into.append(flat(parameter)[slot.start : slot.stop])
                content.append(slot_view(room, slot, slot, parameter.dtype))
        copy_all(into, content)

    def _exchange(self) -> dict[int, torch.Tensor]:
        """Return the updated elements of all shares.

        One broadcast per share sends as much as an all-gather, and needs half of its memory.
        """
        layout, size = self._layout, self._layout.size
        if len(self._buffers) == size:
            return self._buffers
        rooms = {n: layout.room(n, self._device) for n in range(size) if n != layout.rank}
        rooms[layout.rank] = self._buffers[layout.rank]
        works = [
            dist.broadcast(rooms[n], src=n, async_op=True) for n in range(size) if len(rooms[n])
        ]
        for work in works:
            work.wait()
        if rooms[0].device.type == "cuda":  # errors must surface before parameters change
            torch.cuda.current_stream().synchronize()
        return rooms

    def _give_back(self) -> None:
        """Restore the parameters of the optimizer, and keep the state of the shares."""
        if self._swapped is None:
            return
        for group, parameters in zip(self.optimizer.param_groups, self._swapped, strict=True):
            group["params"] = parameters
        self._swapped = None
        self.optimizer.state = self._undivided
        for block in self._blocks:
            for piece in block.pieces:
                piece.stepped.grad = None

    def commit(self) -> None:
        self._committed = self._version
        self._buffers = {}
        self.ranks_in_sync = True
        for block in self._blocks:
            if block.version == self._version:
                for piece in block.pieces:
                    piece.stepped.data = piece.stepped.new_empty(0)
            else:
                self.ranks_in_sync = False

    def roll_back(self) -> None:
        if self._swapped is not None:  # the optimizer raised within its step
            for block in self._blocks:
                if block.version == self._version:
                    block.version = _PARTIAL
        self._give_back()
        self._buffers = {}  # pieces with an uncommitted update keep theirs
        step = None if self._train_state is None else self._train_state.step
        if step is not None and step.is_open and step.has_several_updates:
            self._version = self._committed  # `Rollback` restores the parameters

    def _check_step(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        kind = type(self.optimizer).__name__
        if any(each is not None for each in (*args, *kwargs.values())):
            raise RuntimeError(
                f"{kind}.step(closure) does not work with register(sharding=...). Compute the "
                "gradients first, and call step() without a closure."
            )
        if sum(len(group["params"]) for group in self.optimizer.param_groups) != self._num_given:
            raise RuntimeError(
                f"{kind} has other parameters than at register(sharding=...). Call add_param_group "
                "before register."
            )

    # ---- state of this worker

    def take_state(self) -> None:
        """Keep this worker's shares of the optimizer state.

        Every worker starts with the full state.
        """
        whole = self.optimizer.state
        updated = {p for p, n in zip(self._parameters, self._numbers, strict=True) if n is not None}
        rest = {p: whole[p] for p in whole.keys() - updated}
        self._undivided = self.optimizer.state = defaultdict(dict, rest)
        self._state, self._blocks, self._buffers = defaultdict(dict), [], {}
        layout = self._layout
        layout.lay_out()
        held = [each for n in self._held_shares() for each in layout.share(n, layout.size)]
        for start, stop in held:
            contents = []
            for index, first, end in layout.cuts(start, stop):
                parameter = self._parameters[index]
                state = {
                    name: self._convert(name, cut_like(value, parameter, first, end), parameter)
                    for name, value in whole.get(parameter, {}).items()
                    if parameter in updated
                }
                base = self._elements_of(index, first, end)
                contents.append(Content(index, first, end, None, state, base))
            self._add(self._state, self._blocks, start, stop, self._version, contents)
        self._token = self._token[0], self._token[1] + 1
        self.ranks_in_sync, self.lacks_shards = True, False

    def _convert(self, name: str, value: Any, parameter: torch.Tensor) -> Any:
        """Return a value of the state with the dtype and device that the optimizer needs."""
        return value

    def load_shards(self, state: Mapping[str, Any]) -> None:
        self.take_state()

    def start_together(self) -> None:
        self._token = collectives.broadcast_object(self._token, 0)

    def shards(self) -> list[tuple[Any, ...]]:
        return [
            (
                self._numbers[piece.which],
                piece.start,
                piece.stop,
                tuple(self._parameters[piece.which].shape),
                tuple(self._parameters[piece.which].stride()),
                self._state[piece.stepped],
            )
            for block in self._own_blocks()
            for piece in block.pieces
            if piece.stepped in self._state
        ]

    def _elements_of(self, index: int, start: int, stop: int) -> torch.Tensor | None:
        """Return elements of a parameter for a piece if parameters are sharded too."""
        return None

    def export_replica(self) -> Any:
        blocks = [(b.start, b.stop, b.version) for b in self._blocks]
        return self._token, [
            (*block, [tuple(each) for each in self._contents(*block[:2], self._version)])
            for block in blocks
        ]

    def import_replica(self, replica: Any) -> None:
        token, blocks = replica
        if token != self._token:
            return
        for start, stop, version, contents in blocks:
            on_device = [move_content(Content(*each), self._device) for each in contents]
            self._add(self._state, self._blocks, start, stop, version, on_device)

    def receive(self, leader: int) -> Callable[[], None]:
        self.reshard(leader)
        return super().receive(leader)

    def reshard(self, leader: int) -> None:
        """Exchange shards until each rank has its own and its copies. All ranks must call this.

        A worker keeps its old shards until all workers have the new ones.
        """
        rank, size = dist.get_rank(), dist.get_world_size()
        own = [(block.start, block.stop, block.version) for block in self._blocks]
        holdings: list[Any] = [None] * size
        dist.all_gather_object(holdings, (self._token, self._version, own))
        token, version, _ = holdings[leader]
        layout = self._layout
        held = [blocks if of == token else [] for of, _, blocks in holdings]
        shares = [layout.share(each, size) for each in range(size)]
        planned = transfers(shares, layout.num_copies(size), version, held)
        self.lacks_shards = planned is None
        if planned is None:
            return
        messages: dict[tuple[int, tuple[int, ...]], list[Transfer]] = {}
        for each in planned:
            messages.setdefault((each.source, each.to), []).append(each)
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        blocks: list[Block] = []
        for (source, to), of_it in messages.items():
            if to != (source,):
                found = self._transfer(of_it, version, source, to)
            elif rank == source:
                found = [self._contents(start, stop, version) for start, stop, *_ in of_it]
            if rank in to:
                for (start, stop, newest, *_), contents in zip(of_it, found, strict=True):
                    self._add(state, blocks, start, stop, newest, contents)
        collectives.minimum(0, self._device)  # after this, no worker needs the old shards
        self._state, self._blocks, self._buffers = state, blocks, {}
        self._token, self._version, self._committed = token, version, version
        layout.lay_out()
        self.ranks_in_sync = all(each.version == version for each in planned)

    def _transfer(
        self,
        planned: Sequence[Transfer],
        version: int,
        source: int,
        to: Sequence[int],
    ) -> list[list[Content]]:
        """Send or receive elements of rank `source`."""
        rank, device = dist.get_rank(), self._device
        everyone = device.type != "cpu"  # only gloo sends to some ranks
        if not everyone and rank != source and rank not in to:
            return []
        sent: list[list[tuple[Any, ...]]] = collectives.broadcast_state(
            lambda: [
                [tuple(each) for each in self._contents(start, stop, version)]
                for start, stop, *_ in planned
            ],
            source,
            device,
            None if everyone else to,
        )
        return [[Content(*each) for each in contents] for contents in sent]

    def _contents(self, start: int, stop: int, version: int) -> list[Content]:
        """Return this rank's newest version of some elements."""
        fitting = [b for b in self._blocks if b.start <= start and stop <= b.stop]
        block = max(fitting, key=lambda b: b.version)
        contents = []
        for piece in block.pieces:
            first = self._layout.starts[piece.which] + piece.start
            a, b = max(start - first, 0), min(stop - first, piece.stop - piece.start)
            if a >= b:
                continue
            length = piece.stop - piece.start
            state = {
                name: cut_value(value, length, a, b)
                for name, value in self._state.get(piece.stepped, {}).items()
            }
            value = piece.stepped[a:b].clone() if block.version > version else None
            base = self._held_base(piece, version)
            contents.append(
                Content(
                    piece.which,
                    piece.start + a,
                    piece.start + b,
                    value,
                    state,
                    None if base is None else base[a:b].clone(),
                )
            )
        return contents

    def _held_base(self, piece: Piece, version: int) -> torch.Tensor | None:
        """Return the elements of a piece in a version if parameters are sharded too."""
        return None

    def _add(
        self,
        state: defaultdict[torch.Tensor, Any],
        blocks: list[Block],
        start: int,
        stop: int,
        version: int,
        contents: Sequence[Content],
    ) -> None:
        pieces = []
        for index, first, end, value, of_piece, base in contents:
            stepped = value
            if stepped is None:
                dtype = self._parameters[index].dtype
                stepped = torch.empty(0, dtype=dtype, device=self._device)
            if of_piece:
                state[stepped] = of_piece
            pieces.append(Piece(index, first, end, stepped, base))
        blocks.append(Block(start, stop, version, pieces))

    def _held_shares(self) -> list[int]:
        return self._layout.held_shares()

    def _shares(self) -> list[tuple[int, list[Block]]]:
        """Return the shares that this rank holds with their blocks, its own share first."""
        found = []
        for share in self._held_shares():
            parts = self._layout.share(share, self._layout.size)
            starts = [start for start, _ in parts]
            blocks = []
            for block in self._blocks:
                number = bisect.bisect_right(starts, block.start) - 1
                if number >= 0 and block.stop <= parts[number][1]:
                    blocks.append(block)
            found.append((share, blocks))
        return found

    def _own_blocks(self) -> list[Block]:
        _, blocks = self._shares()[0]
        return blocks

    @property
    def _device(self) -> torch.device:
        return self._parameters[0].device
