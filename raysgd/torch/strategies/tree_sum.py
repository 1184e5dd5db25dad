"""Add tensors in the order of a fixed binary tree, on any number of workers.

The leaves of the tree are numbered. A node of level ``k`` and number ``i`` covers the leaves from
``i * 2**k`` to ``(i + 1) * 2**k - 1``, and is the sum of its two children. A worker owns
consecutive leaves. It adds up the complete subtrees among them, and then the workers exchange the
roots of these subtrees. Each node is therefore the sum of the same two tensors everywhere.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from raysgd.data.partition import part_bounds
from raysgd.torch.collectives import split_into_messages

_MESSAGE_BYTES = 32 * 2**20
"""Maximum size in bytes of combined tensors. They are copied for that."""
_SMALL_BYTES = 2**18
"""Maximum size in bytes of all nodes that every worker receives in one message."""


# PyTorch 2.13 has a new name for it, and warns of the old one.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class TreeSum:
    """The sum of this worker's leaves: the roots of the largest complete subtrees among them."""

    def __init__(self) -> None:
        self.roots: list[tuple[int, int, Sequence[torch.Tensor]]] = []

    def add(self, level: int, number: int, tensors: Sequence[torch.Tensor]) -> None:
        """Add the node that follows the newest one. Its tensors may be overwritten."""
        while self.roots and number % 2 and self.roots[-1][:2] == (level, number - 1):
            left = self.roots.pop()[2]
            _add(left, tensors)
            tensors = left
            level, number = level + 1, number // 2
        self.roots.append((level, number, tensors))

    def total(self) -> Sequence[torch.Tensor]:
        """Return the sum of all leaves, which is the sum of the roots from the right."""
        *_, (_, _, total) = self.roots
        for _, _, left in reversed(self.roots[:-1]):
            _add(left, total)
            total = left
        return total


def _add(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> None:
    for sum_of_both, other in zip(left, right, strict=True):
        sum_of_both.add_(other)


def subtrees(first: int, stop: int) -> list[tuple[int, int]]:
    """Return level and number of the largest complete subtrees over some leaves.

    >>> subtrees(3, 8)
    [(0, 3), (2, 1)]
    """
    tree = TreeSum()
    for leaf in range(first, stop):
        tree.add(0, leaf, ())
    return [(level, number) for level, number, _ in tree.roots]


def sum_over_workers(
    tree: TreeSum, num_leaves: int, shares: tuple[float, ...] | None = None
) -> Sequence[torch.Tensor]:
    """Return the sum of all workers' leaves. Every rank must call this with equal shapes.

    The leaves of a rank are those of `part_bounds` for `num_leaves` and `shares`.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return tree.total()
    size = dist.get_world_size()
    layout = [subtrees(*part_bounds(num_leaves, size, rank, shares)) for rank in range(size)]
    summed: list[torch.Tensor] = []
    shapes = tree.roots[0][2]
    for ids in split_into_messages(shapes, _MESSAGE_BYTES):
        rows = torch.stack([torch.cat([t[i].reshape(-1) for i in ids]) for _, _, t in tree.roots])
        values = _exchange(rows, layout).split([shapes[i].numel() for i in ids])
        summed += [value.view(shapes[i].shape) for value, i in zip(values, ids, strict=True)]
    return summed


def _exchange(rows: torch.Tensor, layout: Sequence[Sequence[tuple[int, int]]]) -> torch.Tensor:
    """Return the sum of the nodes of all workers, of which `rows` has those of this worker.

    Each worker adds up one slice of all nodes, and sends the sum to the others. If the nodes are
    small, each worker receives all of them instead.
    """
    size, length = len(layout), rows.shape[1]
    nodes = [node for roots in layout for node in roots]
    if len(nodes) * length * rows.element_size() <= _SMALL_BYTES and rows.element_size() >= 4:
        first = sum(len(roots) for roots in layout[: dist.get_rank()])
        gathered = rows.new_zeros(len(nodes), length)
        gathered[first : first + len(rows)] = rows
        # As integers, the zeros of the other workers keep all bits, also the sign of a zero.
        dist.all_reduce(gathered.view(torch.int32))
        return _add_up(nodes, gathered)
    width = -(-length // size)
    rows = torch.nn.functional.pad(rows, (0, width * size - length))
    sent = rows.view(len(rows), size, width).transpose(0, 1).contiguous()
    received = rows.new_empty(sum(map(len, layout)), width)
    dist.all_to_all_single(
        received, sent.view(-1, width), [len(roots) for roots in layout], [len(rows)] * size
    )
    total = rows.new_empty(size * width)
    _all_gather(total, _add_up(nodes, received).contiguous())
    return total[:length]


def _add_up(nodes: Sequence[tuple[int, int]], rows: torch.Tensor) -> torch.Tensor:
    tree = TreeSum()
    for (level, number), row in zip(nodes, rows, strict=True):
        tree.add(level, number, [row])
    (total,) = tree.total()
    return total
