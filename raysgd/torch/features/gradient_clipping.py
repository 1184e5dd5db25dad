"""Log the norms of gradients, and clip gradients by their norm."""

from typing import Any

import torch

from raysgd._internal.arguments import check_number
from raysgd.loop.feature import UpdateFeature
from raysgd.loop.update import Update
from raysgd.torch.train_state import TorchTrainState


class GradientClipping(UpdateFeature):
    """Clips the gradients of each optimizer to ``max_grad_norm`` of ``register``.

    The norm before clipping is the metric ``grad_norm`` of logged steps.
    """

    def __init__(self, train_state: TorchTrainState, max_norm: Any) -> None:
        if max_norm is not None:
            check_number("register", "max_grad_norm", max_norm, above=0)
            self.why_optimizer_step = f"max_grad_norm={max_norm}"
        self._train_state, self._max_norm = train_state, max_norm
        self._is_logged = False

    def begin_call(self, logs_steps: bool) -> None:
        self._is_logged = logs_steps

    def begin_update(self, update: Update) -> None:
        self._train_state.gradient_norms = {}

    def before_optimizer_step(self, update: Update, optimizer: Any) -> None:
        if update.bad_step is None and (self._is_logged or self._max_norm is not None):
            train_state, precision = self._train_state, self._train_state.precision
            precision.unscale(optimizer)
            tensors, norm = train_state.exchange.gradients_and_norm(precision.parameters(optimizer))
            train_state.gradient_norms[id(optimizer)] = norm
            if self._max_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(tensors, self._max_norm, norm)
