"""The class that users subclass to define training.

A worker runs, for each ``trainer.train()``::

    operator.train_epoch(iterator, info, num_steps, epoch_idx)
        for batch in iterator:                  # this worker's part of the train loader
            operator.train_batch(batch, batch_info)
                forward and loss, under self.autocast()
                self.backward(loss)                 # gradients of the mean over all workers
                self.optimizer_step(optimizer)      # updates in the last batch of a group
            schedulers step, if scheduler_step_freq == "batch" and the group of batches is over
        schedulers step, if scheduler_step_freq == "epoch" and the epoch is over

For each ``trainer.validate()``, it runs ``operator.validate`` with ``operator.validate_batch``.
Override any of these methods, or none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from raysgd._internal.arguments import suggest_arguments
from raysgd._internal.forwarding import forward_to
from raysgd._internal.step_timing import BACKWARD, COPY, FORWARD, OPTIMIZER, OTHER
from raysgd.loop.creators import creator_class
from raysgd.loop.loss_weights import LossCount
from raysgd.loop.operator_base import OperatorBase
from raysgd.metrics import NUM_SAMPLES, Sums, ratio
from raysgd.torch.creators import TorchCreators
from raysgd.torch.feature_list import OperatorFeatures
from raysgd.torch.input.batches import ParsedBatch, has_masked_labels, move_to_device, parse_batch
from raysgd.torch.losses import accuracy_of, as_count, count_of, ignore_index_of, logits_of, loss_of
from raysgd.torch.modules import user_module
from raysgd.torch.options import TorchSettings
from raysgd.torch.registration import register
from raysgd.torch.train_state import TorchTrainState

__all__ = ["CreatorOperator", "TrainingOperator"]


class TrainingOperator(OperatorBase):
    """Defines training for :class:`raysgd.TorchTrainer`. Each worker has an instance.

    Override `setup`, and other methods if you need to::

        class Classifier(TrainingOperator):
            def setup(self, config):
                model = torch.nn.Linear(64, 10)
                optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
                self.model, self.optimizer, self.criterion = self.register(
                    models=model, optimizers=optimizer, criterion=torch.nn.CrossEntropyLoss())
                self.register_data(train_loader=..., validation_loader=...)

    ``raysgd.testing.run_operator`` creates an operator in this process, without Ray.
    """

    def __init__(self, config: Mapping[str, Any], settings: TorchSettings | None = None) -> None:
        super().__init__(config)
        self._train_state: TorchTrainState = TorchTrainState(settings or TorchSettings())
        self._update_features = OperatorFeatures(self._train_state)

    device: torch.device = forward_to("_train_state.settings.device", "This worker's device.")
    _start_averaging: Callable[..., None] = forward_to("_update_features.averaging.start")
    scheduler_step_freq: str | None = forward_to(
        "_train_state.scheduler_step_freq",
        'When schedulers step: "batch", "epoch", "manual", or None.',
    )

    @property
    def device_ids(self) -> list[int] | None:
        """List with the index of this worker's GPU, or None without a GPU."""
        return None if self.device.index is None else [self.device.index]

    @property
    def use_gpu(self) -> bool:
        """Whether it has a GPU."""
        return self.device.type == "cuda"

    @property
    def use_fp16_native(self) -> bool:
        """Whether ``torch.amp`` provides mixed precision."""
        return self._train_state.settings.options.use_fp16 is True

    @property
    def use_fp16_apex(self) -> bool:
        """Whether NVIDIA Apex provides mixed precision."""
        return self._train_state.settings.options.use_fp16 == "apex"

    # ---- methods to override

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Train ``self.model`` on one batch: forward, loss, backward, optimizer step.

        Args:
            batch: ``(*features, target)``, tensors on any device; or a dict or data class with the
                arguments of ``forward`` by name, and one other key, the target. The model's output
                may have ``logits`` for losses of PyTorch. Without a target or criterion, the output
                must have ``loss``.
            batch_info: ``batch_idx``, ``global_step``, ``epoch_idx``, ``info``, ``num_samples``
                (the samples that the loader joined, or None), and the keys of ``info``.

        Returns:
            ``train_loss``, the mean over the batch, and ``num_samples``. If raysgd or `num_items`
            counts items, ``train_loss`` is a `raysgd.metrics.Sums` weighted by them. Without
            ``num_samples`` of an own step, all batches have the same weight.
        """
        self._check_single()
        model = self._get_single("model", "train_batch")
        optimizer = self._get_single("optimizer", "train_batch")
        batch = self.to_device(batch)
        self._train_state.step_timing.begin(FORWARD)
        parsed = parse_batch(batch, model)
        with self.autocast():
            # Without a name, the output needs no memory in the backward pass.
            loss = loss_of(self, model(*parsed.arguments, **parsed.keywords), parsed)
        num_samples = self._count_samples(parsed, batch_info)
        count = self.count_items(batch, num_samples, parsed.target)
        self.backward(loss, count)  # by position: overrides may use the name num_samples
        self.optimizer_step(optimizer)
        return {"train_loss": self._mean_of(loss, count), NUM_SAMPLES: num_samples}

    def _mean_of(self, loss: torch.Tensor, count: LossCount) -> Any:
        """Return the metric of a loss, which is a mean over samples or counted items."""
        loss, items = loss.detach(), count.num_items
        loss = loss / (count.num_samples or 1) if count.is_sum else loss
        # A sum of tensors on an accelerator depends on their order.
        loss = loss.cpu() if self._train_state.exchange.sums_exactly else loss
        # The mean of no items may be NaN.
        total = loss * items if items else 0.0
        return loss if items is None else Sums(ratio, total=total, weight=items)

    def num_items(self, batch: Any) -> float | torch.Tensor | None:
        """Return the number of items over which the loss of a batch is a mean.

        Override this method if the items are not samples, but for example unmasked tokens::

            def num_items(self, batch):
                return (batch["labels"] != -100).sum()

        Gradients, ``train_loss``, and ``val_loss`` are then means over the items of all workers.
        `batch` is on this worker's device. Return a number or a tensor of one element. A batch of 0
        items is ignored, even if its loss is NaN. None, the default, counts samples. If
        ``self.criterion`` is a loss of PyTorch, raysgd counts what it weights, ignores, or sums.
        """
        return None

    def _check_first_batch(self, batch: Any) -> None:
        """Warn if a loss counts samples, although losses usually ignore some of the labels."""
        train_state = self._train_state
        is_weighted = train_state.accumulation_steps > 1 or self.world_size > 1
        has_own = hasattr(getattr(self, "criterion", None), "ignore_index")  # `count_of` warns
        counts_items = has_own or self._update_features.optimization.counts_items
        if is_weighted and not counts_items and has_masked_labels(batch):
            train_state.settings.warn_once(
                "masked",
                "Some labels are -100, which losses ignore, but raysgd weights each batch by its "
                "samples. If the loss is a mean over the other labels, override num_items(batch): "
                "return (batch['labels'] != -100).sum().",
            )

    def _count_samples(self, batch: ParsedBatch, batch_info: Mapping[str, Any] | None) -> int:
        drawn = (batch_info or {}).get(NUM_SAMPLES)
        count, is_clear = batch.count_samples(drawn)
        # Elsewhere, the number is the weight of the loss, too.
        if not is_clear and type(self).num_items is TrainingOperator.num_items:
            self._update_features.checks.warn_of_unclear_samples(batch, drawn, count)
        return count

    def count_items(
        self, batch: Any, num_samples: int, target: Any = None, default_items: int | None = None
    ) -> LossCount:
        """Return what the default `train_batch` passes to `backward` as ``num_items``.

        Args:
            batch: The batch, for `num_items`.
            num_samples: Number of its samples.
            target: The target, if ``self.criterion`` computes the loss.
            default_items: The count if an override of `num_items` returns None. None: the samples.
        """
        num_items = type(self).num_items
        # Whether workers communicate must not depend on the batch.
        if num_items is not TrainingOperator.num_items:
            items = num_items(self, batch)
            items = (default_items or num_samples) if items is None else items
            caller = f"{type(self).__name__}.num_items returned "
            return LossCount(as_count(items, caller, "count"), num_samples)
        criterion = None if target is None else getattr(self, "criterion", None)
        return count_of(criterion, target, num_samples, self._train_state)

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Evaluate one batch. Store ``output`` and ``target`` in `batch_info`.

        Returns:
            ``val_loss`` and ``num_samples``. ``val_accuracy``, the fraction of positions whose
            argmax along dimension 1 equals the target, without negative and ignored targets, if the
            output is (batch, classes, ...) and the target holds class indices of shape (batch, ...)
            or (batch, 1, ...).
        """
        model, batch = self._get_single("model", "validate_batch"), self.to_device(batch)
        parsed = parse_batch(batch, model)
        with self.timers.record("eval_fwd"), self.autocast():
            output = model(*parsed.arguments, **parsed.keywords)
            loss = loss_of(self, output, parsed)
        num_samples = self._count_samples(parsed, batch_info)
        count = self.count_items(batch, num_samples, parsed.target)
        metrics = {"val_loss": self._mean_of(loss, count), NUM_SAMPLES: num_samples}
        target = parsed.keywords.get("labels") if parsed.target is None else parsed.target
        batch_info |= {"output": output, "target": target}
        ignored = ignore_index_of(getattr(self, "criterion", None))
        if (accuracy := accuracy_of(logits_of(output), target, ignored)) is not None:
            metrics["val_accuracy"] = accuracy
        return metrics

    def predict_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        """Return the predictions for a batch, in eval mode without gradients.

        `batch` has a format of `train_batch`, or is a tensor or ``(tensor,)`` without a target.
        The default returns the output of the model, or its ``logits``. An override returns a
        tensor, array, or list with one row per sample, or a dict or tuple of such objects.
        """
        model, batch = self._get_single("model", "predict_batch"), self.to_device(batch)
        if isinstance(batch, torch.Tensor):
            batch = (batch,)
        is_feature = isinstance(batch, tuple | list) and len(batch) == 1
        parsed = ParsedBatch(tuple(batch), {}, None) if is_feature else parse_batch(batch, model)
        with self.autocast():
            return logits_of(model(*parsed.arguments, **parsed.keywords))

    def _begin_epoch(self, num_steps: int | None) -> None:
        call = self._train_state.call
        if not call.keeps_modes:
            self.train_mode(True)
        call.keeps_modes = False

    def _eval_mode(self) -> contextlib.AbstractContextManager[object]:
        self.train_mode(False)
        return torch.no_grad()

    # ---- registration, in setup

    @suggest_arguments
    def register(
        self,
        *,
        models: Any,
        optimizers: Any,
        criterion: Any = None,
        schedulers: Any = None,
        ddp_args: dict[str, Any] | None = None,
        apex_args: dict[str, Any] | None = None,
        gradient_accumulation_steps: int = 1,
        max_grad_norm: float | None = None,
        horovod_args: dict[str, Any] | None = None,
        sharding: str | None = None,
        sharding_args: dict[str, Any] | None = None,
    ) -> Any:
        """Register what is trained. Call it once, in `setup`.

        Models and criterion move to this worker's device. With several workers, each model is
        wrapped in DistributedDataParallel, unless the trainer has ``wrap_ddp=False``.

        Args:
            models: A module, or a list or tuple of modules.
            optimizers: An optimizer, or a list or tuple of optimizers.
            criterion: The loss, called with (output, target), or a list or tuple of losses. A loss
                whose parameters an optimizer trains counts as one of the last models.
            schedulers: A scheduler, or a list or tuple. Needs ``scheduler_step_freq``.
            ddp_args: More arguments of DistributedDataParallel.
            apex_args: Arguments of ``apex.amp.initialize``, for ``use_fp16="apex"``.
            gradient_accumulation_steps: Number of batches per update.
            max_grad_norm: Largest 2-norm of all gradients of an optimizer. None: no clipping.
            horovod_args: More arguments of ``hvd.DistributedOptimizer``, such as ``compression``.
            sharding: "optimizer" shards the optimizer's state over the workers. "full" also shards
                models and gradients, with ``fully_shard``.
            sharding_args: ``num_copies``: number of other workers that hold a copy of each shard
                (default: 1 with three or more workers, else 0). For "full" also ``wrap_classes``:
                the class or classes of modules to gather separately.

        Returns:
            (models, optimizers), then criterion and schedulers if you passed them. Each has the
            shape of its argument: a single object, a list, or a tuple.
        """
        arguments = {name: value for name, value in locals().items() if name != "self"}
        return register(self._train_state, self._update_features, **arguments)

    @suggest_arguments
    def register_data(
        self,
        *,
        train_loader: Iterable[Any] | None = None,
        validation_loader: Iterable[Any] | None = None,
    ) -> None:
        """Register the loaders, in `setup`. A later call replaces the loaders that you pass.

        raysgd partitions map-style DataLoaders and streams. If it cannot partition a
        loader, select a part by ``self.world_rank`` and ``self.world_size``. Then pass
        ``add_dist_sampler=False`` to the trainer, or give it an attribute ``num_replicas``.

        Args:
            train_loader: The training data.
            validation_loader: The validation data.
        """
        self._train_state.data.register(train_loader, validation_loader)

    @classmethod
    def from_ptl(
        cls,
        lightning_module_cls: type[Any],
        train_dataloader: Iterable[Any] | None = None,
        val_dataloader: Iterable[Any] | None = None,
        *,
        datamodule: Any = None,
    ) -> type[TrainingOperator]:
        """Return an operator class for a LightningModule, see the guide for users of Lightning.

        `setup` creates the module, with ``config=config`` if its constructor has this argument. The
        default for the loaders is the module's own ``train_dataloader`` and ``val_dataloader``.

        Args:
            lightning_module_cls: A subclass of LightningModule, of Lightning 2.
            train_dataloader: The training loader.
            val_dataloader: The validation loader.
            datamodule: A LightningDataModule, or its class.

        Raises:
            TypeError: If `lightning_module_cls` is not a class of Lightning 2. Creating a trainer
                raises it too, if the module overrides hooks that raysgd does not call.
        """
        from raysgd.torch.interop.lightning import lightning_operator

        loaders = {"train_loader": train_dataloader, "validation_loader": val_dataloader}
        return lightning_operator(cls, TrainingOperator, lightning_module_cls, loaders, datamodule)

    # ---- tools for custom loops

    def train_mode(self, training: bool) -> None:
        """Set every registered model to train or eval mode.

        In training, a model without trainable parameters keeps its mode from `register`.
        """
        for model in self._train_state.models:
            model.train(training)
        if training:
            self._train_state.frozen_parameters.restore_modes()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for mixed precision in the forward pass and the loss."""
        return self._train_state.precision.autocast()

    def backward(
        self,
        loss: torch.Tensor,
        num_items: float | torch.Tensor | LossCount | None = None,
        *,
        num_samples: float | torch.Tensor | LossCount | None = None,
    ) -> None:
        """Compute the gradients of `loss`. Gradients of several losses of one batch add up.

        Each batch is weighted by its samples, so that the update is the same as in one process with
        the global batch.

        Args:
            loss: A tensor of one element, the mean over the samples of the batch.
            num_items: Number of items, such as tokens, if `loss` is a mean over these items. A
                batch of 0 items is ignored. Pass `num_items` on all workers or on none. None
                counts samples, or the items of the previous loss of the batch. With accumulation
                or equal bits, all losses of a batch need the same number. The default
                ``train_batch`` passes a `LossCount`, which an override of this method passes on.
            num_samples: The former name of `num_items`.
        """
        if num_samples is not None:
            if num_items is not None:
                raise TypeError("backward(num_items=..., num_samples=...): pass only num_items.")
            num_items = num_samples
        timing, segment = self._train_state.step_timing, self._train_state.segment
        timing.begin(BACKWARD)
        self._update_features.optimization.backward(loss, num_items, segment)
        timing.begin(OTHER)

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Unscale and clip the gradients of a registered optimizer, update, and zero the gradients.

        If float16 overflows, all workers skip the update. With gradient accumulation, call this
        method for every batch. Only the last batch of a group makes an update. Return whether
        this batch was the last of its group.
        """
        timing = self._train_state.step_timing
        timing.begin(OPTIMIZER)
        is_last = self._update_features.optimization.step(optimizer)
        timing.begin(OTHER)
        return is_last

    def unwrapped(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return a registered model without DistributedDataParallel and ``torch.compile``.

        To train, call the registered model. Its gradients are averaged during the backward pass.
        """
        return user_module(model)

    def step_schedulers(self) -> None:
        """Step every scheduler.

        Between the micro-batches of one batch, this does nothing.
        """
        self._update_features.lr_scheduling.step(self._train_state.update)

    def to_device(self, batch: Any) -> Any:
        """Return `batch` with tensors, and objects that have ``to``, on this worker's device."""
        if self.device.type == "cpu":
            return batch
        with self._train_state.step_timing.within(COPY):
            return move_to_device(batch, self.device)

    def _seed_worker(self) -> None:
        """Seed this worker after `setup`. The ready-made operators override this method."""

    # ---- older scripts

    @classmethod
    def from_creators(
        cls,
        model_creator: Callable[..., Any],
        optimizer_creator: Callable[..., Any],
        data_creator: Callable[..., Any] | None = None,
        loss_creator: Callable[..., Any] | type | None = None,
        scheduler_creator: Callable[..., Any] | None = None,
        serialize_data_creation: bool = True,
    ) -> type[Any]:
        """Return an operator class made of creator functions, see :class:`CreatorOperator`."""
        creators = {k: value for k, value in locals().items() if k.endswith("_creator")}
        is_known = cls in (TrainingOperator, CreatorOperator)
        bases = (CreatorOperator,) if is_known else (cls, CreatorOperator)
        required = ("model_creator", "optimizer_creator")
        return creator_class("from_creators", bases, creators, required, serialize_data_creation)


class CreatorOperator(TorchCreators, TrainingOperator):
    """An operator that creator functions define, see ``TrainingOperator.from_creators``."""
