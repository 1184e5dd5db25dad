"""From losses to the steps of optimizers.

``train_batch`` has two ways to an update:

====================  ===========================  ===================================
of an update          methods of the operator      methods of PyTorch
====================  ===========================  ===================================
loss                  ``backward``: weights        ``loss.backward()``: equal weights
micro-batches         yes                          an error, or whole batches
averages              in the last backward pass,   in each backward pass, else before
                      else in `Optimization.step`  the step
clipping, unscaling   `before_optimizer_step`      by user code
step                  ``optimizer_step``           ``optimizer.step()``
====================  ===========================  ===================================

Both pass the hooks of the optimizer that `Optimization.register_hooks` registers. `OptimizerSteps`
records each step, and `StepChecks` raises the errors.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from raysgd._internal.nested import describe
from raysgd._internal.step_timing import OPTIMIZER, OTHER
from raysgd.loop.feature import UpdateFeature
from raysgd.loop.loss_weights import LossCount
from raysgd.loop.segment import Segment
from raysgd.loop.update import Update, WarmedUp
from raysgd.torch.features.step_checks import StepChecks
from raysgd.torch.losses import ONE_ELEMENT, as_count
from raysgd.torch.tensors import inner_optimizers, multiply_all, parameters_of
from raysgd.torch.train_state import TorchTrainState


class Optimization(UpdateFeature):
    """Computes the updates of one operator, from losses to the steps of optimizers.

    Batches come in groups of ``accumulation_steps``, and large batches in micro-batches. The last
    micro-batch makes the update. If a loop does not use its iterator, each batch is a group.
    `Update` has the order of a micro-batch, and `StepChecks` checks it. The exchange, or else
    `AccumulatedGradients`, takes the gradients of earlier micro-batches out of ``.grad``.
    """

    def __init__(self, train_state: TorchTrainState, checks: StepChecks) -> None:
        self._train_state, self._checks = train_state, checks
        self._accumulated = AccumulatedGradients()
        self._loss_weight = 1.0  # of the newest loss, which a closure may compute
        self.counts_items = False
        """Whether the newest loss is a mean over items, and not over samples."""

    # ---- a micro-batch

    def begin_micro_batch(self, update: Update) -> None:
        if update.loss_weights.num_earlier_micro_batches:
            for optimizer in self._train_state.optimizers:
                self._accumulated.set_aside(parameters_of(optimizer))

    def backward(
        self,
        loss: torch.Tensor,
        count: LossCount | float | torch.Tensor | None,
        segment: Segment | None = None,
    ) -> None:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ValueError(f"The loss is {describe(loss)}. {ONE_ELEMENT}")
        update, train_state = self._train_state.update, self._train_state
        if not isinstance(count, LossCount):
            count = LossCount(None if count is None else as_count(count))
        self.counts_items = count.num_items is not None
        if not train_state.data.knows_sizes:
            count = count.with_samples()
            if count.num_items is None and not count.is_sum:
                self._checks.warn_of_dropped_samples(segment)
        self._checks.before_backward(count)
        clones = len(self._train_state.optimizers) > 1
        self._accumulated.restore(is_first=not update.loss_weights.has_loss, clones=clones)
        exchange = train_state.exchange
        size, all_reduce = exchange.num_averaging_workers, exchange.all_reduce_sum
        factors = update.loss_weights.add(count, size, all_reduce, exchange.divides_by_counts)
        if factors.earlier != 1.0:
            self._multiply_gradients(factors.earlier)
        if count.num_items == 0 and not loss.detach().isfinite().all():
            _zero_gradients_of(loss)  # 0 * NaN would be NaN
        else:
            for feature in train_state.features_by_hook["observe_loss"]:
                feature.observe_loss(update, loss, factors)
        self._loss_weight = factors.loss
        loss = loss if factors.loss == 1.0 else loss * factors.loss
        train_state.precision.backward(loss, update.in_last_micro_batch)
        self._checks.after_backward()

    def _multiply_gradients(self, factor: float) -> None:
        parameters = [p for model in self._train_state.models for p in model.parameters()]
        for optimizer in self._train_state.optimizers:
            parameters += parameters_of(optimizer)
        gradients = [*self._accumulated.restored.values(), *(p.grad for p in parameters)]
        unique = {id(gradient): gradient for gradient in gradients if gradient is not None}
        multiply_all(unique.values(), factor)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        update = self._train_state.update
        if update.is_warm_up:
            raise WarmedUp
        is_first = update.optimizer_steps.request(optimizer)
        self._checks.before_step(optimizer, is_first)
        if not update.in_last_micro_batch:
            self._train_state.exchange.take_gradients(optimizer)
            self._accumulated.set_aside(parameters_of(optimizer))
            return False
        self._train_state.exchange.complete_gradients(optimizer)
        if not update.loss_weights.has_no_items:
            for feature in self._train_state.features_by_hook["before_optimizer_step"]:
                feature.before_optimizer_step(update, optimizer)
        if update.loss_weights.has_no_items or update.bad_step is not None:
            update.optimizer_steps.skip(optimizer)
        else:
            update.optimizer_steps.make(optimizer, self._train_state.precision.step)
        optimizer.zero_grad(set_to_none=True)
        if update.loss_weights.num_earlier_micro_batches:
            for parameter in parameters_of(optimizer):
                self._accumulated.restored.pop(parameter, None)
        return True

    # ---- hooks of optimizers

    def register_hooks(self) -> None:
        """Register the hooks of optimizers.

        The hooks of user code and of Horovod come first, because they may reject a step. Those of
        `StatePlacement.begin_sharding` come last.
        """
        optimizers, num_batches = self._train_state.optimizers, self._train_state.accumulation_steps
        if num_batches > 1:
            self.why_optimizer_step = f"gradient_accumulation_steps={num_batches}"
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._step_pre_hook)
            optimizer.register_step_post_hook(self._finish_step)
            for inner in inner_optimizers(optimizer):
                if inner not in optimizers:
                    inner.register_step_pre_hook(self._inner_step_pre_hook)

    def _step_pre_hook(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        update, exchange = self._train_state.update, self._train_state.exchange
        if update.is_warm_up:
            raise WarmedUp
        closure = args[1] if args[1:] else kwargs.get("closure")
        if not update.optimizer_steps.is_requested:
            self._train_state.step_timing.begin(OPTIMIZER)
            self._checks.check_direct_step(optimizer)
            if closure is None:
                exchange.complete_gradients(optimizer)
                if update.loss_weights.has_no_items:
                    optimizer.zero_grad(set_to_none=True)  # optimizers then change nothing
        update.optimizer_steps.begin(optimizer)
        if closure is None:
            return args, kwargs
        return args[:1], {**kwargs, "closure": partial(self._call_closure, closure, optimizer)}

    def _call_closure(self, closure: Callable[[], Any], optimizer: torch.optim.Optimizer) -> Any:
        """Complete the gradients of a closure. Return the mean of its loss over all workers."""
        exchange, weights = self._train_state.exchange, self._train_state.update.loss_weights
        self._loss_weight = 1.0  # if the closure does not call `backward`
        loss = closure()
        exchange.complete_gradients(optimizer)
        if weights.has_no_items and not weights.awaits_count:  # not of another optimizer's loss
            optimizer.zero_grad(set_to_none=True)
        if not isinstance(loss, torch.Tensor):
            return loss
        # A line search must take the same steps on all workers. Without items, it may be NaN.
        local = loss.item() * self._loss_weight if self._loss_weight else 0.0
        return loss.new_tensor(exchange.all_reduce_sum(local) / exchange.num_averaging_workers)

    def _finish_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        steps = self._train_state.update.optimizer_steps
        steps.end(optimizer)
        if not steps.is_requested:
            self._train_state.step_timing.begin(OTHER)

    def _inner_step_pre_hook(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        steps = self._train_state.update.optimizer_steps
        if steps.running_optimizer is None:  # in a method such as SAM's
            self._checks.check_direct_step(optimizer)
            steps.count_wrapped(optimizer)
        self._train_state.exchange.complete_gradients(optimizer)

    # ---- the end of an update, and of a call

    def commit(self, update: Update) -> None:
        self._accumulated = AccumulatedGradients()
        has_several = len(self._train_state.optimizers) > 1
        if has_several and update.loss_weights.uses_backward and update.optimizer_steps.counts:
            # A loss may leave gradients in parameters of another optimizer. If no optimizer
            # stepped, keep them, because user code accumulates gradients.
            self._zero_gradients()

    def roll_back(self, update: Update) -> None:
        self._accumulated = AccumulatedGradients()
        self._zero_gradients()

    def end_call(self) -> None:
        train_state = self._train_state
        if train_state.position.global_step and not train_state.update.optimizer_steps.num_ended:
            train_state.settings.warn_once(
                "no step",
                "No registered optimizer has made a step, so nothing is trained. Call self."
                "backward(loss) and self.optimizer_step(optimizer) in train_batch.",
            )

    def _zero_gradients(self) -> None:
        for optimizer in self._train_state.optimizers:
            optimizer.zero_grad(set_to_none=True)


class AccumulatedGradients:
    """The gradients of earlier micro-batches, up to the step of their optimizer.

    Between backward passes, neither ``zero_grad`` nor losses of other optimizers may change them.
    """

    def __init__(self) -> None:
        self._aside: dict[torch.nn.Parameter, torch.Tensor] = {}
        self.restored: dict[torch.nn.Parameter, torch.Tensor] = {}
        """Gradients that are back in the parameters, until their optimizer steps."""

    def set_aside(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Take the gradients of parameters until the first loss of the next micro-batch."""
        for parameter in parameters:
            returned = self.restored.pop(parameter, None)
            gradient = returned if parameter.grad is None else parameter.grad
            if gradient is not None:
                self._aside.setdefault(parameter, gradient)
                parameter.grad = None

    def restore(self, is_first: bool, clones: bool) -> None:
        """Restore the gradients before a loss, also after a ``zero_grad`` between two losses.

        `is_first`: whether it is the first loss of the micro-batch. With several optimizers, pass
        `clones`, because ``zero_grad`` must discard gradients that a loss added to the parameters
        of another optimizer.
        """
        if is_first:
            self.restored, self._aside = self._aside, {}
        for parameter, gradient in self.restored.items():
            if is_first or (clones and parameter.grad is None):
                parameter.grad = gradient.clone() if clones else gradient
            elif parameter.grad is None:
                raise RuntimeError(
                    "zero_grad() between two losses of a batch removed accumulated gradients. Call "
                    "zero_grad() before the first self.backward(loss) of the batch, or not at all."
                )


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
