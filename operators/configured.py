"""What the ready-made operators have in common: options, optimizer, loaders."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from raysgd._internal.config import BATCH_SIZE
from raysgd.operators.options import (
    Option,
    any_of,
    integer,
    number,
    read_options,
    shown,
)
from raysgd.torch import TrainingOperator

__all__ = ["ConfiguredOperator"]

_DATA = (
    "a torch Dataset, a tensor or a tuple of tensors of one length, an iterable of batches, a "
    "function of the config that returns one of them, or None"
)
_OPTIMIZERS = ("adam", "adamw", "sgd")


def _is_data(value: Any) -> bool:
    return callable(value) or isinstance(value, Dataset) or _has_batches(value)


def _has_batches(value: Any) -> bool:
    # texts, dicts and arrays can be iterated over as well, and have no batches
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping | np.ndarray)


class ConfiguredOperator(TrainingOperator):
    """Sets itself up from a config, and lets subclasses override each part of that.

    ===============================  ==========  ================================================
    key                              default     meaning
    ===============================  ==========  ================================================
    ``lr``                           0.001       learning rate
    ``optimizer``                    "adamw"     "adam", "adamw" or "sgd"; or a function of
                                                 (parameters, config) that makes one
    ``weight_decay``                 0.0         as the optimizer defines it
    ``momentum``                     0.9         of "sgd"
    ``scheduler``                    None        function of (optimizer, config) that makes a
                                                 scheduler; one with an argument
                                                 ``steps_per_epoch`` gets that as well. The trainer
                                                 needs a ``scheduler_step_freq`` then
    ``gradient_accumulation_steps``  1           batches that make one update together
    ``max_grad_norm``                None        2-norm to which gradients are clipped
    ``train_data``                   None        a Dataset, a tensor or a tuple of tensors, an
                                                 iterable of batches, or a function of the
                                                 config that returns one of them
    ``validation_data``              None        likewise
    ``batch_size``                   32          samples of a step for each of ``num_workers``;
                                                 ``config[BATCH_SIZE]`` sets those of all workers
    ``num_loader_workers``           0           processes that load data, for each worker
    ``seed``                         None        of torch's random numbers from `setup` on; what
                                                 training draws differs from worker to worker
    ===============================  ==========  ================================================

    Data sets and tensors get a DataLoader, which shuffles those to train on; iterables
    are used as they are. Other keys are for your own functions; one that looks like an option
    with a typing error is warned of.

    Raises:
        ValueError: in `setup`, if the config has a value that is not allowed.
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
    """The keys of the config, with defaults and checks. Subclasses may add theirs."""

    options: dict[str, Any]
    """The value of each option, from `setup` on."""

    def setup(self, config: dict[str, Any]) -> None:
        """Read the options, and register models and loaders."""
        self.options = read_options(
            type(self).__name__, self.OPTIONS, config, warns=self.world_rank == 0
        )
        if BATCH_SIZE in config and "batch_size" in config:
            raise ValueError(
                f"{type(self).__name__}: config has both 'batch_size'="
                f"{config['batch_size']} (of each worker) and BATCH_SIZE (of all workers). "
                "Give one of them."
            )
        self.check_options()
        if self.options["seed"] is not None:
            torch.manual_seed(self.options["seed"])
        # before the models, since schedulers may ask for the steps of an epoch
        self.register_data(
            train_loader=self.make_loader(self.build_train_data(config), shuffle=True),
            validation_loader=self.make_loader(self.build_validation_data(config), shuffle=False),
        )
        self.setup_models(config)

    def _seed_worker(self) -> None:
        # alike until here, for models and data; from now on no two workers may drop the same
        # activations or draw the same noise
        if self.options["seed"] is not None and self.world_rank > 0:
            torch.manual_seed((self.options["seed"] + self.world_rank * 65_537) % 2**63)

    # ---- what users override

    def check_options(self) -> None:
        """Check ``self.options`` where they depend on each other.

        Raises:
            ValueError: if they do not fit.
        """

    def setup_models(self, config: dict[str, Any]) -> None:
        """Build models and optimizers, and register them with ``**self.register_options``."""
        raise NotImplementedError(f"{type(self).__name__} must override setup_models.")

    def build_optimizer(
        self, parameters: Iterable[torch.nn.Parameter], config: dict[str, Any]
    ) -> torch.optim.Optimizer:
        """Return the optimizer of some parameters."""
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
        """Return the scheduler of an optimizer, or None."""
        make = self.options["scheduler"]
        if make is None:
            return None
        if "steps_per_epoch" in inspect.signature(make).parameters:
            return make(optimizer, config, steps_per_epoch=self.steps_per_epoch)
        return make(optimizer, config)

    def build_train_data(self, config: dict[str, Any]) -> Any:
        """Return what to train on, in one of the forms that ``train_data`` may have."""
        return self._configured_data("train_data", config)

    def build_validation_data(self, config: dict[str, Any]) -> Any:
        """Return what to validate on, in one of the forms that ``validation_data`` may have."""
        return self._configured_data("validation_data", config)

    def as_dataset(self, data: Any) -> Any:
        """Return data in a form that users like to give as a Dataset, others as they are."""
        if isinstance(data, torch.Tensor):
            data = (data,)
        if isinstance(data, tuple):
            kind = type(self).__name__
            if not data or not all(isinstance(column, torch.Tensor) for column in data):
                raise ValueError(
                    f"{kind}: data given as a tuple must be tensors, not {shown(data)}."
                )
            if len({len(column) for column in data}) > 1:
                raise ValueError(
                    f"{kind}: the tensors of a data set have "
                    f"{', '.join(str(len(column)) for column in data)} rows; all need the same "
                    "number."
                )
            return TensorDataset(*data)
        return data

    def update_metrics(self, output: torch.Tensor, target: torch.Tensor) -> None:
        """Take note of a validation batch, see :class:`raysgd.operators.WithMetrics`."""

    # ---- what subclasses use

    @property
    def register_options(self) -> dict[str, Any]:
        """Arguments of `register` that the config sets."""
        return {key: self.options[key] for key in ("gradient_accumulation_steps", "max_grad_norm")}

    def build_module(self, key: str, config: dict[str, Any]) -> torch.nn.Module:
        """Return the module that the config has under a key, or that a function there makes.

        Raises:
            ValueError: if it is no module.
        """
        given = self.options[key]
        module = given if given is None or isinstance(given, torch.nn.Module) else given(config)
        if not isinstance(module, torch.nn.Module):
            kind = type(self).__name__
            source = f"config[{key!r}]" if given is None else f"the function config[{key!r}]"
            raise ValueError(
                f"{kind}: {source} gave {module!r}, and a torch.nn.Module is needed. Give one, or "
                f"a function of the config that returns one, or override build_{key} in {kind}."
            )
        return module

    def make_loader(self, data: Any, *, shuffle: bool) -> Any:
        """Return a loader of `data`; None for None.

        Raises:
            ValueError: if it is nothing that batches can be made of.
        """
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
