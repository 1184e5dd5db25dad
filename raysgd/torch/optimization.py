"""From losses to updates: scaling, accumulation and clipping."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch

from raysgd._internal.step_timing import OPTIMIZER, OTHER
from raysgd.loop.feature import StepFeature
from raysgd.loop.loss_weights import LossCount
from raysgd.loop.step import UpdateTransaction
from raysgd.torch import ddp
from raysgd.torch.precision import Precision
from raysgd.torch.register_checks import required_arguments
from raysgd.torch.registered_state import RegisteredState
from raysgd.torch.tensors import multiply_all, version_of

_NO_BACKWARD = "train_batch does not call self.backward(loss) for every batch"


def as_count(count: Any, source: str = "backward(num_samples={})") -> float:
    """Return a number, or a tensor of one element, as a float. `source` is for errors."""
    is_scalar = isinstance(count, torch.Tensor) and count.numel() == 1
    value = count.item() if is_scalar else count
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{source.format(repr(count))}: the count must be a number.")
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"{source.format(repr(value))}: the count must be finite and at least 0.")
    return float(value)


class GradientExchange(StepFeature):
    """Exchanges gradients between workers. The default is for a single worker.

    `Replication`, `EqualBitsReplication`, and `FullyShardedModel` override methods. Horovod has its
    own hooks.
    """

    def average(self, optimizer: torch.optim.Optimizer) -> None:
        """Average gradients of an optimizer that the workers have not averaged."""

    def keep(self, optimizer: torch.optim.Optimizer) -> bool:
        """Take the gradients of a micro-batch. If False, the caller accumulates them."""
        return False

    def rows(self, parameters: Any) -> Any:
        """Return the tensors that have this worker's gradients of some parameters."""
        return parameters

    def whole_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """Return the norm of all workers' gradients, given the norm of this worker's gradients."""
        return norm


class Optimization(StepFeature):
    """Computes the updates of one operator, from losses to the steps of optimizers.

    Batches come in groups of ``accumulation_steps``, and large batches in parts. The last
    micro-batch makes the update. If a loop does not use its iterator, each batch is a group.
    """

    def __init__(self, state: RegisteredState, precision: Precision) -> None:
        self._state = state
        self.precision = precision
        self._transaction = state.transaction
        self._accumulated = AccumulatedGradients()
        self._seen: dict[int, list[tuple[int, int]]] = {}
        """Gradients after a backward pass, by optimizer, if they are not final then."""
        self.exchange = GradientExchange()
        self._keeps_gradients = False  # train_batch itself accumulates them

    @property
    def needs_warm_up(self) -> bool:  # type: ignore[override]
        state = self._state
        if state.fully_sharded is not None:
            return False
        return state.settings.device.type == "cuda" or any(map(ddp.is_compiled, state.models))

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return self._state.optimizers

    def register_hooks(self) -> None:
        """Register optimizer hooks, after the hooks that may reject a step."""
        self.needs_helper = self.exchange.needs_helper
        if (steps := self._state.accumulation_steps) > 1:
            self.needs_helper = f"gradient_accumulation_steps={steps}"
        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(self._begin_update)
            for inner in vars(optimizer).values():  # as in sharpness-aware minimization
                if isinstance(inner, torch.optim.Optimizer) and inner not in self.optimizers:
                    inner.register_step_pre_hook(lambda inner, *_: self.exchange.average(inner))

    # ---- hooks of a step

    def begin_micro_batch(self, tx: UpdateTransaction) -> None:
        has_losses = tx.weights.has_earlier_losses
        if tx.index > 0 and not has_losses and any(map(_has_gradients, tx.optimizers)):
            self._refuse_parts(_NO_BACKWARD)
        if has_losses:
            for optimizer in self.optimizers:
                self._accumulated.set_aside(_parameters(optimizer))
        self._note_gradients(self.precision.scales)

    def check_complete(self) -> None:
        tx = self._transaction
        if tx.weights.has_earlier_losses and not tx.has_updates:
            self._reject("train_batch makes no update in the last batch of a group")

    def before_commit(self, tx: UpdateTransaction) -> None:
        self.check_complete()

    def commit(self, tx: UpdateTransaction) -> None:
        self._accumulated.clear()
        self._seen.clear()
        self._keeps_gradients = not tx.has_updates and any(map(_has_gradients, self.optimizers))
        if self._has_uneven_share(tx) and tx.has_updates and not tx.weights.uses_backward:
            self._state.settings.warn_once(
                "weight",
                "ElasticConfig(shares=...): train_batch does not call self.backward(loss), so the "
                "losses of workers with different shares have equal weight. Call it instead of "
                "loss.backward().",
            )
        if tx.weights.uses_backward and len(self.optimizers) > 1 and tx.has_updates:
            # A loss may leave gradients in parameters of another optimizer. If no optimizer
            # stepped, keep them, because user code accumulates gradients.
            self._zero_gradients()

    def _has_uneven_share(self, tx: UpdateTransaction) -> bool:
        if self._state.settings.options.elastic.shares == "even" or tx.plan.total is None:
            return False
        return tx.plan.samples * self._state.context.world_size != tx.plan.total

    def roll_back(self, tx: UpdateTransaction) -> None:
        if self._keeps_gradients:
            self._state.settings.warn_once(
                "kept",
                "A step failed, and the gradients that train_batch kept from earlier batches are "
                "lost. To accumulate gradients, use register(gradient_accumulation_steps=...).",
            )
            self._keeps_gradients = False
        self._zero_gradients()
        self._accumulated.clear()
        self._seen.clear()

    def _zero_gradients(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    # ---- within a micro-batch

    def backward(self, loss: torch.Tensor, count: LossCount | float | torch.Tensor | None) -> None:
        tx, state = self._transaction, self._state
        if not isinstance(count, LossCount):
            count = LossCount(None if count is None else as_count(count))
        if not state.data.knows_sizes:
            count = count.counting_samples()
        counts_samples = count.items is None and not count.is_sum
        if tx.weights.has_gap and counts_samples and state.num_averaged > 1:
            self._reject(_NO_BACKWARD)
        if tx.stepped:
            self._refuse_parts("train_batch computes gradients after it has stepped an optimizer")
        for optimizer in self.optimizers:
            changed = self._check_unchanged(optimizer) and self.precision.scales
            if changed and any(p.grad is not None and p.grad.any() for p in _parameters(optimizer)):
                raise RuntimeError(
                    f"{self.precision.name} scales gradients, but train_batch made or changed "
                    "gradients before self.backward(loss), for example by loss.backward(). Add up "
                    "the losses, and call self.backward(loss)."
                )
        copies = len(self.optimizers) > 1
        self._accumulated.put_back(is_first=not tx.weights.has_loss, copies=copies)
        factors = tx.weights.add(count, state.num_averaged, state.sum_over_workers)
        if factors.earlier != 1.0:
            self._multiply_gradients(factors.earlier)
        if count.items == 0 and not loss.detach().isfinite().all():
            _zero_gradients_of(loss)  # 0 * NaN would be NaN
        self.precision.backward(loss if factors.loss == 1.0 else loss * factors.loss, tx.is_last)
        is_part = not tx.is_last or state.settings.options.num_shards is not None
        self._note_gradients(self.precision.scales or is_part)

    def _note_gradients(self, is_watched: bool) -> None:
        watched = self.optimizers if is_watched else ()
        self._seen = {id(optimizer): _gradients_of(optimizer) for optimizer in watched}

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        tx = self._transaction
        tx.check_warm_up()
        if id(optimizer) in tx.stepped:
            self._reject(f"train_batch steps the same {type(optimizer).__name__} twice")
        tx.stepped.add(id(optimizer))
        if _needs_closure(type(optimizer).step):
            raise TypeError(
                f"{type(optimizer).__name__}.step() needs a closure, which optimizer_step() does "
                "not have. Override train_batch, and call self.optimizer.step(closure) in it."
            )
        if self._check_unchanged(optimizer):
            why = self.needs_helper or self.precision.name
            raise RuntimeError(
                "train_batch changes gradients between self.backward(loss) and self.optimizer_step("
                f"optimizer). With {why}, they are not final there. Clip with "
                "register(max_grad_norm=...), or change them in a hook: call "
                "optimizer.register_step_pre_hook(fn) in setup, before register."
            )
        if not tx.weights.has_loss and (tx.weights.has_earlier_losses or _has_gradients(optimizer)):
            self._reject(_NO_BACKWARD)
        if not tx.is_last:
            if not self.exchange.keep(optimizer):
                self._accumulated.set_aside(_parameters(optimizer))
            return False
        self._update(optimizer)
        optimizer.zero_grad(set_to_none=True)
        if tx.weights.has_earlier_losses:
            self._accumulated.release(_parameters(optimizer))
        return True

    def _update(self, optimizer: torch.optim.Optimizer) -> None:
        tx = self._transaction
        tx.in_helper = True
        try:
            self.exchange.average(optimizer)
            for feature in self._state.features:
                feature.before_update(tx, optimizer)
            before = tx.num_updates(optimizer)
            self.precision.step(optimizer)
        finally:
            tx.in_helper = False
        if tx.num_updates(optimizer) == before:  # an overflow, so the update was skipped
            self.end_update(optimizer)

    def gradients(self, optimizer: torch.optim.Optimizer) -> tuple[Any, torch.Tensor]:
        """Unscale the gradients of an optimizer, and return their tensors and their norm.

        The tensors have this worker's gradients. The norm covers all workers.
        """
        self.precision.unscale(optimizer)
        own = self.exchange.rows(self.precision.parameters(optimizer))
        norm = torch.nn.utils.get_total_norm([p.grad for p in own if p.grad is not None])
        return own, self.exchange.whole_norm(norm)

    def _multiply_gradients(self, factor: float) -> None:
        parameters = [p for model in self._state.models for p in model.parameters()]
        for optimizer in self.optimizers:
            parameters += _parameters(optimizer)
        gradients = [*self._accumulated.copied(), *(p.grad for p in parameters)]
        unique = {id(gradient): gradient for gradient in gradients if gradient is not None}
        multiply_all(unique.values(), factor)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients of an optimizer, so that user code may change them."""
        self.precision.unscale(optimizer)
        self._seen.pop(id(optimizer), None)

    # ---- hooks of the optimizers

    def _begin_update(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        tx = self._transaction
        tx.check_warm_up()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not tx.in_helper:
            self._state.timing.enter(OPTIMIZER)
            self._check_step(optimizer)
            if closure is None:
                self.exchange.average(optimizer)
        tx.begin_update(optimizer)
        if closure is None:
            return args, kwargs

        def averaging() -> Any:
            loss = closure()
            self.exchange.average(optimizer)
            if not isinstance(loss, torch.Tensor):
                return loss
            # A line search must take the same steps on all workers.
            mean = self._state.sum_over_workers(loss.item()) / self._state.num_averaged
            return loss.new_tensor(mean)

        return args[:1], {**kwargs, "closure": averaging}

    def end_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(optimizer is registered for registered in self.optimizers):
            self._transaction.end_update(optimizer)
            if not self._transaction.in_helper:
                self._state.timing.enter(OTHER)

    # ---- checks

    def _check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Reject ``optimizer.step()`` in user code that must call `step` instead."""
        tx = self._transaction
        if tx.is_open:
            self._refuse_parts("train_batch calls optimizer.step(), not self.optimizer_step()")
        features = self._state.features
        why = next((each.needs_helper for each in features if each.needs_helper), "")
        if not why and tx.weights.uses_backward and self.precision.scales:
            why = f"the scaled gradients of self.backward(loss) under {self.precision.name}"
        if why:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() ignores {why}. Call self.backward(loss) and "
                "self.optimizer_step(optimizer) in train_batch instead."
            )

    def _check_unchanged(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether user code has changed gradients since a loss, for example by clipping.

        Reject parts if it changes the gradients of a part.
        """
        seen = self._seen.get(id(optimizer))
        changed = seen is not None and seen != _gradients_of(optimizer)
        if changed:
            self._refuse_parts("train_batch changes gradients before it steps an optimizer")
        return changed

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


class AccumulatedGradients:
    """The gradients of earlier micro-batches, up to the step of their optimizer.

    Between backward passes, neither ``zero_grad`` nor losses of other optimizers may change them.
    """

    def __init__(self) -> None:
        self._aside: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._returned: dict[torch.nn.Parameter, torch.Tensor] = {}
        """Gradients that are back in the parameters, until their optimizer steps."""

    def set_aside(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Take the gradients of parameters until the first loss of the next micro-batch."""
        for parameter in parameters:
            returned = self._returned.pop(parameter, None)
            gradient = returned if parameter.grad is None else parameter.grad
            if gradient is not None:
                self._aside.setdefault(parameter, gradient)
                parameter.grad = None

    def put_back(self, is_first: bool, copies: bool) -> None:
        """Restore the gradients before a loss, also after a ``zero_grad`` between two losses.

        `is_first`: whether it is the first loss of the micro-batch. With several optimizers, pass
        `copies`, because ``zero_grad`` must discard gradients that a loss added to the parameters
        of another optimizer.
        """
        if is_first:
            self._returned, self._aside = self._aside, {}
        for parameter, gradient in self._returned.items():
            if is_first or (copies and parameter.grad is None):
                parameter.grad = gradient.clone() if copies else gradient
            elif parameter.grad is None:
                raise RuntimeError(
                    "zero_grad() between two losses of a batch removed accumulated gradients. Call "
                    "zero_grad() before the first self.backward(loss) of the batch, or not at all."
                )

    def copied(self) -> list[torch.Tensor]:
        return list(self._returned.values())

    def release(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            self._returned.pop(parameter, None)

    def clear(self) -> None:
        self._aside.clear()
        self._returned.clear()


def _zero_gradients_of(loss: torch.Tensor) -> None:
    """Zero the gradients of a loss that is not finite, such as a mean over no items.

    The backward pass must run, because the workers average gradients in it.
    """

    def zeros(gradients: Sequence[Any], _: Any) -> tuple[Any, ...]:
        return tuple(None if each is None else torch.zeros_like(each) for each in gradients)

    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        # Nodes of parameters outlive this pass, with their hooks.
        if node is None or node in seen or hasattr(node, "variable"):
            continue
        seen.add(node)
        node.register_hook(zeros)
        nodes += [parent for parent, _ in node.next_functions]


@functools.cache
def _needs_closure(step: Any) -> bool:
    return "closure" in required_arguments(step)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(parameter.grad is not None for parameter in _parameters(optimizer))


def _gradients_of(optimizer: torch.optim.Optimizer) -> list[tuple[int, int]]:
    """Return the identities and versions of gradients, to detect changes."""
    gradients = [parameter.grad for parameter in _parameters(optimizer)]
    return [(id(each), 0 if each is None else version_of(each)) for each in gradients]
