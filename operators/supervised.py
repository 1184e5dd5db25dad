"""One model, one target: the training and the validation step of most operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from raysgd.metrics import NUM_SAMPLES, Sums, ratio
from raysgd.operators.configured import ConfiguredOperator
from raysgd.operators.options import Option, any_of, flag

__all__ = ["SupervisedOperator", "in_full_precision"]


def in_full_precision(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of 16-bit numbers in float32, others as they are."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


class SupervisedOperator(ConfiguredOperator):
    """Trains one model to give a target.

    ==============================  ==========  ================================================
    key                             default     meaning
    ==============================  ==========  ================================================
    ``model``                       None        a torch.nn.Module, or a function of the config
                                                that makes one; unless a subclass overrides
                                                `build_model`
    ``train_metrics``               False       compute the metrics for training batches as
                                                well, as ``train_...``
    ==============================  ==========  ================================================

    and the keys of :class:`ConfiguredOperator`. Batches are ``(*features, target)``.

    A loss is the sum of the losses of all terms (samples, pixels, tokens) divided by their
    number, over all batches and workers: exact also if batches have different numbers of terms.
    A subclass whose terms do not all count overrides `num_items`; the gradients are those of the
    same mean then.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        **ConfiguredOperator.OPTIONS,
        "model": any_of(
            None,
            callable,
            "a torch.nn.Module or a function of the config that returns one",
        ),
        "train_metrics": flag(False),
    }

    # ---- what users override

    def build_model(self, config: dict[str, Any]) -> torch.nn.Module:
        """Return the model."""
        return self.build_module("model", config)

    def predict(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the model's output for a batch on this worker's device, and the target.

        An override that reads other batches may need a `num_items` that reads them as well.
        """
        *features, target = batch
        return self.model(*features), target

    def losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss of each term; 0 for those that do not count."""
        raise NotImplementedError(f"{type(self).__name__} must override losses.")

    def validation_losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss of each term in validation; that of training unless overridden."""
        return self.losses(output, target)

    def metrics(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
        """Return further metrics of a batch by name, without ``val_``.

        They are means over its samples, or :class:`raysgd.metrics.MergeableMetric` objects.
        """
        return {}

    def loss_metrics(self, total: torch.Tensor, count: float | torch.Tensor) -> dict[str, Any]:
        """Return ``loss``, and what follows from it, of the sum of the losses of a batch."""
        return {"loss": Sums(ratio, total=total, weight=count)}

    # ---- the steps

    def setup_models(self, config: dict[str, Any]) -> None:
        """Register the model, its optimizer and its scheduler."""
        model = self.build_model(config)
        optimizer = self.build_optimizer(model.parameters(), config)
        scheduler = self.build_scheduler(optimizer, config)
        self.model, self.optimizer, *_ = self.register(
            models=model, optimizers=optimizer, schedulers=scheduler, **self.register_options
        )

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Train on one batch.

        Returns:
            ``train_loss`` and ``num_samples``; with ``train_metrics`` also ``train_...``.
        """
        batch = self.to_device(batch)
        with self.timers.record("fwd"), self.autocast():
            output, target, losses = self.training_pass(batch)
            num_items = self._count_items(batch, len(target))
            total, count = losses.sum(), losses.numel() if num_items is None else num_items
        with self.timers.record("grad"):
            self.backward(total / (count or 1), num_samples=num_items)
        with self.timers.record("apply"):
            self.optimizer_step(self.optimizer)
        metrics = {
            NUM_SAMPLES: len(target),
            **_named("train", self.loss_metrics(total.detach(), count)),
        }
        if self.options["train_metrics"] and output is not None:
            with torch.no_grad():
                found = self.metrics(in_full_precision(output.detach()), target)
            metrics.update(_named("train", found))
        return metrics

    def training_pass(self, batch: Any) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Return output, target and losses; None for an output that metrics mean nothing for."""
        output, target = self.predict(batch)
        return output, target, self.losses(in_full_precision(output), target)

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Evaluate one batch; the output is in ``batch_info["output"]`` afterwards.

        Returns:
            ``val_loss``, ``num_samples``, and `metrics` as ``val_...``.
        """
        batch = self.to_device(batch)
        with self.timers.record("eval_fwd"), self.autocast():
            output, target = self.predict(batch)
            output = in_full_precision(output)
            losses = self.validation_losses(output, target)
        count = self.num_items(batch)
        batch_info["output"] = output
        self.update_metrics(output, target)
        return {
            NUM_SAMPLES: len(target),
            **_named(
                "val", self.loss_metrics(losses.sum(), losses.numel() if count is None else count)
            ),
            **_named("val", self.metrics(output, target)),
        }

    def predict_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        """Return the output of `predict`, in float32."""
        with self.autocast():
            return in_full_precision(self.predict(self.to_device(batch))[0])


def _named(prefix: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}_{name}": value for name, value in metrics.items()}
