"""From losses to the steps of optimizers.

``train_batch`` has two ways to an update:

====================  ===========================  ===================================
of an update          methods of the operator      methods of PyTorch
====================  ===========================  ===================================
loss                  ``backward``: weights        ``loss.backward()``: equal weights
accumulation, parts   yes                          an error, or whole batches
averages              in the last backward pass,   in each backward pass, else before
                      else in `Optimization.step`  the step
clipping, unscaling   `before_optimizer_step`      by user code
step                  ``optimizer_step``           ``optimizer.step()``
====================  ===========================  ===================================

Both pass the hooks of the optimizer that `Optimization.register_hooks` registers. `StepChecks`
raises the errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from raysgd._internal.step_timing import OPTIMIZER, OTHER
from raysgd.loop.feature import StepFeature
from raysgd.loop.update import LossCount, Update, WarmedUp
from raysgd.torch.features.step_checks import StepChecks
from raysgd.torch.losses import as_count
from raysgd.torch.tensors import inner_optimizers, multiply_all, parameters_of
from raysgd.torch.train_state import TorchTrainState


class Optimization(StepFeature):
    """Computes the updates of one operator, from losses to the steps of optimizers.

    Batches come in groups of ``accumulation_steps``, and large batches in parts. The last
    micro-batch makes the update. If a loop does not use its iterator, each batch is a group. The
    methods have the order of a micro-batch. `StepChecks` checks each of them::

        begin_micro_batch     AccumulatedGradients takes earlier gradients out of ``.grad``
        backward              puts them back, and scales them and the loss by LossWeights. In the
                              last micro-batch, models average their gradients in this pass.
        step before the last  the exchange, or else AccumulatedGradients, takes the gradients
        step in the last one  the exchange averages the rest, features change gradients or refuse
                              the update, and the optimizer steps
        commit, roll_back     forget the gradients
    """

    def __init__(self, train_state: TorchTrainState) -> None:
        self._train_state, self._update = train_state, train_state.update
        self.checks = StepChecks(train_state)
        self._accumulated = AccumulatedGradients()
        self.counts_items = False
        """Whether the newest loss is a mean over items, and not over samples."""

    def register_hooks(self) -> None:
        """Register the hooks of optimizers.

        The hooks of user code and of Horovod come first, because they may reject a step. Those that
        shard the step come last. After a step, parameters are whole before other hooks see them.
        """
        optimizers = self._train_state.optimizers
        self._update.optimizer_steps.optimizers = optimizers
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_optimizer_step)
            optimizer.register_step_post_hook(self._after_optimizer_step)
            for inner in inner_optimizers(optimizer):
                if inner not in optimizers:
                    inner.register_step_pre_hook(self._before_inner_step)
        self._train_state.replication.wrap_steps()

    # ---- a micro-batch

    def begin_micro_batch(self, update: Update) -> None:
        if update.losses.num_earlier:
            for optimizer in self._train_state.optimizers:
                self._accumulated.set_aside(parameters_of(optimizer))

    def backward(self, loss: torch.Tensor, count: LossCount | float | torch.Tensor | None) -> None:
        update, train_state = self._update, self._train_state
        if not isinstance(count, LossCount):
            count = LossCount(None if count is None else as_count(count))
        self.counts_items = count.items is not None
        if not train_state.data.knows_sizes:
            count = count.with_samples()
            if count.items is None and not count.is_sum:
                self.checks.check_size()
        self.checks.before_backward(count)
        copies = len(self._train_state.optimizers) > 1
        self._accumulated.restore(is_first=not update.losses.has_loss, copies=copies)
        exchange = train_state.exchange
        factors = update.losses.add(count, exchange.num_workers, exchange.all_reduce_sum)
        if factors.earlier != 1.0:
            self._multiply_gradients(factors.earlier)
        if count.items == 0 and not loss.detach().isfinite().all():
            _zero_gradients_of(loss)  # 0 * NaN would be NaN
        else:
            for feature in train_state.features_with["filter_loss"]:
                loss = feature.filter_loss(update, loss, factors)
        loss = loss if factors.loss == 1.0 else loss * factors.loss
        train_state.precision.backward(loss, update.in_last_micro_batch)
        self.checks.after_backward()

    def _multiply_gradients(self, factor: float) -> None:
        parameters = [p for model in self._train_state.models for p in model.parameters()]
        for optimizer in self._train_state.optimizers:
            parameters += parameters_of(optimizer)
        gradients = [*self._accumulated.restored.values(), *(p.grad for p in parameters)]
        unique = {id(gradient): gradient for gradient in gradients if gradient is not None}
        multiply_all(unique.values(), factor)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        update = self._update
        if update.is_warm_up:
            raise WarmedUp
        self.checks.before_step(optimizer)
        if not update.in_last_micro_batch:
            if not self._train_state.exchange.take_gradients(optimizer):
                self._accumulated.set_aside(parameters_of(optimizer))
            return False
        steps = update.optimizer_steps
        steps.in_helper, before = True, steps.done.get(id(optimizer))
        try:
            self._train_state.exchange.average(optimizer)
            if update.losses.divisor:
                for feature in self._train_state.features_with["before_optimizer_step"]:
                    feature.before_optimizer_step(update, optimizer)
                if update.bad_step is None:
                    self._train_state.precision.step(optimizer)
        finally:
            steps.in_helper = False
        if steps.done.get(id(optimizer)) == before:  # no items, an overflow, or a bad step
            self._after_optimizer_step(optimizer)
        optimizer.zero_grad(set_to_none=True)
        if update.losses.num_earlier:
            self._accumulated.release(parameters_of(optimizer))
        return True

    def _before_optimizer_step(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        update, exchange = self._update, self._train_state.exchange
        if update.is_warm_up:
            raise WarmedUp
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not update.optimizer_steps.in_helper:
            self._train_state.timing.begin(OPTIMIZER)
            self.checks.check_direct_step(optimizer)
            if closure is None:
                exchange.average(optimizer)
                if not update.losses.divisor:
                    optimizer.zero_grad(set_to_none=True)  # optimizers then change nothing
        update.optimizer_steps.running = optimizer
        if closure is None:
            return args, kwargs

        def averaging() -> Any:
            loss = closure()
            exchange.average(optimizer)
            if not isinstance(loss, torch.Tensor):
                return loss
            # A line search must take the same steps on all workers.
            return loss.new_tensor(exchange.all_reduce_sum(loss.item()) / exchange.num_workers)

        return args[:1], {**kwargs, "closure": averaging}

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer in self._train_state.optimizers:
            self._update.optimizer_steps.end(optimizer)
            if not self._update.optimizer_steps.in_helper:
                self._train_state.timing.begin(OTHER)

    def _before_inner_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._update.optimizer_steps.have_begun = True
        self._train_state.exchange.average(optimizer)

    # ---- the end of an update

    def commit(self, update: Update) -> None:
        self._accumulated.clear()
        has_several = len(self._train_state.optimizers) > 1
        if has_several and update.losses.uses_backward and update.optimizer_steps.done:
            # A loss may leave gradients in parameters of another optimizer. If no optimizer
            # stepped, keep them, because user code accumulates gradients.
            self._zero_gradients()

    def roll_back(self, update: Update) -> None:
        self._accumulated.clear()
        self._zero_gradients()

    def _zero_gradients(self) -> None:
        for optimizer in self._train_state.optimizers:
            optimizer.zero_grad(set_to_none=True)

    # ---- for user code

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients of an optimizer, so that user code may change them."""
        self._train_state.precision.unscale(optimizer)
        self.checks.forget(optimizer)


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

    def restore(self, is_first: bool, copies: bool) -> None:
        """Restore the gradients before a loss, also after a ``zero_grad`` between two losses.

        `is_first`: whether it is the first loss of the micro-batch. With several optimizers, pass
        `copies`, because ``zero_grad`` must discard gradients that a loss added to the parameters
        of another optimizer.
        """
        if is_first:
            self.restored, self._aside = self._aside, {}
        for parameter, gradient in self.restored.items():
            if is_first or (copies and parameter.grad is None):
                parameter.grad = gradient.clone() if copies else gradient
            elif parameter.grad is None:
                raise RuntimeError(
                    "zero_grad() between two losses of a batch removed accumulated gradients. Call "
                    "zero_grad() before the first self.backward(loss) of the batch, or not at all."
                )

    def release(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            self.restored.pop(parameter, None)

    def clear(self) -> None:
        self._aside.clear()
        self.restored.clear()


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
