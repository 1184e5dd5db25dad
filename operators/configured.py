"""The base of the ready-made operators: options, optimizer, loaders."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from raysgd._internal.config import BATCH_SIZE
from raysgd.operators.options import Option, any_of, integer, number, read_options, shown
from raysgd.torch import TrainingOperator

_DATA = (
    "a torch Dataset, a tensor or a tuple of tensors of one length, an iterable of batches, a "
    "function of the config that returns one of them, or None"
)
_OPTIMIZERS = ("adam", "adamw", "sgd")


def _is_data(value: Any) -> bool:
    return callable(value) or isinstance(value, Dataset) or _has_batches(value)


def _has_batches(value: Any) -> bool:
    # Strings, dicts, and NumPy arrays are iterable but do not contain batches.
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping | np.ndarray)


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
                                                 scheduler, with an optional third argument
                                                 ``steps_per_epoch``. It requires a
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

    Raises:
        ValueError: In `setup`, if the config has an invalid value.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "lr": number(1e-3, 0.0, above=True),
        "optimizer": any_of(
            "adamw",
            lambda value: callable(value) or (isinstance(value, str) and value in _OPTIMIZERS),
            '"adam", "adamw", "sgd" or a function of (parameters, config)',
        ),
        "weight_decay": number(0.0, 0.0),
        "momentum": number(0.9, 0.0, 1.0),
        "scheduler": any_of(None, callable, "a function of (optimizer, config), or None"),
        "gradient_accumulation_steps": integer(1, 1),
        "max_grad_norm": number(None, 0.0, above=True),
        "train_data": any_of(None, _is_data, _DATA),
        "validation_data": any_of(None, _is_data, _DATA),
        "batch_size": integer(32, 1),
        "num_loader_workers": integer(0, 0),
        "seed": integer(None, 0),
    }
    """Keys of the config, with defaults and checks. Subclasses can add keys."""

    options: dict[str, Any]
    """Value of each option, available from `setup` on."""

    def setup(self, config: dict[str, Any]) -> None:
        self.options = read_options(
            type(self).__name__, self.OPTIONS, config, warns=self.world_rank == 0
        )
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
        cls = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
        return cls(parameters, lr=lr, weight_decay=decay)

    def build_scheduler(self, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
        """Return the scheduler of `optimizer`, or None."""
        make = self.options["scheduler"]
        if make is None:
            return None
        if "steps_per_epoch" in inspect.signature(make).parameters:
            return make(optimizer, config, steps_per_epoch=self.steps_per_epoch)
        return make(optimizer, config)

    def build_train_data(self, config: dict[str, Any]) -> Any:
        """Return the training data, in one of the forms of ``train_data``."""
        return self._configured_data("train_data", config)

    def build_validation_data(self, config: dict[str, Any]) -> Any:
        """Return the validation data, in one of the forms of ``validation_data``."""
        return self._configured_data("validation_data", config)

    def as_dataset(self, data: Any) -> Any:
        """Convert a tensor or a tuple of tensors to a Dataset. Return other data unchanged."""
        if isinstance(data, torch.Tensor):
            data = (data,)
        if isinstance(data, tuple):
            if not data or not all(isinstance(column, torch.Tensor) for column in data):
                raise ValueError(
                    f"{type(self).__name__}: a tuple of data must contain tensors, not "
                    f"{shown(data)}."
                )
            return TensorDataset(*data)
        return data

    def update_metrics(self, output: torch.Tensor, target: torch.Tensor) -> None:
        """Update metrics with a validation batch. See :class:`raysgd.operators.WithMetrics`."""

    # ---- methods for subclasses

    @property
    def register_options(self) -> dict[str, Any]:
        """Arguments of `register` from the config."""
        return {key: self.options[key] for key in ("gradient_accumulation_steps", "max_grad_norm")}

    def build_module(self, key: str, config: dict[str, Any]) -> torch.nn.Module:
        """Return the module ``config[key]``, or the result of the function ``config[key]``."""
        given = self.options[key]
        module = given if given is None or isinstance(given, torch.nn.Module) else given(config)
        if not isinstance(module, torch.nn.Module):
            kind = type(self).__name__
            found = "is" if given is None else "returned"
            raise ValueError(
                f"{kind}: config[{key!r}] {found} {module!r}, not a torch.nn.Module. Pass a module "
                f"or a function of the config that returns one, or override build_{key} in {kind}."
            )
        return module

    def make_loader(self, data: Any, *, shuffle: bool) -> Any:
        """Return a loader of `data`, or None if `data` is None."""
        data = self.as_dataset(data)
        if isinstance(data, Dataset):
            num_workers = self.options["num_loader_workers"]
            return DataLoader(
                data,
                batch_size=self.config.get(BATCH_SIZE, self.options["batch_size"]),
                shuffle=shuffle and not isinstance(data, IterableDataset),
                num_workers=num_workers,
                pin_memory=self.use_gpu and num_workers > 0,
            )
        if data is None or _has_batches(data):
            return data
        raise ValueError(f"{type(self).__name__}: data must be {_DATA}, not {shown(data)}.")

    def _configured_data(self, key: str, config: dict[str, Any]) -> Any:
        data = self.options[key]
        is_function = callable(data) and not isinstance(data, Dataset | Iterable)
        return data(config) if is_function else data
