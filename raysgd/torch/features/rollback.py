"""Restore parameters, optimizer states, and buffers if a step is discarded."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from raysgd._internal.collectives import Collectives
from raysgd._internal.nested import map_leaves
from raysgd.loop.feature import UpdateFeature
from raysgd.loop.update import Update
from raysgd.torch.tensors import (
    TensorVersions,
    can_copy,
    copy_all,
    inner_optimizers,
    parameters_of,
    renormalized_weights,
)

_PLAIN = (float, int, bool, str, type(None))


class Rollback(UpdateFeature):
    """Restores parameters and optimizer states if a step is discarded.

    This feature copies only if an update has several optimizer steps, or if `train_batch` of an
    earlier step changed parameters before the update, as sharpness-aware minimization does. With
    bad steps, or micro-batches on a CPU, it also copies before the first update. A GPU may lack
    the memory. Otherwise the version counters of PyTorch show whether a discarded step changed
    parameters. If so, the state is damaged. The counters do not detect changes through
    ``parameter.data``.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        models: Sequence[torch.nn.Module],
        refuse_split: Callable[[str], None],
        has_bad_steps: bool = False,
    ) -> None:
        wrapped = itertools.chain.from_iterable(map(inner_optimizers, optimizers))
        self._optimizers = [*optimizers, *wrapped]
        self._backups: list[OptimizerBackup] = []  # of the optimizers, if the update has copies
        renormalized = renormalized_weights(models)
        self._stepped = {id(p): p for optimizer in optimizers for p in parameters_of(optimizer)}
        found = {id(p): p for model in models for p in model.parameters()} | self._stepped
        self._parameters = [p for p in found.values() if p not in renormalized and not is_lazy(p)]
        self._versions: TensorVersions | None = None
        self._refuse_split, self._has_bad_steps = refuse_split, has_bad_steps
        self._changes_early: bool | None = None  # parameters, before the update; or unknown

    def begin_update(self, update: Update) -> None:
        if (changes_early := self._changes_early) is None:
            on_cpu = not any(parameter.is_cuda for parameter in self._parameters)
            changes_early = self._has_bad_steps or (update.is_split and on_cpu)
        memory, self._backups = [backup.copies for backup in self._backups], []
        if update.optimizer_steps.need_backup or changes_early:
            pairs = itertools.zip_longest(self._optimizers, memory, fillvalue=())
            self._backups = [OptimizerBackup(each, True, copies) for each, copies in pairs]
        self._versions = TensorVersions(lambda: self._parameters)

    def before_optimizer_step(self, update: Update, optimizer: Any) -> None:
        if self._versions is None:
            return
        if update.bad_step is not None:
            versions = self._versions
            self.roll_back(update)  # what train_batch changed before the update
            self._versions = versions  # it may change more
            if update.is_damaged:
                raise RuntimeError(
                    "A bad step cannot be undone, because train_batch changed parameters before "
                    "the update for the first time. Load a checkpoint: trainer.load(path)."
                )
        elif not (self._changes_early or update.optimizer_steps.counts):
            self._changes_early = not self._versions.find_changed_ids().isdisjoint(self._stepped)
            if self._changes_early and not update.has_fixed_parts:
                self._refuse_split("train_batch changes parameters before the update")
            if not (self._changes_early or update.optimizer_steps.need_backup):
                self._backups = []  # of the first update; release their memory

    def commit(self, update: Update) -> None:
        self._versions = None

    def roll_back(self, update: Update) -> None:
        if self._versions is None:
            return
        changed, self._versions = self._versions.find_changed_ids(), None
        for backup in reversed(self._backups):
            backup.restore()
            changed.difference_update(map(id, backup.parameters))
        is_running = not self._backups and update.optimizer_steps.running_optimizer is not None
        if changed or is_running:  # an optimizer may change its state before parameters
            update.set_damaged(True)


class OptimizerBackup:
    """Copies of the options of one optimizer, and if asked, of its parameters and state.

    They use the `memory` of earlier copies, because a CPU zeroes new pages of large tensors.
    """

    def __init__(
        self, optimizer: Any, has_state: bool = False, memory: Sequence[torch.Tensor] = ()
    ) -> None:
        self._optimizer, state = optimizer, optimizer.state
        parameters = parameters_of(optimizer) if has_state else []
        # A frozen parameter with state may be trained later in the step.
        self.parameters = {p for p in parameters if p.requires_grad or p in state}
        self._tensors: list[torch.Tensor] = [*self.parameters]
        self._state = map_leaves(state, self._keep) if has_state else None
        self._groups = list(map(dict, optimizer.param_groups))
        for group in self._groups:
            for name in group:
                if type(group[name]) not in _PLAIN and name not in ("params", "param_names"):
                    group[name] = map_leaves(group[name], self._keep)
        self.copies = _copies_of(self._tensors, memory) if self._tensors else []

    def _keep(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            self._tensors.append(leaf)
        return leaf

    @torch.no_grad()
    def restore(self) -> None:
        copy_all(zip(self._tensors, self.copies, strict=True))
        if self._state is not None:
            self._optimizer.state.clear()
            self._optimizer.state.update(self._state)
        for group, before in zip(self._optimizer.param_groups, self._groups, strict=False):
            for name in group.keys() - before.keys():
                del group[name]
            group.update({**before, "params": group["params"]})


class BufferBackup(UpdateFeature):
    """Copies all buffers at the end of a step, and restores them if the next step is discarded.

    A copy belongs to a module and a name, because a forward pass may assign another tensor.
    """

    def __init__(self, models: Iterable[torch.nn.Module], collectives: Collectives) -> None:
        self._collectives = collectives
        self._slots = [
            (module, name)
            for model in models
            for module in model.modules()
            for name in module._buffers  # `named_buffers` omits buffers that are None
        ]
        self._outside_norms = [slot for slot in self._slots if not isinstance(slot[0], _BatchNorm)]
        self.values: list[torch.Tensor | None] = []
        self._values_at_step: list[torch.Tensor | None] = []
        self.take()

    def tensors(self) -> list[torch.Tensor | None]:
        return [module._buffers.get(name) for module, name in self._slots]

    def begin_micro_batch(self, update: Update) -> None:
        """Begin each micro-batch of a step with the same buffers, except running statistics."""
        if self._outside_norms and update.is_split and not update.has_fixed_parts:
            if not update.begins_step:
                self.write(self._values_at_step, self._outside_norms)
            values = [module._buffers.get(name) for module, name in self._outside_norms]
            self._values_at_step = _copies_of(values)

    def begin_call(self, logs_steps: bool) -> None:
        self.take()  # user code may have changed them between calls

    def commit(self, update: Update) -> None:
        if update.bad_step is not None:  # nothing of the update is applied
            self.write(self.values)
        self.take()

    def take(self) -> None:
        """Copy the buffers."""
        if self._slots:
            self.values = _copies_of(self.tensors())

    def roll_back(self, update: Update) -> None:
        self.write(self.values)

    def write(self, values: Sequence[torch.Tensor | None], slots: Sequence[Any] = ()) -> None:
        """Write the values into the buffers, in the order of `tensors` or of `slots`."""
        for (module, name), value in zip(slots or self._slots, values, strict=True):
            if name in module._buffers:  # user code may have replaced it with a parameter
                _set_buffer(module, name, value)

    def receive(self, leader_rank: int) -> Callable[[], None]:
        values = self._collectives.broadcast(self.tensors, leader_rank)

        def load() -> None:
            self.write(values)
            self.take()

        return load

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.take()


def _set_buffer(module: torch.nn.Module, name: str, value: torch.Tensor | None) -> None:
    buffer: Any = getattr(module, name, None)
    if (
        value is not None
        and can_copy(buffer, value)
        and (buffer.shape, buffer.dtype) == (value.shape, value.dtype)
        and buffer.layout is torch.strided
        and 0 not in buffer.stride()  # elements of an expanded tensor share memory
    ):
        buffer.detach().copy_(value)
    else:
        setattr(module, name, None if value is None else value.clone())


@torch.no_grad()
def _copies_of(
    tensors: Iterable[torch.Tensor | None], memory: Iterable[torch.Tensor] = ()
) -> list[Any]:
    """Return copies of tensors, in `memory` where it fits. On a GPU, one kernel copies many."""
    rows = zip(tensors, itertools.chain(memory, itertools.repeat(None)), strict=False)
    pairs: list[tuple[Any, Any]] = [(t if t is None else _memory_for(t, old), t) for t, old in rows]
    copy_all(pair for pair in pairs if pair[0] is not None)
    return [copied for copied, _ in pairs]


def _memory_for(tensor: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
    if old is None or tensor.layout is not torch.strided or old.shape != tensor.shape:
        return torch.empty_like(tensor)
    is_alike = (old.dtype, old.device) == (tensor.dtype, tensor.device)
    return old if is_alike else torch.empty_like(tensor)
