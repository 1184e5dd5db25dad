"""Training with the same bits on any number of workers, ``TorchTrainer(exact="bits")``.

Each step has a part for each logical worker. Their samples do not depend on the workers. A worker
trains the parts of its logical workers one after the other, each as a micro-batch with its own
forward and backward pass, random numbers, and batch statistics. The gradients of all parts are
added up in the order of a fixed tree (`tree_sum.py`). See EasyScale, "Elastic Training with
Consistent Accuracy and Improved Utilization on GPUs", 2023, for the idea.

Elsewhere, code asks for what the strategy changes, not for its name:

- ``options.layout``, made by `TorchOptions.layout`. ``has_logical_workers``: the parts of a step
  and the weights of their metrics (`EpochPartition`), the batch size in the config of a worker
  (`OperatorRunner`), of its loader (`PartitionedSource`, `DataSources`), and in an error
  (`Options`), and errors for batches that must not be split (`MicroBatching.refuse_split`) and data
  sets of a call (`OperatorTrainer.train`). `wrap_loader` groups no iterable data sets into parts:
  an error of `TorchSources` replaces the warning of `DataSources`. ``seeds_parts``: seeds for
  samples and user code (`MapStyleSource`).
- ``update.plan.has_logical_workers``: an update counts as one of several micro-batches, but no
  batch is split (`Update`). Its gradients are not final before the step (`StepChecks`).
  `Rollback` permits changes of parameters before it.
- The exchange. ``divides_by_counts``: the total of losses (`LossWeights`), which have one count
  (`StepChecks`). ``sums_exactly``: sums of losses and metrics (`BadStepFilter`,
  `TrainingOperator`). ``counts_in_commit``: an update needs copies, and ends with its commit
  (`OptimizerSteps`). ``gathers_metrics``: each worker has the metrics of all (`MetricsRecorder`).
- ``options.exact``: the strategy (`strategy_name`), deterministic operations (`TorchRunner`), and
  what does not work with the strategy (`conflicts.check`). `TorchOptions` unsets split_on_oom.
- ``num_operations`` of the process group, if this is gloo: whether ``train_batch`` communicates.
"""

import itertools
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from raysgd._internal.nested import map_leaves
from raysgd.data.partition import EpochPartition
from raysgd.errors import CheckpointError
from raysgd.loop.update import MicroBatchMetrics, Update
from raysgd.metrics import to_cpu_value
from raysgd.torch.input.orders import seed_all
from raysgd.torch.strategies import conflicts
from raysgd.torch.strategies.collective_exchange import CollectiveExchange
from raysgd.torch.strategies.tree_sum import TreeSum, sum_over_workers
from raysgd.torch.tensors import (
    copy_leaf,
    describe_platform,
    multiply_all,
    parameters_of,
    version_of,
)
from raysgd.torch.train_state import TorchTrainState

_KEY, _OLD_KEY = "num_logical_workers", "num_shards"  # of saved states
_EXACT = 'exact="bits"'
_KEEP, _MEAN, _COPY, _OBJECT = range(4)
"""How to merge a buffer of several parts. The largest of all workers counts."""
_PARTS_DIFFER = (
    "{}: train_batch does not do the same for all logical workers in step {}: it makes an update, "
    "or counts items, only for some of them. Call self.backward(loss) and self.optimizer_step("
    "optimizer) for every batch."
)


class EqualBitsExchange(CollectiveExchange):
    """Sums of gradients in a fixed order, instead of averages.

    The gradient of a loss has the weight ``items of the part / samples of the update``. If user
    code counts items, the counts are added up like gradients, and the sum is then multiplied by
    ``samples / items of the update``.
    """

    keeps_all_equal = True
    num_averaging_workers = 1  # gradients are summed
    divides_by_counts = True
    sums_exactly = True
    counts_in_commit = True
    gathers_metrics = True
    why_optimizer_step = _EXACT

    def __init__(self, train_state: TorchTrainState) -> None:
        super().__init__(train_state)
        self._precision = train_state.precision
        options = train_state.settings.options
        self._num_logical_workers = options.layout.num_planned_workers(options.num_workers)
        self._buffers = EqualBitsBuffers(train_state)
        self._clear()

    def use_wrappers(self, wrappers: Sequence[DistributedDataParallel]) -> None:
        super().use_wrappers(wrappers)
        caller, options = f"TorchTrainer({_EXACT})", self._train_state.settings.options
        conflicts.check("equal bits", caller, options, self._train_state.models)
        _check_modules(self._train_state.models)

    def _clear(self) -> None:
        self._gradients: dict[int, PartGradients] = {}  # by ID of the optimizer
        self._scales: list[torch.Tensor] = []  # of the precision, before the update
        self._num_operations = 0  # of the default group, before the part
        self._buffers.clear()
        self._stepped: list[int] = []  # IDs of optimizers, in the current part
        self._stepped_before: list[int] | None = None  # in the earlier parts

    def begin_generation(self) -> None:
        """Check that all workers compute with the same bits."""
        if not self._train_state.settings.context.has_process_group:
            return
        local = describe_platform(self._train_state.settings.device)
        first = self._train_state.collectives.broadcast(lambda: local, 0)
        if self._train_state.collectives.any_rank(local != first):
            raise RuntimeError(
                f"{_EXACT} needs workers of one kind, but worker 0 has {first}, and "
                f"another worker differs (this one has {local}). Choose equal hosts with "
                "resources_per_worker."
            )

    def sync_buffers(self) -> None:
        """Do nothing, because all buffers are equal after each step."""

    def state_dict(self) -> dict[str, Any]:
        return {_KEY: self._num_logical_workers}

    def check_state(self, state: Mapping[str, Any]) -> None:
        saved = state.get(_KEY, state.get(_OLD_KEY, self._num_logical_workers))
        if saved != self._num_logical_workers:
            raise CheckpointError(
                f"The state comes from a run with {saved!r} logical workers, and this trainer has "
                f"{self._num_logical_workers}. Pass exact=EqualBits(num_logical_workers={saved!r})."
            )

    # ---- hooks of a step

    def begin_call(self, logs_steps: bool) -> None:
        self._seed_user_code(self._train_state.position.epoch)

    def end_epoch(self, epoch: int) -> None:
        self._seed_user_code(epoch)

    def _seed_user_code(self, epoch: int) -> None:
        """Seed the generators for code of the next ``train_epoch`` before its first batch."""
        seed_all(self._train_state.data.seed, epoch)

    def begin_update(self, update: Update) -> None:
        """Keep what an update changes besides the optimizer and the model."""
        self._scales = [t.clone() for t in self._precision.scaler_tensors()]

    def begin_micro_batch(self, update: Update) -> None:
        index, source = update.micro_batch_index, self._train_state.data.training_source
        if index > 0:
            self._end_part()
            for optimizer in self._train_state.optimizers:  # of losses of other optimizers
                optimizer.zero_grad(set_to_none=True)
        for model in self._train_state.models:  # also of parameters that no optimizer has yet
            model.zero_grad(set_to_none=True)
        own = source.partition.logical_workers
        self._buffers.begin(own[index % len(own)], is_first=index <= 0)
        self._num_operations = _num_operations()

    def _end_part(self) -> None:
        """End a part. Check that it has stepped the optimizers that the part before has."""
        if self._stepped:
            self._buffers.check_unchanged()
        if self._stepped_before not in (None, self._stepped):
            raise RuntimeError(_PARTS_DIFFER.format(_EXACT, self._train_state.position.global_step))
        self._stepped, self._stepped_before = [], self._stepped

    def before_commit(self, update: Update) -> None:
        self._end_part()
        if not self._stepped_before:
            self._reduce_flags(0, [])
        update.hold_metrics(all_gather_metrics(self._train_state, update.pop_metrics()))

    def commit(self, update: Update) -> None:
        if not self._stepped_before:
            self._train_state.buffer_backup.roll_back(update)  # it keeps no statistics
        self._clear()

    def roll_back(self, update: Update) -> None:
        if update.optimizer_steps.counts:
            for scale, before in zip(self._precision.scaler_tensors(), self._scales, strict=True):
                scale.copy_(before)
        self._clear()

    # ---- gradients

    def take_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the gradients of a part, when its optimizer would step."""
        if not self._stepped and _num_operations() != self._num_operations:
            self._train_state.micro_batching.refuse_split(
                "train_batch communicates with other workers",
                "leave out collectives and messages, also in hooks of the backward pass.",
            )
        parameters = _trainable(optimizer)
        gradients = [p.grad for p in parameters]
        if any(gradient is not None and gradient.is_sparse for gradient in gradients):
            raise ValueError(
                f"{_EXACT}: {type(optimizer).__name__} has sparse gradients, whose sums "
                "raysgd cannot order. Create the embedding with sparse=False."
            )
        optimizer.zero_grad(set_to_none=True)
        update, device = self._train_state.update, self._train_state.settings.device
        if (count := update.loss_weights.counted_items) is not None:
            gradients.append(torch.tensor(count, dtype=torch.float64, device=device))
        collected = self._gradients.setdefault(id(optimizer), PartGradients(parameters))
        is_last = update.micro_batch.step_index == update.plan.num_steps - 1
        collected.add(self._buffers.logical_worker, gradients, is_last)
        if self._stepped:  # another optimizer
            self._buffers.check_unchanged()
        else:
            self._buffers.store()
        self._stepped.append(id(optimizer))

    def complete_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Write the sum over all parts into the gradients. Every rank must call this."""
        update, optimizers = self._train_state.update, self._train_state.optimizers
        numbers = {id(optimizer): number for number, optimizer in enumerate(optimizers, 1)}
        if not update.is_open or id(optimizer) not in numbers:
            raise RuntimeError(
                f"{_EXACT} works only within train_batch, for batches that train_epoch "
                "draws from its iterator, and for registered optimizers."
            )
        self.take_gradients(optimizer)
        parameters = _trainable(optimizer)
        collected = self._gradients.pop(id(optimizer))
        kind = 2 * numbers[id(optimizer)] + (update.loss_weights.counted_items is not None)
        flags = self._reduce_flags(kind, [*collected.flags, *self._buffers.merge_kinds()])
        partition = self._train_state.data.training_source.partition
        total = sum_over_workers(collected.tree, self._num_logical_workers, partition.shares)
        self.gradient_factor = 1.0
        if update.loss_weights.counted_items is not None:
            *total, count = total
            self.gradient_factor = update.loss_weights.set_total_items(count.item())
            multiply_all(total, self.gradient_factor)
        for parameter, gradient, has in zip(parameters, total, flags, strict=False):
            # Sums of workers have another layout, which may change the order of later sums.
            parameter.grad = torch.empty_like(parameter).copy_(gradient) if has else None
        self._buffers.merge(flags[len(parameters) :], partition)

    def _reduce_flags(self, kind: int, flags: Sequence[int]) -> list[int]:
        """Return the maximum of each flag over the workers. Check that all do the same.

        `kind` is 0 for the end of a step without an update. Otherwise, it is twice the number of
        the optimizer, plus 1 if losses count items.
        """
        if not dist.is_initialized():
            return list(flags)
        # Messages of different optimizers have equal sizes, so that they can be compared.
        width = max(len(parameters_of(optimizer)) for optimizer in self._train_state.optimizers)
        padding = [0] * (width + len(self._train_state.buffer_backup.values) - len(flags))
        step = self._train_state.position.global_step
        sent = [step, kind, -step, -kind, *(-flag for flag in flags), *padding]
        minima = self._train_state.collectives.all_reduce_min(*sent)
        min_step, min_kind, minus_max_step, minus_max_kind, *agreed = minima
        if (min_step, min_kind) != (-minus_max_step, -minus_max_kind):
            raise RuntimeError(_PARTS_DIFFER.format(_EXACT, min_step))
        return [-flag for flag in agreed[: len(flags)]]


class PartGradients:
    """The gradients of one optimizer in the parts of this worker."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.tree = TreeSum()
        self.flags = [False] * len(parameters)  # whether each has a gradient in a part
        self._parameters = parameters
        self._earlier: dict[int, list[torch.Tensor | None]] = {}  # of unfinished parts

    def add(self, logical_worker: int, gradients: list[Any], is_last: bool) -> None:
        """Add the gradients of the parameters, and the count of items if losses have one.

        `is_last`: whether the part has no later micro-batch in this update.
        """
        if (earlier := self._earlier.pop(logical_worker, None)) is not None:
            pairs = zip(earlier, gradients, strict=True)
            gradients = [b if a is None else a if b is None else a.add_(b) for a, b in pairs]
        if not is_last:
            self._earlier[logical_worker] = gradients
            return
        for index, parameter in enumerate(self._parameters):
            if gradients[index] is None:
                gradients[index] = torch.zeros_like(parameter)
            else:
                self.flags[index] = True
        self.tree.add(0, logical_worker, gradients)


class EqualBitsBuffers:
    """The buffers after each part. Each part begins with the buffers of the step's start."""

    def __init__(self, train_state: TorchTrainState) -> None:
        self._train_state = train_state
        self.logical_worker, self._start, self._versions = 0, list[Any](), list[Any]()
        self.clear()

    def clear(self) -> None:
        """Forget the parts of a step."""
        self._stored: dict[int, list[torch.Tensor | None]] = {}

    def begin(self, logical_worker: int, is_first: bool) -> None:
        """Restore the buffers that a part begins with, unless it `is_first`."""
        self.logical_worker = logical_worker
        self._start = self._stored.get(logical_worker, self._train_state.buffer_backup.values)
        if not is_first:
            self._train_state.buffer_backup.write(self._start)
        self._versions = self._newest_versions()

    def check_unchanged(self) -> None:
        """Raise RuntimeError if buffers have changed since the last call of another method."""
        if self._versions != self._newest_versions():
            raise RuntimeError(
                f"{_EXACT}: train_batch changes buffers after self.optimizer_step, for example "
                "by a forward pass in train mode. Change them before it."
            )

    def _newest_versions(self) -> list[Any]:
        buffers = self._train_state.buffer_backup.tensors()
        return [None if b is None else (b.data_ptr(), version_of(b)) for b in buffers]

    def store(self) -> None:
        """Store the buffers that the part has changed."""
        # Compare contents, because kernels such as that of BatchNorm do not count versions.
        newest = zip(self._start, self._train_state.buffer_backup.tensors(), strict=True)
        self._stored[self.logical_worker] = [
            before if _is_equal(before, after) else copy_leaf(after) for before, after in newest
        ]
        self._versions = self._newest_versions()

    def merge_kinds(self) -> list[int]:
        """Return how to merge each buffer."""
        rows = zip(self._train_state.buffer_backup.values, *self._stored.values(), strict=True)
        return [max((_merge_kind(old, new) for new in kept), default=_KEEP) for old, *kept in rows]

    def merge(self, kinds: Sequence[int], partition: EpochPartition) -> None:
        """Set floats to old values and the mean of the changes, others as in logical worker 0."""
        if not any(kinds):
            return
        before: list[Any] = self._train_state.buffer_backup.values
        merged, first = list(before), self._stored.get(0, before)
        is_distributed = dist.is_initialized()
        means, others, objects = (
            [i for i, other in enumerate(kinds) if other == kind]
            for kind in (_MEAN, _COPY, _OBJECT)
        )
        if means:
            for i, change in zip(means, self._mean_change(means, partition), strict=True):
                merged[i] = before[i] + change
        copies, contents = [copy_leaf(first[i]) for i in others], [first[i] for i in objects]
        if copies and is_distributed:
            self._train_state.collectives.broadcast_tensors(copies, 0)
        if contents and is_distributed:
            contents = self._train_state.collectives.broadcast(lambda: contents, 0)
        for i, value in zip([*others, *objects], [*copies, *contents], strict=True):
            merged[i] = value
        self.clear()
        self._train_state.buffer_backup.write(merged)
        self._versions = self._newest_versions()

    def _mean_change(
        self, indices: Sequence[int], partition: EpochPartition
    ) -> Sequence[torch.Tensor]:
        before: list[Any] = self._train_state.buffer_backup.values
        plan, own, tree = self._train_state.update.plan, partition.logical_workers, TreeSum()
        for position, logical_worker in enumerate(own):
            micro_batches = plan.micro_batches[position :: len(own)]
            num_samples = sum(micro_batch.num_samples or 0 for micro_batch in micro_batches)
            after: list[Any] = self._stored.get(logical_worker, before)
            weight = num_samples / (plan.total_samples or 1)
            tree.add(0, logical_worker, [(after[i] - before[i]) * weight for i in indices])
        return sum_over_workers(tree, partition.num_planned_workers, partition.shares)


def all_gather_metrics(
    train_state: TorchTrainState, updates: Sequence[MicroBatchMetrics]
) -> list[MicroBatchMetrics]:
    """Return the metrics of all workers' parts, so that those of a lost worker are kept."""
    partition = train_state.data.training_source.partition
    parts = itertools.product(range(len(updates)), partition.logical_workers)  # of each step
    local = [(key, m, weight) for key, (m, weight, _) in zip(parts, updates, strict=False)]
    messages = [pickle.dumps(map_leaves(local, to_cpu_value))]
    if dist.is_initialized():  # `all_gather_object` would make a step take 13 ms instead of 2.3 ms
        num_words = -train_state.collectives.all_reduce_min(-len(messages[0]) // 4)[0]
        content = bytearray(messages[0].ljust(4 * num_words, b"\0"))  # `loads` ignores the zeros
        gathered = torch.zeros(dist.get_world_size(), num_words, dtype=torch.int32)
        gathered[dist.get_rank()] = torch.frombuffer(content, dtype=torch.int32)
        gathered = gathered.to(train_state.settings.device)
        dist.all_reduce(gathered)  # the rows of the other workers are zeros
        messages = [row.tobytes() for row in gathered.cpu().numpy()]
    rows = [row for message in messages for row in pickle.loads(message)]
    rows.sort(key=lambda row: row[0])
    last = partition.num_planned_workers - 1
    return [MicroBatchMetrics(m, weight, number == last) for (_, number), m, weight in rows]


def _num_operations() -> int:
    """Return the number of operations of the default group so far. Only gloo counts them."""
    return getattr(dist.group.WORLD, "num_operations", 0)


def _trainable(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for parameter in parameters_of(optimizer) if parameter.requires_grad]


def _is_equal(before: torch.Tensor | None, after: torch.Tensor | None) -> bool:
    if before is None or after is None:
        return before is after
    return before.dtype == after.dtype and torch.equal(before, after)


def _merge_kind(before: torch.Tensor | None, after: torch.Tensor | None) -> int:
    if after is before:
        return _KEEP
    if before is None or after is None:
        return _OBJECT
    if (before.shape, before.dtype) != (after.shape, after.dtype):
        return _OBJECT
    return _MEAN if before.is_floating_point() or before.is_complex() else _COPY


def _check_modules(models: Sequence[torch.nn.Module]) -> None:
    """Reject modules whose results depend on the other samples of a worker."""
    for module in (module for model in models for module in model.modules()):
        name = type(module).__name__
        if isinstance(module, torch.nn.SyncBatchNorm):
            why, remedy = "communicates in each forward pass", "Use BatchNorm"
        elif getattr(module, "max_norm", None):
            why, remedy = "with max_norm changes its weight in each forward pass", "Leave it out"
        elif any(map(torch.nn.parameter.is_lazy, module.parameters(recurse=False))):
            why, remedy = "has uninitialized parameters", "Call the model once before register()"
        elif any(b.layout is not torch.strided for b in module.buffers(recurse=False)):
            why, remedy = "has sparse buffers", "Create them with to_dense()"
        else:
            continue
        raise ValueError(f"{_EXACT} does not work with {name}, which {why}. {remedy}.")
