"""The class that users subclass: what is trained, and how one epoch and one batch of it go.

A worker runs, for each ``trainer.train()``::

    operator.train_epoch(iterator, info, num_steps, epoch_idx)
        for batch in iterator:                  # this worker's share of the train loader
            operator.train_batch(batch, batch_info)
                forward and loss, under self.autocast()
                self.backward(loss)                 # gradients of the mean over all workers' items
                self.optimizer_step(optimizer)      # with accumulation at the last of a group
            schedulers step, if scheduler_step_freq == "batch" and an update was made
        schedulers step, if scheduler_step_freq == "epoch" and the epoch is over

and for each ``trainer.validate()`` ``operator.validate`` with ``operator.validate_batch``.
Override any of these, or none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from raysgd._internal.arguments import suggests
from raysgd.loop.operator_base import OperatorBase, checked_metrics, with_logged
from raysgd.metrics import NUM_SAMPLES
from raysgd.torch.batches import (
    Batch,
    explaining,
    loss_of,
    mean_of,
    note_batch,
    read_batch,
    scores_in,
    shapes_of,
)
from raysgd.torch.constants import NUM_STEPS, SCHEDULER_STEP, USE_FP16
from raysgd.torch.ddp import plain
from raysgd.torch.interop.creators import CreatorMethods, creator_operator
from raysgd.torch.optimization import as_count
from raysgd.torch.registration import register
from raysgd.torch.to_device import move_to_device
from raysgd.torch.train_state import OperatorSettings, TorchTrainState

__all__ = ["CreatorOperator", "TrainingOperator"]

_INFO_KEYS = (NUM_STEPS, USE_FP16, SCHEDULER_STEP)


class _NotGiven:
    def __repr__(self) -> str:
        return "not given"


_NOT_GIVEN = _NotGiven()
"""Stands for an argument that was left out, where None is a value."""


class TrainingOperator(OperatorBase):
    """Defines training for :class:`raysgd.TorchTrainer`; one copy lives on each worker.

    Only `setup` must be overridden::

        class Classifier(TrainingOperator):
            def setup(self, config):
                model = torch.nn.Linear(64, 10)
                optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
                self.model, self.optimizer, self.criterion = self.register(
                    models=model, optimizers=optimizer, criterion=torch.nn.CrossEntropyLoss())
                self.register_data(train_loader=..., validation_loader=...)

    An operator is a plain Python object. ``raysgd.testing.run_operator`` makes one in this
    process, without Ray.
    """

    def __init__(self, config: Mapping[str, Any], settings: OperatorSettings | None = None) -> None:
        super().__init__(config)
        self._train_state: TorchTrainState = TorchTrainState(settings or OperatorSettings())
        # why the last batch had no accuracy; None once that was said
        self._no_accuracy: str | None = ""

    # ---- what users override

    def setup(self, config: dict[str, Any]) -> None:
        """Build models, optimizers and loaders, and register them. Must be overridden.

        Args:
            config: the trainer's config; ``config[BATCH_SIZE]`` is this worker's share.
        """
        raise NotImplementedError(f"{type(self).__name__} must override setup(self, config).")

    def train_epoch(
        self,
        iterator: Iterator[Any],
        info: dict[str, Any] | None = None,
        num_steps: int | None = None,
        epoch_idx: int = 0,
    ) -> dict[str, Any]:
        """Train on every batch of `iterator` and return the metrics.

        Override it for a loop of your own; an override with the older signature
        ``(self, iterator, info)`` works as well. It then also steps its own schedulers.

        Args:
            iterator: this worker's batches. It ends after `num_steps` batches.
            info: what the caller of ``trainer.train(info=...)`` gave, and what older loops look up
                in it: ``num_steps``, ``use_fp16`` and ``scheduler_step_freq``, by the names of
                ``raysgd.torch.constants``.
            num_steps: number of batches that were asked for; None for a whole epoch.
            epoch_idx: epochs that were completed before this one.

        Returns:
            Metrics by name. Numbers are averaged over the workers, weighted by ``num_samples``.
        """
        self.train_mode(True)
        # an override that calls this may not know it
        epoch_idx = epoch_idx or self._train_state.epoch
        given = {name: value for name, value in (info or {}).items() if name not in _INFO_KEYS}
        train_state, meters = self._train_state, self._new_meters()
        per_batch = self.scheduler_step_freq == "batch"
        for batch in self._in_parts(iterator):
            batch_info = self._batch_info(info, meters.num_batches, epoch_idx)
            batch_info["info"] = given
            try:
                with self._collecting_logged() as logged:
                    metrics = self.train_batch(batch, batch_info)
                self._measure(meters, with_logged(logged, metrics))
            except BaseException as error:
                if per_batch and train_state.step.is_updated:
                    self.step_schedulers()  # the step counts as done
                note_batch(self, error, "train_batch", batch)
                raise
            if per_batch and train_state.step.place.is_last:
                self.step_schedulers()
        if self.scheduler_step_freq == "epoch" and self._epoch_is_over():
            self.step_schedulers()
        return meters.summary()

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Train on one batch: forward, loss, backward, optimizer step.

        An override gets mixed precision, gradient accumulation and clipping by the same calls::

            with self.autocast():
                loss = ...
            self.backward(loss)
            self.optimizer_step(self.optimizer)

        Args:
            batch: ``(*features, target)``, tensors on any device; or a dict or data class with the
                arguments of ``forward`` by name, and one more, the target. With a loss of torch's
                the output may have ``logits``. Without a target, or a criterion, it has ``loss``.
            batch_info: ``batch_idx``, ``global_step``, ``epoch_idx``, ``info``, and what is in it.

        Returns:
            ``train_loss``, the mean over the batch, and ``num_samples``. If `num_items` is
            overridden, ``train_loss`` is a `raysgd.metrics.Sums` that weighs it by the items.

        Raises:
            TypeError: if the batch is of another kind.
            RuntimeError: if ``self.model``, ``self.optimizer`` or ``self.criterion`` is missing;
                operators with several models or optimizers need a ``train_batch`` of their own.
        """
        self._check_single()
        model, optimizer = self._default("model"), self._default("optimizer")
        timers = self.timers
        batch = self.to_device(batch)
        given = read_batch(batch, model)
        with timers.record("fwd"), self.autocast():
            output = model(*given.arguments, **given.keywords)
            loss = loss_of(self, output, given)
        with timers.record("grad"):
            num_items = self._count_items(batch, given.num_samples)
            self.backward(loss, num_samples=num_items)
        with timers.record("apply"):
            self.optimizer_step(optimizer)
        return {"train_loss": mean_of(loss, num_items), NUM_SAMPLES: given.num_samples}

    def num_items(self, batch: Any) -> float | torch.Tensor | None:
        """Return how many items the loss of a batch is a mean over.

        Override it if these are not samples, but tokens that are not masked, say::

            def num_items(self, batch):
                return (batch["labels"] != -100).sum()

        The update is then the gradient of the mean over the items of all batches and workers, and
        ``train_loss`` and ``val_loss`` are means over these. The workers add up their counts
        once for each update.

        Args:
            batch: what `train_batch` or `validate_batch` is given, on this worker's device.

        Returns:
            A number, or a tensor of one element; a batch of 0 items counts for nothing, also if
            its loss is NaN. None, the default, counts samples.
        """
        return None

    def _count_items(self, batch: Any, num_samples: int) -> float | None:
        self._train_state.optimization.group.samples = num_samples
        count = type(self).num_items  # an attribute of that name may be something else
        # whether workers communicate must not depend on the batch
        if count is TrainingOperator.num_items:
            return None
        found = count(self, batch)
        source = f"{type(self).__name__}.num_items returned {{}}"
        return float(num_samples) if found is None else as_count(found, source)

    def validate(
        self, val_iterator: Iterator[Any], info: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Evaluate on every batch of `val_iterator`, in eval mode without gradients.

        The numbers of batches may differ between workers: nothing here may communicate.
        """
        self.train_mode(False)
        meters = self._new_meters()
        with torch.no_grad():
            for batch_idx, batch in enumerate(val_iterator):
                batch_info = self._batch_info(info, batch_idx, self._train_state.epoch)
                with (
                    explaining(self, "validate_batch", batch),
                    self._collecting_logged() as logged,
                ):
                    metrics = self.validate_batch(batch, batch_info)
                metrics = with_logged(logged, metrics)
                meters.update(*checked_metrics(self.validate_batch, metrics))
        result = meters.summary()
        if self._no_accuracy:
            result["no_val_accuracy"], self._no_accuracy = self._no_accuracy, None
        return result

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Evaluate one batch, of a kind that `train_batch` takes.

        The model's output is in ``batch_info["output"]`` afterwards, for an override that adds
        metrics to those of ``super().validate_batch(batch, batch_info)``.

        Returns:
            ``val_loss``, ``num_samples``, and ``val_accuracy`` if the output is
            (batch, classes, ...) and the target holds class indices, integers of shape (batch, ...)
            or (batch, 1, ...): the share of positions at which the index of the largest entry along
            dimension 1 equals the target. If the target is not floating-point and does
            not fit, the first result of `validate` has the reason as ``no_val_accuracy``.
        """
        model, batch = self._default("model"), self.to_device(batch)
        given = read_batch(batch, model)
        with self.timers.record("eval_fwd"), self.autocast():
            output = model(*given.arguments, **given.keywords)
            loss = loss_of(self, output, given)
        batch_info["output"] = output
        num_items = self._count_items(batch, given.num_samples)
        metrics = {"val_loss": mean_of(loss, num_items), NUM_SAMPLES: given.num_samples}
        output = scores_in(output)
        target = given.keywords.get("labels") if given.target is None else given.target
        accuracy = _accuracy(output, target)
        if accuracy is not None:
            metrics["val_accuracy"] = accuracy
        elif self._no_accuracy is not None and not _is_floating(target):
            self._no_accuracy = (
                "val_accuracy compares an output (batch, classes, ...) with a target (batch, ...) "
                f"of class indices, but these are {shapes_of(output)} and {shapes_of(target)}. "
                "Return a metric of your own from validate_batch."
            )
        return metrics

    def predict_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        """Return what ``trainer.predict`` returns of a batch, in eval mode without gradients.

        Args:
            batch: of a kind that `train_batch` takes, of which the default leaves the target out,
                or features alone: a tensor or ``(feature,)``.
            batch_info: as in `validate_batch`.

        Returns:
            The model's output, or the ``logits`` in it. It has a row for each sample: a tensor, an
            array or a list, or a dict or tuple of them.
        """
        model, batch = self._default("model"), self.to_device(batch)
        if isinstance(batch, torch.Tensor):
            batch = (batch,)
        is_feature = isinstance(batch, tuple | list) and len(batch) == 1
        given = Batch(tuple(batch), {}, None) if is_feature else read_batch(batch, model)
        with self.autocast():
            return scores_in(model(*given.arguments, **given.keywords))

    @torch.no_grad()
    def _predictions(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Yield what `predict_batch` returns for each batch."""
        self.train_mode(False)
        for batch_idx, batch in enumerate(iterator):
            info = self._batch_info(None, batch_idx, self._train_state.epoch)
            with explaining(self, "predict_batch", batch):
                output = self._train_state.to_cpu(self.predict_batch(batch, info))
            yield output

    def state_dict(self) -> dict[str, Any]:
        """Return state of your own that is saved with the models and given to new workers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned.

        If it raises, the trainer refuses the state that is being loaded as a whole, and this is
        called once more, with what `state_dict` returned before.
        """

    # ---- what users call in setup

    @suggests
    def register(
        self,
        *,
        models: Any,
        optimizers: Any,
        criterion: Any = _NOT_GIVEN,
        schedulers: Any = _NOT_GIVEN,
        ddp_args: dict[str, Any] | None = None,
        apex_args: dict[str, Any] | None = None,
        gradient_accumulation_steps: int = 1,
        max_grad_norm: float | None = None,
        horovod_args: dict[str, Any] | None = None,
        compile: bool | dict[str, Any] = False,
        sharding: str | None = None,
        sharding_args: dict[str, Any] | None = None,
    ) -> Any:
        """Hand over what is trained; call it once, in `setup`.

        Models and criterion go to this worker's device; with several workers each model is
        wrapped in DistributedDataParallel (unless the trainer has ``wrap_ddp=False``).

        Args:
            models: a module, or a list or tuple of modules.
            optimizers: an optimizer, or a list or tuple of optimizers.
            criterion: the loss, called with (output, target), or a list or tuple of such. One with
                parameters that an optimizer trains is a model as well: its gradients are averaged,
                and its state is the last of the models'.
            schedulers: a scheduler, or a list or tuple; needs ``scheduler_step_freq``.
            ddp_args: further arguments of DistributedDataParallel.
            apex_args: arguments of ``apex.amp.initialize``, for ``use_fp16="apex"``; otherwise
                nothing, with a warning.
            gradient_accumulation_steps: batches of this worker that make one update together, as
                one batch of so many times the size would. Workers exchange gradients once for it.
            max_grad_norm: the largest 2-norm of the gradients of an optimizer, taken together, to
                which they are clipped before each step; None for no clipping.
            horovod_args: further arguments of ``hvd.DistributedOptimizer``, such as
                ``compression``, for ``backend="horovod"``.
            compile: True to compile each model by ``torch.compile``, in its place and inside of
                DistributedDataParallel; or a dict of its arguments, and ``"regional": True`` to
                compile blocks that a model has several of, one by one.
            sharding: "optimizer" divides the work and the state of the optimizers over the workers,
                "full" also models and gradients, by ``fully_shard``; see the guide on sharding.
                None, the default, lets each worker have all of it.
            sharding_args: of it, ``copies``: how many other workers hold the state of each
                worker's share, so that none is lost with it. Default: 1 where there are three
                workers or more, else 0. Of "full" also ``wrap`` (module classes or a predicate;
                default: blocks that a model has several of), ``reshard_after_forward``, and
                ``init_fn``, which fills what a module has itself, of a model on the meta device.

        Returns:
            (models, optimizers) and then criterion and schedulers where they were given, be it as
            None, each in the shape that it was given in: a single one, a list or a tuple.

        Raises:
            TypeError: if a model is not a torch.nn.Module, an optimizer or a scheduler not what its
                name says, ddp_args or apex_args not a dict, compile neither a bool nor a dict, or
                a number not a number.
            ValueError: if there are schedulers but the trainer has no ``scheduler_step_freq``,
                fewer than 1 accumulation step, a norm that is not above 0 and finite, no such
                argument of ``torch.compile``, or sharding with what it does not work with.
        """
        returned = register(
            self._train_state,
            models,
            optimizers,
            None if criterion is _NOT_GIVEN else criterion,
            None if schedulers is _NOT_GIVEN else schedulers,
            ddp_args,
            apex_args,
            gradient_accumulation_steps,
            max_grad_norm,
            horovod_args,
            compile,
            sharding,
            sharding_args,
        )
        if criterion is None:
            returned = (*returned[:2], None, *returned[2:])
        return (*returned, None) if schedulers is None else returned

    @suggests
    def register_data(
        self,
        *,
        train_loader: Iterable[Any] | None = None,
        validation_loader: Iterable[Any] | None = None,
    ) -> None:
        """Hand over the loaders, in `setup`; a later call replaces those that it is given.

        A map-style DataLoader is shared out over the workers, with all of its settings kept:
        training in the loader's own order (shuffled anew each epoch if it shuffles), validation
        in its order and without counting a sample twice. PyTorch's DistributedSampler follows the
        group, and streams of Hugging Face are split by node. Every worker reads all of any other
        loader, which a warning says: let it select a part by ``self.world_rank`` and
        ``self.world_size``, and pass ``add_dist_sampler=False`` to the trainer or give the loader
        an attribute ``num_replicas``. ``trainer.describe_data()`` says how each is divided.

        Args:
            train_loader: what to train on.
            validation_loader: what to evaluate on; or several by name, ``{"seen": ..., "unseen":
                ...}``, whose metrics are ``val/seen_loss``, ``val/unseen_loss`` and the like.
                ``trainer.validate(num_steps=...)`` begins with the start of each of several.

        Raises:
            TypeError: if one is not iterable, or a DataLoader over a generator.
        """
        self._train_state.data.register(train_loader, validation_loader)

    @classmethod
    def from_creators(
        cls,
        model_creator: Callable[..., Any],
        optimizer_creator: Callable[..., Any],
        data_creator: Callable[..., Any] | None = None,
        loss_creator: Callable[..., Any] | type | None = None,
        scheduler_creator: Callable[..., Any] | None = None,
        serialize_data_creation: bool = True,
    ) -> type[CreatorOperator]:
        """Make an operator class from creator functions, see :class:`CreatorOperator`."""
        creators = {
            "model_creator": model_creator,
            "optimizer_creator": optimizer_creator,
            "data_creator": data_creator,
            "loss_creator": loss_creator,
            "scheduler_creator": scheduler_creator,
        }
        return creator_operator(cls, CreatorOperator, creators, serialize_data_creation)

    @classmethod
    def from_ptl(
        cls,
        lightning_module_cls: type[Any],
        train_dataloader: Iterable[Any] | None = None,
        val_dataloader: Iterable[Any] | None = None,
        *,
        data_creator: Callable[..., Any] | None = None,
        datamodule: Any = None,
    ) -> type[TrainingOperator]:
        """Make an operator class from a LightningModule, see the guide for users of Lightning.

        It is made in `setup`, as ``lightning_module_cls(config=config)`` where its ``__init__``
        has such a parameter. Its own ``train_dataloader`` and ``val_dataloader`` give the data,
        unless one of these does:

        Args:
            lightning_module_cls: a subclass of LightningModule, of Lightning 2.
            train_dataloader: the loader to train on.
            val_dataloader: the loader to validate on.
            data_creator: function of the config that returns the two loaders, or the first.
            datamodule: a LightningDataModule, or its class.

        Raises:
            TypeError: if it is no class of Lightning 2; and, when a trainer is made, if it has
                hooks that raysgd does not call, each by its name.
        """
        from raysgd.torch.interop.lightning import lightning_operator

        loaders = {"train_loader": train_dataloader, "validation_loader": val_dataloader}
        return lightning_operator(
            cls, TrainingOperator, lightning_module_cls, loaders, data_creator, datamodule
        )

    # ---- what loops of your own use

    def train_mode(self, training: bool) -> None:
        """Put every registered model into train or eval mode.

        A model without trainable parameters keeps the mode that it had at `register` in training.
        """
        self._train_state.set_mode(training)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for forward pass and loss, in which they run in mixed precision.

        It does nothing where the trainer has ``use_fp16=False``. Leave it before `backward`.
        """
        return self._train_state.optimization.precision.autocast()

    def backward(self, loss: torch.Tensor, num_samples: float | torch.Tensor | None = None) -> None:
        """Compute the gradients of `loss`, scaled and weighted as precision and accumulation ask.

        Several losses of one batch may be given one after the other; their gradients add up. Each
        batch is weighted by its samples, within an accumulation group and over the workers, so
        that the update is that of one process with the global batch.

        Args:
            loss: a tensor of one element, the mean over the samples of the batch.
            num_samples: the number of items to weigh by, if `loss` is a mean over something else
                than samples, such as tokens; a batch of 0 counts for nothing. The workers add up
                these numbers once for each update, so give it on all of them or on none. None: as
                many samples as the loader has given, or the same for all batches of a loader that
                raysgd does not share out.

        Raises:
            TypeError: if `num_samples` is neither a number nor a tensor of one element.
            ValueError: if it is below 0 or infinite, or, with gradient accumulation, not that of
                another loss of the batch.
        """
        self._train_state.optimization.backward(loss, num_samples)

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Update with the gradients that `backward` computed, and zero them.

        They are unscaled, clipped if ``max_grad_norm`` was registered, and used; an overflow of
        float16 makes all workers skip the update alike. With gradient accumulation it does
        nothing until the last batch of a group. Call it for every batch; ``zero_grad`` is not
        needed, and does nothing to the gradients of batches before.

        Args:
            optimizer: a registered optimizer.

        Returns:
            Whether this was the end of a group, so that the update is made: what follows an
            update, such as a running average of the model, belongs behind that.

        Raises:
            TypeError: if the optimizer needs a closure.
            RuntimeError: if, with gradient accumulation, it is stepped twice in a batch, or the
                last batch of a group had no `backward`.
        """
        return self._train_state.optimization.step(optimizer)

    def unwrapped(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the module as you made it, with one worker as with several.

        With several a registered model is in DistributedDataParallel, and has the attributes and
        methods of the module all the same. Train by calling the registered model: workers average
        gradients that follow from its forward pass, and refuse a step with others.

        Args:
            model: a registered model, also one that ``torch.compile`` made.
        """
        return plain(model)

    def step_schedulers(self) -> None:
        """Step every registered scheduler; between the parts of one batch it does nothing.

        One that the trainer's `monitor` steps is left out.
        """
        self._train_state.schedules.step()

    def to_device(self, batch: Any) -> Any:
        """Return `batch` with its tensors, also nested ones, on this worker's device.

        Objects that are no containers, and have a method ``to(device)``, are asked for themselves.
        """
        return move_to_device(batch, self.device) if self.device.type != "cpu" else batch

    # ---- what users read

    @property
    def device(self) -> torch.device:
        """This worker's device."""
        return self._train_state.settings.device

    @property
    def device_ids(self) -> list[int] | None:
        """Index of this worker's GPU, in a list, as DistributedDataParallel takes it."""
        return None if self.device.index is None else [self.device.index]

    @property
    def use_gpu(self) -> bool:
        """Whether this worker has a GPU."""
        return self.device.type == "cuda"

    @property
    def use_fp16_native(self) -> bool:
        """Whether mixed precision is that of ``torch.amp``."""
        return self._train_state.settings.options.use_fp16 is True

    @property
    def use_fp16_apex(self) -> bool:
        """Whether mixed precision is that of NVIDIA Apex."""
        return self._train_state.settings.options.use_fp16 == "apex"

    @property
    def scheduler_step_freq(self) -> str | None:
        """When schedulers step: "batch", "epoch", "manual", or None."""
        return self._train_state.settings.options.scheduler_step_freq

    def __getattr__(self, name: str) -> Any:
        if name in ("_amp", "_amp_scaler"):  # what older loops scale their losses with
            raise AttributeError(
                f"{type(self).__name__} has no {name}. Write `with self.autocast():` round the "
                "forward pass and the loss, self.backward(loss) for scaling and the backward pass, "
                "and self.optimizer_step(optimizer) for the step and the scale's update."
            )
        return super().__getattr__(name)

    def _info_of_epoch(self, info: dict[str, Any], num_steps: int | None) -> dict[str, Any]:
        given = (num_steps, self.use_fp16, self.scheduler_step_freq)
        return {**info, **dict(zip(_INFO_KEYS, given, strict=True))}

    def _seed_worker(self) -> None:
        """Called after `setup`; the ready-made operators seed this worker in it."""


class CreatorOperator(CreatorMethods, TrainingOperator):
    """An operator whose parts come from functions of the config.

    ``TrainingOperator.from_creators`` makes a subclass of it with the functions filled in; a
    subclass may override ``train_batch`` and the like.
    """


def _is_floating(target: Any) -> bool:
    return isinstance(target, torch.Tensor) and target.is_floating_point()


def _accuracy(output: Any, target: Any) -> torch.Tensor | None:
    """Return the share of positions where the largest entry along dimension 1 is the target.

    None where that cannot be computed.
    """
    if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)):
        return None
    if output.dim() < 2 or output.shape[1] < 2:
        return None
    if target.is_floating_point() or target.is_complex():  # no class indices
        return None
    batch, _, *rest = output.shape
    if list(target.shape) not in ([batch, *rest], [batch, 1, *rest]):
        return None
    if output.is_complex() or output.dtype is torch.bool:  # these have no largest entry
        return None
    return (output.argmax(dim=1).reshape(target.shape) == target).double().mean()
