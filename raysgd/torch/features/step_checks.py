"""Reject what `train_batch` does if the update would differ from that of one process."""

from __future__ import annotations

import functools
from typing import Any

import torch

from raysgd.loop.feature import StepFeature
from raysgd.loop.loss_weights import LossCount
from raysgd.loop.transaction import UpdateTransaction
from raysgd.torch.precision import Precision
from raysgd.torch.register_checks import required_arguments
from raysgd.torch.registered_state import RegisteredState
from raysgd.torch.tensors import parameters_of, version_of

_NO_BACKWARD = "train_batch does not call self.backward(loss) for every batch"


class StepChecks(StepFeature):
    """Checks the order of losses and steps in `train_batch`, and that it changes no gradients.

    What one batch may do can be wrong for a part of a batch. The loop then repeats the step with
    whole batches, unless an accumulation needs several.
    """

    def __init__(self, state: RegisteredState, precision: Precision) -> None:
        self._state, self._precision, self._transaction = state, precision, state.transaction
        self._seen: dict[int, list[tuple[int, int]]] = {}
        """Gradients after a backward pass, by optimizer, if they are not final then."""
        self._keeps_gradients = False  # train_batch itself accumulates them

    @property
    def needs_helper(self) -> str:  # type: ignore[override]
        steps = self._state.accumulation_steps
        return f"gradient_accumulation_steps={steps}" if steps > 1 else ""

    # ---- hooks of a step

    def begin_micro_batch(self, tx: UpdateTransaction) -> None:
        has_losses = tx.weights.has_earlier_losses
        if tx.index > 0 and not has_losses and any(map(_has_gradients, tx.optimizers)):
            self._refuse_parts(_NO_BACKWARD)
        self._note_gradients(self._precision.scales)

    def before_commit(self, tx: UpdateTransaction) -> None:
        self.check_complete()

    def check_complete(self) -> None:
        tx = self._transaction
        if tx.weights.has_earlier_losses and not tx.has_optimizer_steps:
            self._reject("train_batch makes no update in the last batch of a group")

    def commit(self, tx: UpdateTransaction) -> None:
        self._seen.clear()
        has_stepped = tx.has_optimizer_steps
        self._keeps_gradients = not has_stepped and any(map(_has_gradients, tx.optimizers))
        if self._has_uneven_share(tx) and has_stepped and not tx.weights.uses_backward:
            self._state.settings.warn_once(
                "weight",
                "ElasticConfig(shares=...): train_batch does not call self.backward(loss), so the "
                "losses of workers with different shares have equal weight. Call it instead of "
                "loss.backward().",
            )

    def _has_uneven_share(self, tx: UpdateTransaction) -> bool:
        if self._state.settings.options.elastic.shares == "even" or tx.plan.total is None:
            return False
        return tx.plan.samples * self._state.context.world_size != tx.plan.total

    def roll_back(self, tx: UpdateTransaction) -> None:
        self._seen.clear()
        if self._keeps_gradients:
            self._state.settings.warn_once(
                "kept",
                "A step failed, and the gradients that train_batch kept from earlier batches are "
                "lost. To accumulate gradients, use register(gradient_accumulation_steps=...).",
            )
            self._keeps_gradients = False

    # ---- within a micro-batch

    def before_backward(self, count: LossCount) -> None:
        tx, state = self._transaction, self._state
        counts_samples = count.items is None and not count.is_sum
        if tx.weights.has_gap and counts_samples and state.num_averaged > 1:
            self._reject(_NO_BACKWARD)
        if tx.requested:
            self._refuse_parts("train_batch computes gradients after it has stepped an optimizer")
        for optimizer in state.optimizers:
            changed = self._have_changed(optimizer) and self._precision.scales
            gradients = (p.grad for p in parameters_of(optimizer))
            if changed and any(each is not None and each.any() for each in gradients):
                raise RuntimeError(
                    f"{self._precision.name} scales gradients, but train_batch made or changed "
                    "gradients before self.backward(loss), for example by loss.backward(). Add up "
                    "the losses, and call self.backward(loss)."
                )

    def after_backward(self) -> None:
        has_shards = self._state.settings.options.num_shards is not None
        self._note_gradients(self._precision.scales or has_shards or not self._transaction.is_last)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        tx = self._transaction
        if id(optimizer) in tx.requested:
            self._reject(f"train_batch steps the same {type(optimizer).__name__} twice")
        tx.requested.add(id(optimizer))
        if _needs_closure(type(optimizer).step):
            raise TypeError(
                f"{type(optimizer).__name__}.step() needs a closure, which optimizer_step() does "
                "not have. Override train_batch, and call self.optimizer.step(closure) in it."
            )
        if self._have_changed(optimizer):
            why = self.needs_helper or self._precision.name
            raise RuntimeError(
                "train_batch changes gradients between self.backward(loss) and self.optimizer_step("
                f"optimizer). With {why}, they are not final there. Clip with "
                "register(max_grad_norm=...), or change them in a hook: call "
                "optimizer.register_step_pre_hook(fn) in setup, before register."
            )
        if not tx.weights.has_loss and (tx.weights.has_earlier_losses or _has_gradients(optimizer)):
            self._reject(_NO_BACKWARD)

    def check_direct_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Reject ``optimizer.step()`` in user code that must call ``optimizer_step``."""
        tx = self._transaction
        if tx.is_open:
            self._refuse_parts("train_batch calls optimizer.step(), not self.optimizer_step()")
        features = self._state.features
        why = next((each.needs_helper for each in features if each.needs_helper), "")
        if not why and tx.weights.uses_backward and self._precision.scales:
            why = f"the scaled gradients of self.backward(loss) under {self._precision.name}"
        if why:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() ignores {why}. Call self.backward(loss) and "
                "self.optimizer_step(optimizer) in train_batch instead."
            )

    # ---- gradients that are not final

    def _note_gradients(self, is_watched: bool) -> None:
        watched = self._state.optimizers if is_watched else ()
        self._seen = {id(optimizer): _gradients_of(optimizer) for optimizer in watched}

    def forget(self, optimizer: torch.optim.Optimizer) -> None:
        """Allow user code to change the gradients of an optimizer."""
        self._seen.pop(id(optimizer), None)

    def _have_changed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether user code has changed gradients since a loss, for example by clipping.

        Reject parts if it changes the gradients of a part.
        """
        seen = self._seen.get(id(optimizer))
        changed = seen is not None and seen != _gradients_of(optimizer)
        if changed:
            self._refuse_parts("train_batch changes gradients before it steps an optimizer")
        return changed

    # ---- errors

    def _refuse_parts(self, why: str) -> None:
        self._state.micro_batching.refuse(why, self._transaction)

    def _reject(self, why: str) -> None:
        self._refuse_parts(why)
        if not self._transaction.is_only:
            raise RuntimeError(
                f"{why}. With {self.needs_helper}, call self.backward(loss) and "
                "self.optimizer_step(optimizer) once for every batch. For a batch without a loss, "
                "pass num_samples=0, and pass the number of samples for all other batches."
            )


@functools.cache
def _needs_closure(step: Any) -> bool:
    return "closure" in required_arguments(step)


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(parameter.grad is not None for parameter in parameters_of(optimizer))


def _gradients_of(optimizer: torch.optim.Optimizer) -> list[tuple[int, int]]:
    """Return the identities and versions of gradients, to detect changes."""
    gradients = [parameter.grad for parameter in parameters_of(optimizer)]
    return [(id(each), 0 if each is None else version_of(each)) for each in gradients]
