"""Training with the same bits on any number of workers, ``TorchTrainer(exact="bits")``.

Each step has a fixed number of shards, whose samples do not depend on the workers. A worker trains
the shards that it owns one after the other, each as a micro-batch with its own forward and backward
pass, random numbers, and batch statistics. The gradients of all shards are added up in the order of
a fixed tree (`raysgd.torch.tree_sum`). See EasyScale, "Elastic Training with Consistent Accuracy
and Improved Utilization on GPUs", 2023, for the idea of logical workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from raysgd.data.partition import EpochPartition
from raysgd.errors import CheckpointError
from raysgd.loop.step import StepTransaction
from raysgd.torch.features.replication import Replication
from raysgd.torch.orders import seed_all
from raysgd.torch.registered_state import RegisteredState
from raysgd.torch.state import multiply_all, version_of
from raysgd.torch.tree_sum import TreeSum, sum_over_workers

_KEY = "num_shards"


class ShardedTransaction(StepTransaction):
    """A step whose losses have weights that do not depend on the workers.

    The weight of a loss is ``items of the shard / planned items of the update``. After the sum over
    all shards, the gradients are multiplied by ``planned items / counted items``.
    """

    factor = 1.0

    def _planned(self, num_workers: int) -> float:
        return self.reference if self._counts_items else float(self.plan.total or 1)

    def _exact(self, num_workers: int, add_up: Callable[[float], float]) -> float:
        planned, self.factor = self._planned(num_workers), 1.0
        if self._counts_items and (total := add_up(self._num_items)):
            self.factor = planned / total
            self.reference = 2.0 ** round(math.log2(total))
        return planned


class ShardReplication(Replication):
    """Keeps models equal by sums of gradients in a fixed order, instead of averages."""

    needs_helper = 'exact="bits"'
    replicates = True

    def __init__(self, state: RegisteredState, num_shards: int) -> None:
        super().__init__(state, wraps=True)
        self._num_shards = num_shards
        self._shard = 0
        self._ends_group = True  # the shard has no later micro-batch in this update
        self._clear()
        state.micro_batching.refuse = _refuse  # type: ignore[method-assign]

    def _clear(self) -> None:
        self._trees: dict[int, TreeSum] = {}
        self._earlier: dict[tuple[int, int], list[torch.Tensor | None]] = {}
        self._has_gradient: dict[int, list[bool]] = {}
        self._buffers_of: dict[int, list[torch.Tensor | None]] = {}

    def enter(self) -> None:
        """Check that all workers compute with the same bits."""
        super().enter()
        if not self._state.context.distributed:
            return
        own = _arithmetic(self._state.settings.device)
        first = self._state.from_rank(lambda: own, 0)
        if self._state.minimum(-int(own != first)) < 0:
            raise RuntimeError(
                f"{self.needs_helper} needs workers of one kind, but worker 0 has {first}, and "
                f"another worker differs (this one has {own}). Choose equal hosts with "
                "resources_per_worker."
            )

    def state_dict(self) -> dict[str, Any]:
        return {_KEY: self._num_shards}

    def check_state(self, state: Mapping[str, Any]) -> None:
        saved = state.get(_KEY, self._num_shards)
        if saved != self._num_shards:
            raise CheckpointError(
                f"The state comes from a run with {saved!r} shards, and this trainer has "
                f"{self._num_shards}. Pass exact=EqualBits(num_shards={saved!r})."
            )

    def sync_buffers(self) -> None:
        """Do nothing, because all buffers are equal after each step."""

    # ---- hooks of a step

    @property
    def _partition(self) -> EpochPartition:
        return self._state.data.source(self._state.data.trains_on).shard  # type: ignore[no-any-return]

    def begin_micro_batch(self, tx: StepTransaction) -> None:
        owned = self._partition.owned
        self._shard = owned[tx.index % len(owned)]
        self._ends_group = tx.micro_batch.step == tx.plan.num_steps - 1
        if tx.index > 0:
            for optimizer in tx.optimizers:  # of losses of other optimizers
                optimizer.zero_grad(set_to_none=True)
        buffers = self._state.buffers
        start = self._buffers_of.get(self._shard)
        if tx.index > 0 or start is not None:
            buffers.write(buffers.copies if start is None else start)
        self._versions = [-1 if b is None else version_of(b) for b in buffers.tensors()]
        step = self._state.global_step + tx.micro_batch.step
        seed_all(hash((self._state.seed, step, self._shard)))

    def commit(self, tx: StepTransaction) -> None:
        super().commit(tx)
        self._clear()

    roll_back = commit

    # ---- gradients

    def keep(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the gradients of a shard, when its optimizer would step."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        key = id(optimizer), self._shard
        gradients = [p.grad for p in parameters]
        if any(gradient is not None and gradient.is_sparse for gradient in gradients):
            raise ValueError(
                f"{self.needs_helper}: {type(optimizer).__name__} has sparse gradients, whose sums "
                "raysgd cannot order. Create the embedding with sparse=False."
            )
        for parameter in parameters:
            parameter.grad = None
        if (earlier := self._earlier.pop(key, None)) is not None:
            gradients = [_sum(*pair) for pair in zip(earlier, gradients, strict=True)]
        if not self._ends_group:
            self._earlier[key] = gradients
        else:
            known = self._has_gradient.setdefault(key[0], [False] * len(parameters))
            for index, gradient in enumerate(gradients):
                known[index] |= gradient is not None
            pairs = zip(parameters, gradients, strict=True)
            leaf = [torch.zeros_like(p) if g is None else g for p, g in pairs]
            self._trees.setdefault(key[0], TreeSum()).add(0, self._shard, leaf)
        self._keep_buffers()

    def average(self, optimizer: torch.optim.Optimizer) -> None:
        """Write the sum over all shards into the gradients. Every rank must call this."""
        tx = self._state.transaction
        assert isinstance(tx, ShardedTransaction)
        if not tx.is_open or all(optimizer is not each for each in self._state.optimizers):
            raise RuntimeError(
                f"{self.needs_helper} works only within train_batch, for batches that train_epoch "
                "draws from its iterator, and for registered optimizers."
            )
        self.keep(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        tree = self._trees.pop(id(optimizer))
        has_own = self._has_gradient.pop(id(optimizer))
        *has_gradient, has_changed = self._agree([*has_own, bool(self._buffers_of)])
        total = sum_over_workers(tree, self._num_shards, self._partition.weights)
        if tx.factor != 1.0:
            multiply_all(total, tx.factor)
        for parameter, gradient, has in zip(parameters, total, has_gradient, strict=True):
            parameter.grad = gradient if has else None
        if has_changed:
            self._merge_buffers()

    def _agree(self, flags: Sequence[bool]) -> list[bool]:
        """Return whether any worker has set each flag. Check that all are in the same step."""
        if not dist.is_initialized():
            return list(flags)
        step = self._state.global_step
        device = self._state.settings.device
        found = torch.tensor([*flags, step, -step], dtype=torch.int64, device=device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        *numbers, newest, oldest = found.tolist()
        if newest != -oldest:
            raise RuntimeError(
                f"{self.needs_helper}: a worker is in step {-oldest}, and another in step "
                f"{newest}, because it has skipped an update. Call self.backward(loss) and "
                "self.optimizer_step(optimizer) for every batch."
            )
        return [bool(number) for number in numbers]

    # ---- buffers

    def _keep_buffers(self) -> None:
        """Store the buffers that the newest micro-batch has changed, such as statistics."""
        found = self._state.buffers.tensors()
        if any(
            b is not None and version_of(b) != v for b, v in zip(found, self._versions, strict=True)
        ):
            self._buffers_of[self._shard] = [None if b is None else b.clone() for b in found]

    def _merge_buffers(self) -> None:
        """Set each buffer to its old value and the mean of the changes by all shards."""
        buffers, owned = self._state.buffers, self._partition.owned
        before: list[Any] = buffers.copies
        plan, tree = self._state.transaction.plan, TreeSum()
        places = [i for i, b in enumerate(before) if b is not None and b.is_floating_point()]
        for position, shard in enumerate(owned):
            samples = sum(m.samples or 0 for m in plan.micro_batches[position :: len(owned)])
            after, share = self._buffers_of.get(shard, before), samples / (plan.total or 1)
            tree.add(0, shard, [_change(before[i], after[i]) * share for i in places])
        self._buffers_of = {}
        if not places:
            return
        merged: list[Any] = list(buffers.tensors())
        total = sum_over_workers(tree, self._num_shards, self._partition.weights)
        for i, change in zip(places, total, strict=True):
            if merged[i] is not None and merged[i].shape == change.shape:
                merged[i] = before[i] + change
        buffers.write(merged)


def _arithmetic(device: torch.device) -> str:
    """Return what decides the bits of a result, apart from data and seeds."""
    kind = torch.backends.cpu.get_cpu_capability()
    if device.type == "cuda":
        kind = torch.cuda.get_device_name(device)
    return f"{kind}, PyTorch {torch.__version__}, and {torch.get_num_threads()} threads"


def _sum(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first.add_(second)


def _change(before: Any, after: Any) -> torch.Tensor:
    if after is None or after.shape != before.shape:  # a cache, whose shape depends on the batch
        return torch.zeros_like(before)
    return after - before  # type: ignore[no-any-return]


def _refuse(why: str, tx: StepTransaction) -> NoReturn:
    raise RuntimeError(
        f'{why}. With exact="bits", train_batch must call self.backward(loss) and '
        "self.optimizer_step(optimizer) once for each batch, after all losses of the batch."
    )
