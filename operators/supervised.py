"""Training and validation steps for one model and a target."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from raysgd.metrics import NUM_SAMPLES, Sums, ratio
from raysgd.operators.configured import ConfiguredOperator
from raysgd.operators.options import Option, any_of, choice


def in_full_precision(tensor: torch.Tensor) -> torch.Tensor:
    """Convert 16-bit floats to float32. Return other tensors unchanged."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluate a model without gradients, and restore its mode."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


class SupervisedOperator(ConfiguredOperator):
    """Trains one model to predict a target.

    ==============================  ==========  ================================================
    key                             default     meaning
    ==============================  ==========  ================================================
    ``model``                       None        a torch.nn.Module, or a function of the config
                                                that returns one; not needed if a subclass
                                                overrides `build_model`
    ``train_metrics``               False       also compute the metrics for training batches, as
                                                ``train_...``
    ==============================  ==========  ================================================

    It also has the keys of :class:`ConfiguredOperator`. Batches are ``(*features, target)``.

    A loss is the sum over all terms (samples, pixels, tokens) divided by their number, over all
    batches and workers. The result is exact even if batches have different numbers of terms. If
    some terms do not count, override `num_items`, so that gradients use the same mean.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        **ConfiguredOperator.OPTIONS,
        "model": any_of(
            None,
            callable,
            "a torch.nn.Module or a function of the config that returns one",
        ),
        "train_metrics": choice(False, True, False),
    }

    # ---- methods to override

    def build_model(self, config: dict[str, Any]) -> torch.nn.Module:
        return self.build_module("model", config)

    def predict(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the model's output for a batch on this worker's device, and the target.

        If you override `predict` to read other batches, also override `num_items` if necessary.
        """
        *features, target = batch
        return self.model(*features), target

    def losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss of each term, and 0 for terms to ignore."""
        raise NotImplementedError(f"{type(self).__name__} must override losses.")

    def validation_losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss of each term in validation. The default is the loss of training."""
        return self.losses(output, target)

    def metrics(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
        """Return further metrics of a batch by name, without the prefix ``val_``.

        Each metric is a mean over the samples, or a :class:`raysgd.metrics.MergeableMetric`.
        """
        return {}

    def loss_metrics(self, total: torch.Tensor, count: float | torch.Tensor) -> dict[str, Any]:
        """Return ``loss`` and derived metrics, from the sum of the losses of a batch."""
        return {"loss": Sums(ratio, total=total, weight=count)}

    # ---- the steps

    def setup_models(self, config: dict[str, Any]) -> None:
        model = self.build_model(config)
        optimizer = self.build_optimizer(model.parameters(), config)
        scheduler = self.build_scheduler(optimizer, config)
        self.model, self.optimizer, *_ = self.register(
            models=model, optimizers=optimizer, schedulers=scheduler, **self.register_options
        )

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        batch = self.to_device(batch)
        with self.timers.record("fwd"), self.autocast():
            output, target, losses = self.training_pass(batch)
            num_items = self._count_items(batch, len(target))
            total, count = losses.sum(), losses.numel() if num_items is None else num_items
        with self.timers.record("grad"):
            self.backward(total / (count or 1), num_samples=num_items)
        with self.timers.record("apply"):
            self.optimizer_step(self.optimizer)
        found = self.loss_metrics(total.detach(), count)
        if self.options["train_metrics"] and output is not None:
            with torch.no_grad():
                found |= self.metrics(in_full_precision(output.detach()), target)
        return {NUM_SAMPLES: len(target), **_named("train", found)}

    def training_pass(self, batch: Any) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Return output, target, and losses. An output of None disables ``train_metrics``."""
        output, target = self.predict(batch)
        return output, target, self.losses(in_full_precision(output), target)

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        batch = self.to_device(batch)
        with self.timers.record("eval_fwd"), self.autocast():
            output, target = self.predict(batch)
            output = in_full_precision(output)
            losses = self.validation_losses(output, target)
        num_items = self.num_items(batch)
        count = losses.numel() if num_items is None else num_items
        batch_info["output"] = output
        self.update_metrics(output, target)
        found = {**self.loss_metrics(losses.sum(), count), **self.metrics(output, target)}
        return {NUM_SAMPLES: len(target), **_named("val", found)}

    def predict_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        with self.autocast():
            return in_full_precision(self.predict(self.to_device(batch))[0])


def _named(prefix: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}_{name}": value for name, value in metrics.items()}
