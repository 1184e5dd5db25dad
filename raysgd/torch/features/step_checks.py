"""Reject what `train_batch` does if the update would differ from that of one process."""

from functools import cache, partial
from typing import Any

import torch

from raysgd.loop.feature import UpdateFeature
from raysgd.loop.loss_weights import LossCount
from raysgd.loop.segment import Segment
from raysgd.loop.update import Update
from raysgd.torch.input.batches import ParsedBatch
from raysgd.torch.register_checks import required_arguments
from raysgd.torch.tensors import TensorVersions, parameters_of
from raysgd.torch.train_state import TorchTrainState

_NO_BACKWARD = "train_batch does not call self.backward(loss) for every batch"


class StepChecks(UpdateFeature):
    """Checks the order of losses and steps in `train_batch`, and that it changes no gradients.

    What one batch may do can be wrong for a micro-batch of it. The loop then repeats the step with
    whole batches, unless an accumulation needs several.
    """

    def __init__(self, train_state: TorchTrainState) -> None:
        self._train_state, self._precision = train_state, train_state.precision
        self._refuse_split = train_state.micro_batching.refuse_split
        self._watched: dict[int, TensorVersions] = {}
        """Gradients after a backward pass, by optimizer, if they are not final then."""
        self._keeps_gradients = False  # for the next update: train_batch accumulates them itself
        self._collective = ""  # that train_batch calls

    # ---- hooks of a step

    def begin_micro_batch(self, update: Update) -> None:
        has_gap = update.loss_weights.num_earlier_micro_batches < update.micro_batch_index
        if has_gap and any(map(_has_gradients, self._train_state.optimizers)):
            self._refuse_split(_NO_BACKWARD)
        if update.is_split and self._has_gradient_hooks():
            self._refuse_split("a hook of a parameter may change accumulated gradients")
        self._watch_gradients(self._precision.scales_loss or not update.has_one_micro_batch)

    def before_commit(self, update: Update) -> None:
        """Reject an update of several micro-batches, or of logical workers, without a step."""
        uses_backward = update.loss_weights.uses_backward and not update.has_one_micro_batch
        if uses_backward and not update.optimizer_steps.counts:
            self._require_unsplit("train_batch makes no update in the last batch of a group")

    def commit(self, update: Update) -> None:
        self._watched.clear()
        train_state, why = self._train_state, ""
        steps, losses = update.optimizer_steps, update.loss_weights
        optimizers = () if steps.counts else train_state.optimizers
        self._keeps_gradients = any(map(_has_gradients, optimizers))
        if self._collective or train_state.settings.options.elastic.shares != "even":
            if not losses.uses_backward:
                why = "does not call self.backward(loss)"
            elif self._collective and losses.counted_items is None:
                why = f"calls {self._collective}, and self.backward(loss) without num_items"
        num_even = train_state.settings.context.world_size * update.plan.num_samples if why else 0
        if steps.counts and why and update.plan.total_samples not in (None, num_even):
            train_state.settings.warn_once(
                "weight",
                "The workers have different numbers of samples in step %d, and train_batch %s. "
                "Losses then have wrong weights. Pass num_items to self.backward for each loss. "
                'Or use drop_last=True, and ElasticConfig(global_batch="scale", shares="even").',
                train_state.position.global_step,
                why,
            )

    def roll_back(self, update: Update) -> None:
        self._watched.clear()
        if self._keeps_gradients:
            self._train_state.settings.warn_once(
                "kept",
                "A step failed, and the gradients that train_batch kept from earlier batches are "
                "lost. To accumulate gradients, use register(gradient_accumulation_steps=...).",
            )
            self._keeps_gradients = False

    # ---- within a micro-batch

    def refuse_collective(self, name: str) -> None:
        update = self._train_state.update
        if not update.is_open or update.optimizer_steps.running_optimizer is not None:
            return
        self._collective = name
        self._refuse_split(
            f"train_batch calls {name}",
            f"leave out {name}, because the result would depend on the number of workers. For a "
            "mean over other items than samples, call self.backward(loss, num_items=count).",
        )

    def warn_of_dropped_samples(self, segment: Segment | None) -> None:
        """Warn if the samples of a batch are not its rows, as if a collate_fn has dropped some."""
        train_state, update = self._train_state, self._train_state.update
        has_weight = (
            train_state.exchange.num_averaging_workers > 1 or not update.has_one_micro_batch
        )
        if not has_weight or segment is None or (drawn := segment.num_collated_samples) is None:
            return
        batch = ParsedBatch((segment.batch,), {}, None)
        _, is_clear = batch.count_samples(drawn)
        if not is_clear:
            self.warn_of_unclear_samples(batch, drawn, drawn)

    def warn_of_unclear_samples(self, batch: ParsedBatch, drawn: int | None, count: int) -> None:
        self._train_state.settings.warn_once(
            "samples",
            "The number of samples in a batch is not clear: its tensors have %s rows, and the "
            "loader joined %s samples. raysgd counts %d samples. If losses are means over "
            "something else, override num_items(batch), or call self.backward(loss, "
            "num_items=count) in a train_batch of your own.",
            sorted(batch.lengths),
            "unknown" if drawn is None else drawn,
            count,
            anywhere=True,
        )

    def before_backward(self, count: LossCount) -> None:
        update, train_state = self._train_state.update, self._train_state
        exchange = train_state.exchange
        has_one_batch = train_state.accumulation_steps == 1 and not exchange.divides_by_counts
        if has_one_batch and update.loss_weights.has_loss and count.num_items is not None:
            self._refuse_split("train_batch passes num_items for several losses of a batch")
        counts_samples = count.num_items is None and not count.is_sum
        has_gap = update.loss_weights.num_earlier_micro_batches < update.micro_batch_index
        if has_gap and counts_samples and exchange.num_averaging_workers > 1:
            self._require_unsplit(_NO_BACKWARD)
        if update.optimizer_steps.requested:
            self._refuse_split("train_batch computes gradients after it has stepped an optimizer")
        for optimizer in train_state.optimizers if self._watched else ():
            gradients = _gradients_of(optimizer)
            if self._have_changed(optimizer) and any(g is not None and g.any() for g in gradients):
                why = self._precision.name if self._precision.scales_loss else "Accumulation"
                raise RuntimeError(
                    f"{why} scales gradients, but train_batch made or changed "
                    "gradients before self.backward(loss), for example by loss.backward(). Add up "
                    "the losses, and call self.backward(loss)."
                )

    def after_backward(self) -> None:
        update = self._train_state.update
        is_final = update.in_last_micro_batch and not update.plan.has_logical_workers
        self._watch_gradients(self._precision.scales_loss or not is_final)

    def before_step(self, optimizer: torch.optim.Optimizer, is_first: bool) -> None:
        losses = self._train_state.update.loss_weights
        if not is_first:  # request of a step in the micro-batch
            self._require_unsplit(f"train_batch steps the same {type(optimizer).__name__} twice")
        if _needs_closure(type(optimizer).step):
            raise TypeError(
                f"{type(optimizer).__name__}.step() needs a closure, which optimizer_step() does "
                "not have. Override train_batch, and call self.optimizer.step(closure) in it."
            )
        is_watched = self._watched and (losses.has_loss or self._precision.scales_loss)
        if is_watched and self._have_changed(optimizer):
            number, why = self._train_state.accumulation_steps, self._precision.name
            why = f"gradient_accumulation_steps={number}" if number > 1 else why
            raise RuntimeError(
                "train_batch changes gradients between self.backward(loss) and self.optimizer_step("
                f"optimizer). With {why}, they are not final there. Clip with "
                "register(max_grad_norm=...), or change them in a hook: call "
                "optimizer.register_step_pre_hook(fn) in setup, before register."
            )
        if not losses.has_loss and (losses.num_earlier_micro_batches or _has_gradients(optimizer)):
            self._require_unsplit(_NO_BACKWARD)

    def check_direct_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Reject ``optimizer.step()`` in user code that must call ``optimizer_step``."""
        update, features = self._train_state.update, self._train_state.features
        if update.is_open:
            self._refuse_split("train_batch calls optimizer.step(), not self.optimizer_step()")
        why = next((f.why_optimizer_step for f in features if f.why_optimizer_step), "")
        if not why and update.loss_weights.uses_backward and self._precision.scales_loss:
            why = f"the scaled gradients of self.backward(loss) under {self._precision.name}"
        if why:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() ignores {why}. Call self.backward(loss) and "
                "self.optimizer_step(optimizer) in train_batch instead."
            )

    # ---- gradients that are not final

    def _has_gradient_hooks(self) -> bool:
        """Return whether user code has hooks that see the gradients of earlier micro-batches."""
        options = self._train_state.settings.options
        num_expected = options.elastic.shares == "measured"  # of `ThroughputMeter`
        parameters = (p for model in self._train_state.models for p in model.parameters())
        # No public attribute has these hooks.
        return any(len(p._post_accumulate_grad_hooks or ()) > num_expected for p in parameters)

    def _watch_gradients(self, is_watched: bool) -> None:
        watched = self._train_state.optimizers if is_watched else ()
        self._watched = {id(o): TensorVersions(partial(_gradients_of, o)) for o in watched}

    def _have_changed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether user code has changed gradients since a loss, for example by clipping.

        Refuse to split batches if it changes the gradients of a micro-batch.
        """
        seen = self._watched.get(id(optimizer))
        changed = seen is not None and bool(seen.find_changed_ids())
        if changed:
            self._refuse_split("train_batch changes gradients before it steps an optimizer")
        return changed

    # ---- errors

    def _require_unsplit(self, why: str) -> None:
        """Refuse to split the batch. Raise RuntimeError if the update has several micro-batches."""
        self._refuse_split(why)
        if not self._train_state.update.has_one_micro_batch:
            num_batches = self._train_state.accumulation_steps
            raise RuntimeError(
                f"{why}. With gradient_accumulation_steps={num_batches}, call self.backward(loss) "
                "and self.optimizer_step(optimizer) once for every batch. For a batch without a "
                "loss, pass num_items=0, and pass the number of samples for all other batches."
            )


@cache
def _needs_closure(step: Any) -> bool:
    return "closure" in required_arguments(step)


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(gradient is not None for gradient in _gradients_of(optimizer))


def _gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in parameters_of(optimizer)]
