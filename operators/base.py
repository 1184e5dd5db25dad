"""The bases of the ready-made operators: options, optimizer, loaders, and steps."""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from raysgd._internal.arguments import closest_name
from raysgd._internal.config import BATCH_SIZE
from raysgd.metrics import NUM_SAMPLES, Sums, ratio
from raysgd.torch import TrainingOperator
from raysgd.torch.precision import to_full_precision

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluate a model without gradients, and restore the modes of its modules."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, is_training in modes:
            module.training = is_training


class ConfiguredOperator(TrainingOperator):
    """Sets itself up from a config. Subclasses can override each part.

    ===============================  ==========  ================================================
    key                              default     meaning
    ===============================  ==========  ================================================
    ``lr``                           0.001       learning rate
    ``optimizer``                    "adamw"     "adam", "adamw" or "sgd"; or a function of
                                                 (parameters, config) that returns one
    ``weight_decay``                 0.0         weight decay of the optimizer
    ``momentum``                     0.9         momentum of "sgd"
    ``scheduler``                    None        function of (optimizer, config) that returns a
                                                 scheduler. It requires a
                                                 ``scheduler_step_freq`` of the trainer
    ``gradient_accumulation_steps``  1           number of batches per update
    ``max_grad_norm``                None        2-norm to which gradients are clipped
    ``train_data``                   None        a Dataset, a tensor or a tuple of tensors, an
                                                 iterable of batches, or a function of the
                                                 config that returns one of them
    ``validation_data``              None        the same as ``train_data``, for validation
    ``batch_size``                   32          samples per step and worker; for the samples of
                                                 all workers, set ``config[BATCH_SIZE]``
    ``num_loader_workers``           0           processes per worker that load data
    ``seed``                         None        seed of PyTorch, set in `setup`. Training draws
                                                 different numbers on each worker
    ===============================  ==========  ================================================

    Datasets and tensors get a DataLoader, which shuffles the training data. Iterables are used as
    they are. Other keys are for your own functions. A key that resembles an option causes a
    warning.
    """

    OPTIONS: ClassVar[Mapping[str, Any]] = {
        "lr": 1e-3,
        "optimizer": "adamw",
        "weight_decay": 0.0,
        "momentum": 0.9,
        "scheduler": None,
        "gradient_accumulation_steps": 1,
        "max_grad_norm": None,
        "train_data": None,
        "validation_data": None,
        "batch_size": 32,
        "num_loader_workers": 0,
        "seed": None,
    }
    """Keys of the config, with defaults. Subclasses can add keys."""

    options: dict[str, Any]
    """Value of each option, available from `setup` on."""

    def setup(self, config: dict[str, Any]) -> None:
        values = {key: config.get(key, default) for key, default in self.OPTIONS.items()}
        # Hyperparameter searches draw NumPy numbers.
        self.options = {k: v.item() if isinstance(v, np.generic) else v for k, v in values.items()}
        if self.world_rank == 0:
            self._warn_of_misspelled(config)
        if BATCH_SIZE in config and "batch_size" in config:
            raise ValueError(
                f"{type(self).__name__}: config has both 'batch_size'={config['batch_size']} (of "
                "each worker) and BATCH_SIZE (of all workers). Remove one of them."
            )
        if self.options["seed"] is not None:
            torch.manual_seed(self.options["seed"])
        # Register data first, because schedulers can ask for the steps of an epoch.
        self.register_data(
            train_loader=self.make_loader(self.build_train_data(config), shuffle=True),
            validation_loader=self.make_loader(self.build_validation_data(config), shuffle=False),
        )
        self.setup_models(config)

    def _warn_of_misspelled(self, config: dict[str, Any]) -> None:
        missing = self.OPTIONS.keys() - config.keys()
        for key in config.keys() - self.OPTIONS.keys() - {BATCH_SIZE}:
            close = closest_name(key, missing, cutoff=0.85) if isinstance(key, str) else ""
            if close:
                kind = type(self).__name__
                logger.warning("%s has no option %r. Did you mean %r?", kind, key, close)

    def _seed_worker(self) -> None:
        # All workers have drawn the same numbers for models and data. From now on, dropout and
        # noise must differ between workers.
        if self.options["seed"] is not None and self.world_rank > 0:
            torch.manual_seed((self.options["seed"] + self.world_rank * 65_537) % 2**63)

    # ---- methods to override

    def setup_models(self, config: dict[str, Any]) -> None:
        """Build models and optimizers, and register them with ``**self.register_options``."""
        raise NotImplementedError(f"{type(self).__name__} must override setup_models.")

    def build_optimizer(
        self, parameters: Iterable[torch.nn.Parameter], config: dict[str, Any]
    ) -> torch.optim.Optimizer:
        """Return the optimizer of `parameters`."""
        kind, lr, decay = (self.options[key] for key in ("optimizer", "lr", "weight_decay"))
        if callable(kind):
            made: torch.optim.Optimizer = kind(parameters, config)
            return made
        if kind == "sgd":
            momentum = self.options["momentum"]
            return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=decay)
        if kind not in ("adam", "adamw"):
            raise ValueError(
                f"{type(self).__name__}: config['optimizer']={kind!r} must be 'adam', 'adamw', "
                "'sgd', or a function of (parameters, config)."
            )
        cls = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
        return cls(parameters, lr=lr, weight_decay=decay)

    def build_scheduler(self, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
        """Return the scheduler of `optimizer`, or None. ``self.steps_per_epoch`` is known."""
        make = self.options["scheduler"]
        return None if make is None else make(optimizer, config)

    def build_train_data(self, config: dict[str, Any]) -> Any:
        """Return the training data, in one of the forms of ``train_data``."""
        data = self.options["train_data"]
        return data(config) if callable(data) else data

    def build_validation_data(self, config: dict[str, Any]) -> Any:
        """Return the validation data, in one of the forms of ``validation_data``."""
        data = self.options["validation_data"]
        return data(config) if callable(data) else data

    def update_metrics(self, output: torch.Tensor, target: torch.Tensor) -> None:
        """Update metrics with a validation batch. See :class:`raysgd.operators.WithMetrics`."""

    # ---- methods for subclasses

    @property
    def register_options(self) -> dict[str, Any]:
        """Arguments of `register` from the config."""
        return {key: self.options[key] for key in ("gradient_accumulation_steps", "max_grad_norm")}

    def build_module(self, key: str, config: dict[str, Any]) -> torch.nn.Module:
        """Return the module ``config[key]``, or the result of the function ``config[key]``."""
        module = self.options[key]
        if callable(module) and not isinstance(module, torch.nn.Module):
            module = module(config)
        if not isinstance(module, torch.nn.Module):
            kind = type(self).__name__
            raise ValueError(
                f"{kind}: config[{key!r}] must be a torch.nn.Module or a function of the config "
                f"that returns one, but got {module!r}. Or override build_{key} in {kind}."
            )
        return module

    def make_loader(self, data: Any, *, shuffle: bool) -> Any:
        """Return a loader of a Dataset or tensors. Return other data unchanged."""
        if isinstance(data, torch.Tensor | np.ndarray):
            data = (data,)
        if isinstance(data, tuple):
            data = TensorDataset(*map(torch.as_tensor, data))
        if not isinstance(data, Dataset):
            return data
        num_workers = self.options["num_loader_workers"]
        return DataLoader(
            data,
            batch_size=self.config.get(BATCH_SIZE, self.options["batch_size"]),
            shuffle=shuffle and not isinstance(data, IterableDataset),
            num_workers=num_workers,
            pin_memory=self.use_gpu and num_workers > 0,
        )


class SupervisedOperator(ConfiguredOperator):
    """Trains one model to predict a target.

    ==============================  ==========  ================================================
    key                             default     meaning
    ==============================  ==========  ================================================
    ``model``                       None        a torch.nn.Module, or a function of the config
                                                that returns one; not needed if a subclass
                                                overrides `build_model`
    ==============================  ==========  ================================================

    It also has the keys of :class:`ConfiguredOperator`. Batches are ``(*features, target)``.

    A loss is the sum over all terms (samples, pixels, tokens) divided by their number, over all
    batches and workers. The result is exact even if batches have different numbers of terms. If
    some terms do not count, override `num_items`, so that gradients use the same mean.
    """

    OPTIONS: ClassVar[Mapping[str, Any]] = {**ConfiguredOperator.OPTIONS, "model": None}

    # ---- methods to override

    def build_model(self, config: dict[str, Any]) -> torch.nn.Module:
        return self.build_module("model", config)

    def run_model(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the model's output for a batch on this worker's device, and the target.

        In `trainer.predict`, the target can be missing, and is None. If you override `run_model` to
        read other batches, also override `num_items` if necessary.
        """
        features, target = split_target(batch)
        return self.model(*features), target

    def compute_losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss of each term (batch, ...), and 0 for terms to ignore."""
        raise NotImplementedError(f"{type(self).__name__} must override compute_losses.")

    def compute_validation_losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss of each term in validation. The default is the loss of training."""
        return self.compute_losses(output, target)

    def compute_metrics(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
        """Return further metrics of a validation batch by name, without the prefix ``val_``.

        Each metric is a mean over the samples, or a :class:`raysgd.metrics.MergeableMetric`.
        """
        return {}

    def compute_loss_metrics(
        self, total: torch.Tensor, count: float | torch.Tensor
    ) -> dict[str, Any]:
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
        with self.autocast():
            output, target = self.run_model(batch)
            losses = self.compute_losses(to_full_precision(output), target)
            counted = self.count_items(batch, len(target), default_items=losses.numel())
            if counted.num_items is None and losses.dim() > 1:  # on all workers
                counted = counted._replace(num_items=float(losses.numel()))
            total = losses.sum()
            count = losses.numel() if counted.num_items is None else counted.num_items
        self.backward(total / (count or 1), counted)
        self.optimizer_step(self.optimizer)
        metrics = self.compute_loss_metrics(total.detach(), count)
        return {NUM_SAMPLES: len(target), **{f"train_{k}": v for k, v in metrics.items()}}

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        batch = self.to_device(batch)
        with self.timers.record("eval_fwd"), self.autocast():
            output, target = self.run_model(batch)
            output = to_full_precision(output)
            losses = self.compute_validation_losses(output, target)
        num_items = self.num_items(batch)
        count = losses.numel() if num_items is None else num_items
        batch_info["output"] = output
        self.update_metrics(output, target)
        metrics = self.compute_loss_metrics(losses.sum(), count)
        metrics = {**metrics, **self.compute_metrics(output, target)}
        return {NUM_SAMPLES: len(target), **{f"val_{k}": v for k, v in metrics.items()}}

    def predict_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        with self.autocast():
            return to_full_precision(self.run_model(self.to_device(batch))[0])


def split_target(batch: Any) -> tuple[list[Any], Any]:
    """Return the features and the target of a batch. A single tensor is a feature."""
    values = [batch] if isinstance(batch, torch.Tensor) else list(batch)
    return (values[:-1], values[-1]) if len(values) > 1 else (values, None)
