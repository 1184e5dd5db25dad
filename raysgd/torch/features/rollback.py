"""Restore parameters, optimizers, schedulers, and buffers if an update is discarded."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from raysgd._internal.nested import map_leaves
from raysgd.loop.feature import UpdateFeature
from raysgd.loop.update import Update
from raysgd.torch.modules import renormalized_weights
from raysgd.torch.object_states import load_scheduler, scheduler_state
from raysgd.torch.tensors import (
    TensorVersions,
    copies_of,
    copy_all,
    inner_optimizers,
    parameters_of,
)
from raysgd.torch.train_state import TorchTrainState

_PLAIN = (float, int, bool, str, type(None))


class Rollback(UpdateFeature):
    """Restores options of optimizers, schedulers, parameters, and optimizer states.

    It always copies options and schedulers, which `train_batch` may change. It copies parameters
    and states only if an update has several optimizer steps, or if `train_batch` of an earlier step
    changed parameters before the update, as sharpness-aware minimization does. With bad steps, or
    micro-batches on a CPU, it also copies them before the first update. A GPU may lack the memory.
    Otherwise the version counters of PyTorch show whether a discarded step changed parameters. If
    so, the state is damaged. The counters do not detect changes through ``parameter.data``. Shards
    restore parameters and states themselves.
    """

    def __init__(self, train_state: TorchTrainState) -> None:
        self._train_state, optimizers = train_state, train_state.optimizers
        wrapped = itertools.chain.from_iterable(map(inner_optimizers, optimizers))
        self._optimizers = [*optimizers, *wrapped]
        self._backups: list[OptimizerBackup] = []
        self._has_copies = False  # of parameters and states, in the backups
        self._restore_schedulers: Callable[[], None] = lambda: None
        self._is_sharded = not train_state.has_all_parameters
        models, updating = ((), ()) if self._is_sharded else (train_state.models, optimizers)
        renormalized = renormalized_weights(models)
        self._stepped = {id(p): p for optimizer in updating for p in parameters_of(optimizer)}
        found = {id(p): p for model in models for p in model.parameters()} | self._stepped
        self._parameters = [p for p in found.values() if p not in renormalized and not is_lazy(p)]
        self._versions: TensorVersions | None = None
        self._changes_early: bool | None = None  # parameters, before the update; or unknown

    def begin_update(self, update: Update) -> None:
        if (changes_early := self._changes_early) is None:
            on_cpu = not any(parameter.is_cuda for parameter in self._parameters)
            has_bad_steps = self._train_state.settings.options.bad_steps is not None
            changes_early = has_bad_steps or (update.is_split and on_cpu)
        needs_copies = update.optimizer_steps.need_backup or changes_early
        self._has_copies = needs_copies and not self._is_sharded
        memory = [backup.copies for backup in self._backups]
        pairs = itertools.zip_longest(self._optimizers, memory, fillvalue=())
        self._backups = [OptimizerBackup(each, self._has_copies, copies) for each, copies in pairs]
        self._restore_schedulers = backup_schedulers(self._train_state.schedulers)
        self._versions = TensorVersions(lambda: self._parameters)

    def before_optimizer_step(self, update: Update, optimizer: Any) -> None:
        if self._versions is None:
            return
        if update.bad_step is not None:
            # What train_batch changed before the update. Schedules continue.
            self._restore(self._versions, update, self._backups if self._has_copies else ())
            if self._train_state.is_damaged:
                raise RuntimeError(
                    "A bad step cannot be undone, because train_batch changed parameters before "
                    "the update for the first time. Load a checkpoint: trainer.load(path)."
                )
        elif not (self._changes_early or update.optimizer_steps.counts):
            self._changes_early = not self._versions.find_changed_ids().isdisjoint(self._stepped)
            if self._changes_early and not update.plan.has_logical_workers:
                why = "train_batch changes parameters before the update"
                self._train_state.micro_batching.refuse_split(why)

    def commit(self, update: Update) -> None:
        self._versions = None

    def roll_back(self, update: Update) -> None:
        if self._versions is not None:
            self._restore_schedulers()  # the update may fail after schedulers have stepped
            self._restore(self._versions, update, self._backups)
            self._versions = None

    def _restore(self, versions: TensorVersions, update: Update, backups: Sequence[Any]) -> None:
        changed = versions.find_changed_ids()
        for backup in reversed(backups):
            backup.restore()
            changed.difference_update(map(id, backup.parameters))
        running = None if self._has_copies else update.optimizer_steps.running_optimizer
        # An optimizer may change its state before parameters, but shards change after the step.
        is_partial = running is not None and self._train_state.placement.is_unsharded(running)
        if (changed or is_partial) and not self._is_sharded:
            self._train_state.is_damaged = True


def backup_schedulers(schedulers: Sequence[Any]) -> Callable[[], None]:
    """Return a function that restores what schedulers are now."""
    # Lists are new, and leaves the same.
    states = map_leaves(list(map(scheduler_state, schedulers)), lambda leaf: leaf)

    def restore() -> None:
        for scheduler, state in zip(schedulers, states, strict=True):
            load_scheduler(scheduler, state)

    return restore


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
        self.copies = copies_of(self._tensors, memory) if self._tensors else []

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
