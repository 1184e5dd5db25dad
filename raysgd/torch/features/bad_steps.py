"""Discard updates whose loss or gradient is not finite, or whose loss jumps."""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from raysgd.errors import BadStepsError, CheckpointError
from raysgd.loop.feature import UpdateFeature
from raysgd.loop.loss_weights import Factors
from raysgd.loop.update import BadStepRecord, Update
from raysgd.torch.options import BadSteps
from raysgd.torch.train_state import TorchTrainState

_KEY = "bad_steps"
_WINDOW = 100
"""Number of losses in the median."""
_UNIT, _LARGEST = 2.0**-26, 2.0**26
"""Losses are added up as multiples of a unit, so that their order does not change the sum."""
_GOOD, _SPIKE, _GRADIENT, _LOSS = range(4)  # the worst of all workers counts


class BadStepFilter(UpdateFeature):
    """Decides before each update whether it is applied. All workers decide the same.

    They add up their losses, because the gradients of a loss that is not finite may be 0, as those
    of a mean of no elements.
    """

    why_optimizer_step = "bad_steps"

    def __init__(self, train_state: TorchTrainState, options: BadSteps) -> None:
        if len(train_state.optimizers) != 1:
            raise ValueError(
                f"TorchTrainer(bad_steps=...) needs one optimizer, but register() got "
                f"{len(train_state.optimizers)}. An update of the first one could not be undone."
            )
        self._train_state, self._options = train_state, options
        self._num_averaging_workers = 1  # of the exchange; to find it takes many calls
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._loss_term: Any = 0.0  # of the loss, on this worker; NaN if a loss was not finite
        self._loss: float | None = None  # of an update that is applied

    def begin_call(self, logs_steps: bool) -> None:
        self._num_averaging_workers = self._train_state.exchange.num_averaging_workers

    def begin_update(self, update: Update) -> None:
        self._loss_term, self._loss = 0.0, None

    def observe_loss(self, update: Update, loss: torch.Tensor, factors: Factors) -> None:
        """Add the value of the loss."""
        if not update.is_open:  # outside of the loop, no update is left out
            return
        value = loss.detach()
        term = value.double() * factors.loss
        if self._train_state.exchange.sums_exactly:  # multiples of a unit add up without rounding
            term = (term.clamp(-_LARGEST, _LARGEST) / _UNIT).round() * _UNIT
        self._loss_term = self._loss_term * factors.earlier + term + value * 0

    def before_optimizer_step(self, update: Update, optimizer: Any) -> None:
        if not update.is_open:
            return
        train_state, spike = self._train_state, self._options.spike
        precision, exchange = train_state.precision, train_state.exchange
        if update.optimizer_steps.counts and not train_state.placement.is_unsharded(optimizer):
            raise RuntimeError(
                "With bad_steps and sharding, an update has one step of the optimizer. The first "
                "step could not be undone. Add up the losses, and step once."
            )
        norm = float(exchange.gradients_and_norm(precision.parameters(optimizer))[1])
        loss = exchange.all_reduce_sum(float(self._loss_term)) / self._num_averaging_workers
        loss *= exchange.gradient_factor
        usual, kind = statistics.median(self._losses or [math.inf]), _GOOD
        if not math.isfinite(loss + norm):
            kind = _GRADIENT if math.isfinite(loss) else _LOSS
        elif spike is not None and usual != 0 and -loss < spike * usual < loss:
            kind = _SPIKE
        if not train_state.placement.replicates and train_state.settings.context.has_process_group:
            # Each worker has a loss and gradients of its own.
            kind = -train_state.collectives.all_reduce_min(-kind)[0]
        if kind == _GOOD:
            self._loss = None if spike is None else loss
        elif kind == _SPIKE:
            why = f"the loss is more than {spike:g} times the median, {usual:.4g}"
            self._record_bad_step(update, why, loss)
        elif kind == _LOSS:
            self._record_bad_step(update, "the loss is not finite", str(loss))
        elif not precision.scales_loss:  # otherwise the GradScaler skips it, and lowers the scale
            self._record_bad_step(update, "the gradient is not finite", str(norm))

    def _record_bad_step(self, update: Update, reason: str, value: Any) -> None:
        train_state, position = self._train_state, self._train_state.position
        source, num_samples = train_state.data.training_source, update.plan.total_samples or 0
        bad_step: BadStepRecord = {
            "step": position.global_step + update.plan.num_steps,
            "epoch": position.epoch + 1,
            "reason": reason,
            "value": value,
            "samples": source.sample_ids(position.epoch, position.offset, num_samples),
        }
        update.mark_bad(bad_step)
        start_step = train_state.call.start_step
        steps = [bad for bad in train_state.bad_steps if bad["step"] > start_step]
        steps.append(bad_step)
        if len(steps) > self._options.max_skipped:
            named = "; ".join(f"step {bad['step']}, {bad['reason']}" for bad in steps)
            raise BadStepsError(
                f"{len(steps)} bad steps in this call, and {self._options}: {named}. "
                "The state is that before the last one. The attribute `steps` has the samples.",
                steps,
            )

    def commit(self, update: Update) -> None:
        if update.bad_step is not None:
            self._train_state.bad_steps.append(update.bad_step)
        elif self._loss is not None:
            self._losses.append(self._loss)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        return {_KEY: {"losses": [*self._losses], "records": [*self._train_state.bad_steps]}}

    def check_state(self, state: Mapping[str, Any]) -> None:
        saved = state.get(_KEY, {})
        if not all(isinstance(value, Sequence) for value in saved.values()):
            raise CheckpointError(f"Cannot load {_KEY!r} of the state: {saved!r}.")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = state.get(_KEY, {})
        self._losses = deque(saved.get("losses", ()), maxlen=_WINDOW)
        self._train_state.bad_steps = [*saved.get("records", ())]
