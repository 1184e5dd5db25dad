"""Optimizers whose work and state are divided over the workers.

Every worker has the whole parameters and, after the backward pass, the same whole gradients. It
updates its share of the elements, with the state for these alone, and then all exchange what they
have updated. With copies, the shares of other workers too, so that their state is there when they
are lost: nothing is sent for that.

An update is made in memory of its own, and the parameters stay as they are until every share of the
new ones has come. So a step in which a worker is lost is made again, from the same parameters; who
had made the update of a share is *ahead* in it, and does not make it twice.
"""

from __future__ import annotations

import bisect
import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import optim

from raysgd.errors import CheckpointError
from raysgd.loop.feature import ShardedFeature
from raysgd.torch import collectives

if TYPE_CHECKING:
    from raysgd.torch.train_state import TorchTrainState

__all__ = [
    "ELEMENTWISE",
    "PARAMETER",
    "Piece",
    "ShardedOptimizer",
    "Transfer",
    "copy_all",
    "is_dense",
    "is_divided",
    "placed",
    "share_of",
    "transfers",
    "whole",
]

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
"""Optimizers that update each element by its own gradient and state, so that any part can be
updated by itself."""
_ALIGNMENT = 16
"""Bytes, a multiple of the size of every type."""
PARAMETER = "parameter"
"""Under what name a model's parameter is in a worker's share of the state."""
_HALF_MADE = -1
"""The version of state that nobody can use."""


# ---- who holds what


def share_of(total: int, size: int, rank: int) -> tuple[int, int]:
    """Return the elements, from and to, that a rank of so many updates.

    >>> [share_of(10, 3, rank) for rank in range(3)]
    [(0, 3), (3, 6), (6, 10)]
    """
    return total * rank // size, total * (rank + 1) // size


class Transfer(NamedTuple):
    """Elements that a rank has, and the ranks that shall have them; it may be one of these."""

    start: int
    stop: int
    version: int
    source: int
    to: tuple[int, ...]


def transfers(
    shares: Sequence[Sequence[tuple[int, int]]],
    copies: int,
    lowest: int,
    held: Sequence[Iterable[tuple[int, int, int]]],
) -> list[Transfer] | None:
    """Return what is to be sent so that each rank has its share, and copies of the ones before it.

    Args:
        shares: for each rank the elements that it shall have, from and to; together all there are.
        copies: so many ranks have a share besides its own.
        lowest: the version of the parameters; state of an older one is worth nothing.
        held: for each rank what it has: from which element to which, in which version.

    Returns:
        The transfers, in one order for all ranks; None if there are elements that nobody has.

    >>> transfers([[(0, 3)], [(3, 6)]], 0, 1, [[(0, 6, 1)], []])
    [Transfer(start=0, stop=3, version=1, source=0, to=(0,)), \
Transfer(start=3, stop=6, version=1, source=0, to=(1,))]
    >>> transfers([[(0, 3)], [(3, 6)]], 0, 1, [[(0, 4, 1)], []]) is None
    True
    """
    size = len(shares)
    bounds = {bound for share in shares for each in share for bound in each}
    cuts = sorted(bounds.union(*(each[:2] for of_rank in held for each in of_rank)))
    place = {cut: number for number, cut in enumerate(cuts)}
    owners: dict[int, int] = {}
    for rank, share in enumerate(shares):
        owners |= {n: rank for start, stop in share for n in range(place[start], place[stop])}
    versions: list[dict[int, int]] = [{} for _ in cuts]  # by rank, from each cut to the next
    for rank, of_rank in enumerate(held):
        for start, stop, version in of_rank:
            for number in range(place[start], place[stop]) if version >= lowest else ():
                # the newest of what it holds, and what it was handed
                versions[number][rank] = max(version, versions[number].get(rank, version))
    planned: list[Transfer] = []
    load = [0] * size
    for number, owner in sorted(owners.items()):
        start, stop, found = cuts[number], cuts[number + 1], versions[number]
        if not found:
            return None
        newest = max(found.values())
        sources = [rank for rank, version in found.items() if version == newest]
        holders = [(owner + each) % size for each in range(min(copies, size - 1) + 1)]
        keep = [rank for rank in holders if rank in sources]
        planned += [Transfer(start, stop, newest, rank, (rank,)) for rank in keep]
        if lacking := tuple(rank for rank in holders if rank not in sources):
            source = min(sources, key=lambda rank: (load[rank], rank))
            load[source] += stop - start
            planned.append(Transfer(start, stop, newest, source, lacking))
    return planned


@dataclass(eq=False)
class Piece:
    """Consecutive elements of one parameter, in the order of memory."""

    which: int
    """Which of the parameters."""
    start: int
    stop: int
    stepped: torch.Tensor
    """What the optimizer updates, by which it knows the state. Without content, but within a step
    and where it is ahead."""
    base: torch.Tensor | None = None
    """The elements as they are, where the parameters are divided as well."""


@dataclass(eq=False)
class _Block:
    """Consecutive elements of all parameters, which came from one source."""

    start: int
    stop: int
    version: int
    """How many updates they have had."""
    pieces: list[Piece]


class _Slot(NamedTuple):
    """Where the elements of a parameter that belong to a share are in a buffer."""

    which: int
    start: int
    stop: int
    place: int
    """The first byte."""


class _Content(NamedTuple):
    """What is sent of a piece."""

    which: int
    start: int
    stop: int
    value: torch.Tensor | None
    """The updated elements, where they are ahead."""
    state: dict[str, Any]
    base: torch.Tensor | None = None
    """The elements, where the parameters are divided as well."""


class ShardedOptimizer(ShardedFeature):
    """Lets an optimizer of a worker update the worker's share.

    It is the user's optimizer that steps, with its hooks, schedulers and groups. Within a step its
    groups have, in place of the parameters, the elements of the share; in between it has the
    parameters and no state.

    Args:
        optimizer: of a kind in `ELEMENTWISE`, with parameters whose gradients are averaged.
        copies: how many other workers hold the state of a share; None: one, where there are three
            workers or more.
        state: what is trained; None for an optimizer by itself.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        copies: int | None,
        state: TorchTrainState | None = None,
    ) -> None:
        self.optimizer = optimizer
        self._copies = copies
        self._train_state = state
        everything = [p for group in optimizer.param_groups for p in group["params"]]
        self._num_given = len(everything)
        numbers = {parameter: number for number, parameter in enumerate(everything)}
        self._parameters: list[torch.Tensor] = self._row(everything)
        self._numbers = [numbers.get(p) if p.requires_grad else None for p in self._parameters]
        sizes = [parameter.numel() for parameter in self._parameters]
        self._starts = [0, *itertools.accumulate(sizes)]
        self._total = self._starts[-1]
        self._state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        self._undivided = self._state  # of what is frozen; some optimizers have it from the start
        self._blocks: list[_Block] = []
        self._rank = 0
        self._layouts: list[tuple[list[_Slot], int]] = []
        self._swapped: list[list[torch.Tensor]] | None = None
        self._buffers: dict[int, torch.Tensor] = {}
        # how many updates the parameters have had, and had at the last commit
        self._version = self._committed = 0
        # of the run, and of the states that it loaded: who has another has nothing to give
        self._token: tuple[bytes, int] = os.urandom(16), 0
        self.take_state()
        # so that hooks of others see the parameters, and an update that has come
        optimizer.register_step_post_hook(self._end_step)

    def begin(self) -> None:
        """Divide the steps from now on; whoever looks at a step ahead has asked for that by now."""
        self.optimizer.register_step_pre_hook(self._begin_step)

    # ---- a step

    @torch.no_grad()
    def _begin_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._check_step(args[1:], kwargs)
        self._meet()
        params: list[list[torch.Tensor]] = [[] for _ in optimizer.param_groups]
        group_of, shares = self._groups(), self._shares()
        self._buffers = {share: self._room(share) for share, _ in shares}
        into, content, ahead = [], [], []
        for share, blocks in shares:
            room = self._buffers[share]
            places = {slot.which: slot for slot in self._layouts[share][0]}
            for block in blocks:
                for piece in block.pieces:
                    if (number := group_of[piece.which]) is None:
                        continue
                    dtype = self._parameters[piece.which].dtype
                    view = placed(room, places[piece.which], piece, dtype)
                    into.append(view)
                    if block.version > self._version:
                        content.append(piece.stepped)
                        ahead.append((piece, view))
                        continue
                    content.append(self._now(piece))
                    piece.stepped.grad = None
                    piece.stepped.data = view
                    piece.stepped.grad = self._gradient(share, piece)
                    params[number].append(piece.stepped)
        copy_all(into, content)
        for piece, view in ahead:  # only now: what fails before leaves them as they are
            piece.stepped = self._renamed(piece.stepped, view)
        self._swapped = [group["params"] for group in optimizer.param_groups]
        for group, pieces in zip(optimizer.param_groups, params, strict=True):
            group["params"] = pieces
        optimizer.state = self._state

    def _meet(self) -> None:
        """Wait until all have the gradients: if one raises before this, nobody has updated."""
        if len(self._layouts) > 1:
            collectives.minimum(self._version, self._device)

    def _now(self, piece: Piece) -> torch.Tensor:
        return _flat(self._parameters[piece.which])[piece.start : piece.stop]

    def _gradient(self, share: int, piece: Piece) -> torch.Tensor | None:
        parameter = self._parameters[piece.which]
        if parameter.grad is None:
            return None
        return _flat(parameter.grad, like=parameter)[piece.start : piece.stop]

    def _renamed(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        if old in self._state:
            self._state[new] = self._state.pop(old)
        return new

    @torch.no_grad()
    def _end_step(self, *_: Any) -> None:
        if self._swapped is None:
            return
        self._give_back()
        for block in self._blocks:
            block.version = self._version + 1
        if self._train_state is not None and self._train_state.optimization.in_helper:
            for parameter in self._parameters:
                parameter.grad = None  # whose room the parameters of others can have
        self._put_in_place()
        self._version += 1

    def _put_in_place(self) -> None:
        """Let the parameters have the updates of all, once these are made."""
        into, content = [], []
        for share, room in self._exchanged().items():
            for slot in self._layouts[share][0]:
                parameter = self._parameters[slot.which]
                into.append(_flat(parameter)[slot.start : slot.stop])
                content.append(placed(room, slot, slot, parameter.dtype))
        copy_all(into, content)

    def _exchanged(self) -> dict[int, torch.Tensor]:
        """Return the updated elements of all shares, once all of them have come.

        Each is broadcast by itself, which sends as much as gathering them: that would take the
        room twice.
        """
        size = len(self._layouts)
        if len(self._buffers) == size:
            return self._buffers
        rooms = {share: self._room(share) for share in range(size) if share != self._rank}
        rooms[self._rank] = self._buffers[self._rank]
        works = [
            dist.broadcast(rooms[n], src=n, async_op=True) for n in range(size) if len(rooms[n])
        ]
        for work in works:
            work.wait()
        if rooms[0].device.type == "cuda":  # a failure is to show before parameters change
            torch.cuda.current_stream().synchronize()
        return rooms

    def _give_back(self) -> None:
        """Let the optimizer have what it had before the step, and keep the state."""
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
        """Let an update stay."""
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
        """Prepare to repeat a step that was discarded.

        If the optimizer raised within its step, this worker's share is partly updated. It counts
        for nothing from now on.
        """
        if self._swapped is not None:
            for block in self._blocks:
                if block.version == self._version:
                    block.version = _HALF_MADE
        self._give_back()
        self._buffers = {}  # what is ahead holds on to its own
        step = None if self._train_state is None else self._train_state.step
        if step is not None and step.is_open and step.has_several_updates:
            self._version = self._committed  # `Rollback` restores the parameters

    def _check_step(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        kind = type(self.optimizer).__name__
        if any(each is not None for each in (*args, *kwargs.values())):
            raise RuntimeError(
                f"{kind}.step(closure) with register(sharding=...): a closure computes gradients "
                "within the step. Compute them before it, and call step() without a closure."
            )
        if sum(len(group["params"]) for group in self.optimizer.param_groups) != self._num_given:
            raise RuntimeError(
                f"{kind} has other parameters than at register(sharding=...), which divided those "
                "it had. Call add_param_group before register."
            )

    # ---- what this worker holds

    def take_state(self) -> None:
        """Divide the state that the optimizer has in whole, as on every worker."""
        whole = self.optimizer.state
        updated = {p for p, n in zip(self._parameters, self._numbers, strict=True) if n is not None}
        rest = {p: whole[p] for p in whole.keys() - updated}
        self._undivided = self.optimizer.state = defaultdict(dict, rest)
        self._state, self._blocks, self._buffers = defaultdict(dict), [], {}
        self._lay_out()
        held = [each for n in self._held_shares() for each in self._share(n, len(self._layouts))]
        for start, stop in held:
            contents = []
            for index, first, end in self._cuts(start, stop):
                parameter = self._parameters[index]
                state = {
                    name: self._taken(name, _cut(value, parameter, first, end), parameter)
                    for name, value in whole.get(parameter, {}).items()
                    if parameter in updated
                }
                base = self._given(index, first, end)
                contents.append(_Content(index, first, end, None, state, base))
            self._add(self._state, self._blocks, start, stop, self._version, contents)
        self._token = self._token[0], self._token[1] + 1
        self.ranks_in_sync, self.lacks_shards = True, False

    def _taken(self, name: str, value: Any, parameter: torch.Tensor) -> Any:
        """Return a value of the state, for elements of a parameter, as the optimizer needs it."""
        return value

    def load_shards(self, state: Mapping[str, Any]) -> None:
        self.take_state()

    def start_together(self) -> None:
        self._token = collectives.broadcast_object(self._token, 0)

    def shards(self) -> list[tuple[Any, ...]]:
        (_, blocks), *_ = self._shares()
        return [
            (
                self._numbers[piece.which],
                piece.start,
                piece.stop,
                tuple(self._parameters[piece.which].shape),
                tuple(self._parameters[piece.which].stride()),
                self._state[piece.stepped],
            )
            for block in blocks
            for piece in block.pieces
            if piece.stepped in self._state
        ]

    def _given(self, index: int, start: int, stop: int) -> torch.Tensor | None:
        """Return elements of a parameter for a piece to hold, where parameters are divided."""
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
            placed = [_on_device(_Content(*each), self._device) for each in contents]
            self._add(self._state, self._blocks, start, stop, version, placed)

    def receive(self, leader: int) -> Callable[[], None]:
        """Divide the state again among the workers of the group.

        A worker keeps what it has until all have what they lack. All have the parameters of the
        leader, or receive them when this is done.
        """
        self.reshard(leader)
        return super().receive(leader)

    def reshard(self, leader: int) -> None:
        """Do so. Every rank must call it."""
        rank, size = dist.get_rank(), dist.get_world_size()
        own = [(block.start, block.stop, block.version) for block in self._blocks]
        told: list[Any] = [None] * size
        dist.all_gather_object(told, (self._token, self._version, own))
        token, version, _ = told[leader]
        copies = self._num_copies(size)
        held = [blocks if of == token else [] for of, _, blocks in told]
        shares = [self._share(each, size) for each in range(size)]
        planned = transfers(shares, copies, version, held)
        self.lacks_shards = planned is None
        if planned is None:
            return
        messages: dict[tuple[int, tuple[int, ...]], list[Transfer]] = {}
        for each in planned:
            messages.setdefault((each.source, each.to), []).append(each)
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        blocks: list[_Block] = []
        for (source, to), of_it in messages.items():
            if to != (source,):
                found = self._sent(of_it, version, source, to)
            elif rank == source:
                found = [self._contents(start, stop, version) for start, stop, *_ in of_it]
            if rank in to:
                for (start, stop, newest, *_), contents in zip(of_it, found, strict=True):
                    self._add(state, blocks, start, stop, newest, contents)
        collectives.minimum(0, self._device)  # from now on nobody needs what the others had
        self._state, self._blocks, self._buffers = state, blocks, {}
        self._token, self._version, self._committed = token, version, version
        self._lay_out()
        self.ranks_in_sync = all(each.version == version for each in planned)

    def _sent(
        self,
        planned: Sequence[Transfer],
        version: int,
        source: int,
        to: Sequence[int],
    ) -> list[list[_Content]]:
        """Send, or receive, what rank `source` has of some elements."""
        rank, device = dist.get_rank(), self._device
        everyone = device.type != "cpu"  # who sends to a few does it by gloo
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
        return [[_Content(*each) for each in contents] for contents in sent]

    def _contents(self, start: int, stop: int, version: int) -> list[_Content]:
        """Return what this rank has of some elements, in their newest version."""
        fitting = [b for b in self._blocks if b.start <= start and stop <= b.stop]
        block = max(fitting, key=lambda b: b.version)
        contents = []
        for piece in block.pieces:
            first = self._starts[piece.which] + piece.start
            a, b = max(start - first, 0), min(stop - first, piece.stop - piece.start)
            if a >= b:
                continue
            length = piece.stop - piece.start
            state = {
                name: _part(value, length, a, b)
                for name, value in self._state.get(piece.stepped, {}).items()
            }
            value = piece.stepped[a:b].clone() if block.version > version else None
            base = self._held_base(piece, version)
            contents.append(
                _Content(
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
        """Return the elements of a piece in a version, where the parameters are divided."""
        return None

    def _add(
        self,
        state: defaultdict[torch.Tensor, Any],
        blocks: list[_Block],
        start: int,
        stop: int,
        version: int,
        contents: Sequence[_Content],
    ) -> None:
        pieces = []
        for index, first, end, value, of_piece, base in contents:
            stepped = self._empty(index) if value is None else value
            if of_piece:
                state[stepped] = of_piece
            pieces.append(Piece(index, first, end, stepped, base))
        blocks.append(_Block(start, stop, version, pieces))

    # ---- the division

    def _num_copies(self, size: int) -> int:
        copies = int(size >= 3) if self._copies is None else self._copies
        return min(copies, size - 1)

    def _held_shares(self) -> list[int]:
        size = len(self._layouts)
        return [(self._rank - each) % size for each in range(self._num_copies(size) + 1)]

    def _shares(self) -> list[tuple[int, list[_Block]]]:
        """Return the shares that this rank holds, each with its blocks."""
        size = len(self._layouts)
        found = []
        for share in self._held_shares():
            parts = self._share(share, size)
            starts = [start for start, _ in parts]
            blocks = []
            for block in self._blocks:
                number = bisect.bisect_right(starts, block.start) - 1
                if number >= 0 and block.stop <= parts[number][1]:
                    blocks.append(block)
            found.append((share, blocks))
        return found

    def _share(self, number: int, size: int) -> list[tuple[int, int]]:
        return [share_of(self._total, size, number)]

    def _cuts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield which elements of which parameters some elements of the row are."""
        index = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            first, end = self._starts[index], min(self._starts[index + 1], stop)
            if start < end:
                yield index, start - first, end - first
            start, index = max(start, end), index + 1

    def _empty(self, index: int) -> torch.Tensor:
        return torch.empty(0, dtype=self._parameters[index].dtype, device=self._device)

    @property
    def _device(self) -> torch.device:
        return self._parameters[0].device

    def _lay_out(self) -> None:
        """Note where in a buffer the elements of each share are, in the group that there is."""
        # a worker that takes over a snapshot before it enters a group may have lost its last one
        is_in_group = dist.is_initialized()
        self._rank, size = (dist.get_rank(), dist.get_world_size()) if is_in_group else (0, 1)
        self._layouts = []
        for share in range(size):
            slots, place = [], 0
            for index, a, b in (c for each in self._share(share, size) for c in self._cuts(*each)):
                if self._numbers[index] is None:
                    continue
                slots.append(_Slot(index, a, b, place))
                num_bytes = (b - a) * self._parameters[index].element_size()
                place += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
            self._layouts.append((slots, place))

    def _room(self, share: int) -> torch.Tensor:
        _, size = self._layouts[share]
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _row(self, everything: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [parameter for parameter in everything if parameter.requires_grad]

    def _groups(self) -> list[int | None]:
        """Return the group of each parameter; None for one that is not updated."""
        groups = self.optimizer.param_groups
        numbers = [number for number, group in enumerate(groups) for _ in group["params"]]
        return [None if number is None else numbers[number] for number in self._numbers]


def whole(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state as where nothing is divided, from one that has every worker's share.

    Raises:
        CheckpointError: if a part of it is missing.
    """
    merged = dict(state)
    shares = merged.pop("shares", None)
    if shares is None:
        return merged
    count = len(state["optimizers"])
    merged["optimizers"] = [
        {**optimizer, "state": {**optimizer["state"], **_joined(itertools.chain(*parts))}}
        for optimizer, *parts in zip(
            state["optimizers"], *(share[:count] for share in shares), strict=True
        )
    ]
    of_models = [share[count:] for share in shares]
    if any(of_models):
        merged["models"] = [
            {**model, **_named(_joined(itertools.chain(*parts)))}
            for model, *parts in zip(state["models"], *of_models, strict=True)
        ]
    return merged


def _named(found: Mapping[tuple[str, ...], Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the parameters of a model by their names, of which a tied one has several."""
    return {name: values[PARAMETER] for names, values in found.items() for name in names}


def _joined(parts: Iterable[tuple[Any, ...]]) -> dict[Any, dict[str, Any]]:
    found: dict[Any, dict[str, Any]] = {}
    missing: dict[Any, int] = {}
    for number, start, stop, shape, stride, values in parts:
        of_parameter = found.setdefault(number, {})
        missing[number] = missing.get(number, torch.Size(shape).numel()) - (stop - start)
        for name, value in values.items():
            if not is_divided(value, stop - start):
                of_parameter[name] = value
                continue
            if name not in of_parameter:
                of_parameter[name] = torch.empty_strided(
                    shape, stride, dtype=value.dtype, device=value.device
                )
            _flat(of_parameter[name])[start:stop].copy_(value)
    if any(missing.values()):
        raise CheckpointError("The workers' shares of the state do not fit.")
    return found


# ---- tensors


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill consecutive memory, in any order of dimensions."""
    if tensor.layout is not torch.strided:
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _flat(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return the elements in the order of memory, or in that of another tensor's memory."""
    tensor = tensor.detach()
    if like is not None and tensor.stride() != like.stride():
        ordered = torch.empty_strided(
            like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device
        )
        tensor = ordered.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def placed(room: torch.Tensor, slot: _Slot, part: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the elements of a part of a slot in a buffer."""
    first = slot.place + (part.start - slot.start) * dtype.itemsize
    return room[first : first + (part.stop - part.start) * dtype.itemsize].view(dtype)


def copy_all(into: list[torch.Tensor], content: list[torch.Tensor]) -> None:
    """Copy tensors into others, in one go."""
    if into:
        torch._foreach_copy_(into, content)


def is_divided(value: Any, length: int) -> bool:
    """Whether a value of the state has an element for each of a piece."""
    return isinstance(value, torch.Tensor) and value.dim() == 1 and len(value) == length


def _on_device(content: _Content, device: torch.device) -> _Content:
    length = content.stop - content.start
    state = {
        name: value.to(device) if is_divided(value, length) else value
        for name, value in content.state.items()
    }
    value = None if content.value is None else content.value.to(device)
    base = None if content.base is None else content.base.to(device)
    return content._replace(value=value, state=state, base=base)


def _part(value: Any, length: int, start: int, stop: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return (value[start:stop] if is_divided(value, length) else value).clone()


def _cut(value: Any, parameter: torch.Tensor, start: int, stop: int) -> Any:
    """Return what a value of the state of a parameter is for some of its elements."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != parameter.shape:
        return value.clone()
    return _flat(value, like=parameter)[start:stop].clone()
