"""Operators that train a LightningModule, created by ``TrainingOperator.from_ptl``.

A module accesses its surroundings through ``self.trainer`` and ``self.fabric``. `_Surroundings`
replaces both while the module's code runs.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from raysgd.loop.operator_base import created_loaders
from raysgd.metrics import NUM_SAMPLES, MergeableMetric, computed
from raysgd.torch import ddp
from raysgd.torch.batches import mean_of
from raysgd.torch.interop.creators import lock_of_node, mixed_bases

if TYPE_CHECKING:
    from raysgd.torch.operator import TrainingOperator

    _Base = TrainingOperator
else:  # operator.py imports this module, so avoid an import cycle
    _Base = object

__all__ = ["LightningMethods", "lightning_operator"]

logger = logging.getLogger(__name__)

_REFUSED = {
    "backward": "the backward pass is raysgd's; use manual optimization for one of your own",
    "configure_callbacks": "pass raysgd.callbacks to the trainer",
    "configure_gradient_clipping": "clip in on_before_optimizer_step",
    "configure_sharded_model": "use configure_model",
    "lr_scheduler_step": "use manual optimization, and step self.lr_schedulers() there",
    "on_fit_end": "raysgd knows no end of a fit; do it in the script, after trainer.train()",
    "on_train_end": "raysgd knows no end of training; do it in the script, after trainer.train()",
    "on_validation_model_eval": "override train_mode of the operator",
    "on_validation_model_train": "override train_mode of the operator",
    "on_validation_model_zero_grad": "gradients are zeroed with the update",
    "optimizer_step": "use manual optimization, and step self.optimizers() there",
    "optimizer_zero_grad": "gradients are zeroed with the update; use manual optimization",
    "training_epoch_end": "Lightning 2 calls on_train_epoch_end",
    "training_step_end": "Lightning 2 has training_step alone",
    "validation_epoch_end": "Lightning 2 calls on_validation_epoch_end",
    "validation_step_end": "Lightning 2 has validation_step alone",
}
"""Unsupported hooks, and what to do instead."""


class LightningMethods(_Base):
    """Trains a LightningModule: `training_step`, `validation_step` and supported hooks.

    Values that the module logs become metrics over all batches and workers: means weighted by the
    samples of each batch, unless ``reduce_fx`` says otherwise. The loss becomes ``train_loss`` and
    ``val_loss``. The constructors of the module and of its data module get the whole config if they
    have an argument ``config``, otherwise the keys that match their arguments.
    """

    module: Any

    _module_cls: type[Any]
    _loaders: Mapping[str, Any]
    _data_creator: Callable[..., Any] | None = None
    _datamodule: Any = None

    def setup(self, config: dict[str, Any]) -> None:
        """Create the module, its data and its optimizers, and register them."""
        # The data creator gets the whole config.
        unused = set() if self._data_creator is not None else set(config)
        module = self.module = _make(self._module_cls, config, unused)
        _check_hooks(module)
        self._surroundings = _Surroundings(self)
        self._has_started = False
        with self._surrounded():
            loaders = self._load(config, unused)
            module.configure_model()
            optimizers, schedulers = self._configured()
            given: dict[str, Any] = {"models": module, "optimizers": optimizers}
            if schedulers:
                given["schedulers"] = schedulers
            if not module.automatic_optimization:
                # A backward pass may leave out parameters that another one reaches.
                given["ddp_args"] = {"find_unused_parameters": True}
            self.model, self.optimizers, *_ = self.register(**given)
            self.schedulers = schedulers
            self._surroundings.offer(optimizers, schedulers)
            self.register_data(**loaders)
            module.on_fit_start()
        if unused and self.world_rank == 0:
            logger.warning(
                "The constructors of %s and of its data module do not take these keys of the "
                "config: %s.",
                type(module).__name__,
                ", ".join(sorted(map(repr, unused))),
            )

    # ---- setup

    def _load(self, config: dict[str, Any], unused: set[str]) -> dict[str, Any]:
        """Return the loaders, as arguments of ``register_data``."""
        module, data = self.module, self._datamodule
        with lock_of_node():  # one worker per node at a time, because they may download
            if data is not None:
                # Copy the data module, because other trainers may use the same object.
                data = self._surroundings.datamodule = copy.copy(_make(data, config, unused))
                data.trainer = self._surroundings
                data.prepare_data()
                data.setup("fit")
            module.prepare_data()
            module.setup("fit")
            found = dict(self._loaders)
            if self._data_creator is not None:
                found.update(created_loaders(self._data_creator(config)))
        owner = module if data is None else data
        names = {"train_loader": "train_dataloader", "validation_loader": "val_dataloader"}
        for name, method in names.items():
            if name in found or not _overrides(owner, method):
                continue
            loader = found[name] = getattr(owner, method)()
            if isinstance(loader, list | tuple | dict):
                raise TypeError(
                    f"from_ptl({type(module).__name__}) has {len(loader)} loaders from {method}. "
                    "Join the data sets in one loader."
                )
        if not _overrides(module, "validation_step"):
            found.pop("validation_loader", None)
        return found

    def _configured(self) -> tuple[list[Any], list[Any]]:
        """Return the module's optimizers and schedulers."""
        module, name = self.module, type(self.module).__name__
        parse = importlib.import_module(f"{_home(module)}.core.optimizer")._configure_optimizers
        optimizers, given, _ = parse(module.configure_optimizers())
        if module.automatic_optimization and len(optimizers) > 1:
            raise RuntimeError(
                f"{name} has {len(optimizers)} optimizers. Set self.automatic_optimization = False "
                "in its __init__, and step self.optimizers() in training_step."
            )
        frequency = self.scheduler_step_freq
        if given and not module.automatic_optimization and frequency != "manual":
            raise ValueError(
                f'{name} steps its schedulers by itself. Pass scheduler_step_freq="manual" to '
                f"the trainer instead of {frequency!r}."
            )
        schedulers = []
        for each in given:
            if not isinstance(each, dict):
                each = {"scheduler": each}
            interval, every = each.get("interval"), each.get("frequency", 1)
            wanted = {"step": "batch", "epoch": "epoch"}.get(str(interval))
            if frequency != "manual" and (wanted not in (None, frequency) or every != 1):
                raise ValueError(
                    f"{name} has a scheduler with interval={interval!r} and frequency={every}, and "
                    f"the trainer has scheduler_step_freq={frequency!r}. They must agree."
                )
            schedulers.append(each["scheduler"])
        return optimizers, schedulers

    @contextlib.contextmanager
    def _surrounded(self, **state: bool) -> Iterator[_Surroundings]:
        """Give the module a replacement for Lightning's Trainer within the context.

        Outside of it, the model can be sent to the driver.
        """
        module, surroundings = self.module, self._surroundings
        vars(surroundings).update({"training": False, "validating": False, **state})
        module.trainer = module.fabric = surroundings
        module._fabric_optimizers = surroundings.offered
        for name in ("log", "log_dict"):
            # Lightning does not pass reduce_fx on to a fabric, and has no public hook for it.
            setattr(module, name, surroundings.noting_reduction(getattr(module, name)))
        try:
            yield surroundings
        finally:
            del module.log, module.log_dict
            module.trainer = module.fabric = None
            module._fabric_optimizers = []

    # ---- training

    def train_epoch(
        self,
        iterator: Iterator[Any],
        info: dict[str, Any] | None = None,
        num_steps: int | None = None,
        epoch_idx: int = 0,
    ) -> dict[str, Any]:
        module, begins = self.module, self._train_state.offset == 0
        with self._surrounded(training=True) as surroundings:
            self.train_mode(True)
            if not self._has_started:
                self._has_started = True
                module.on_train_start()
            if begins:
                module.on_train_epoch_start()
            result = super().train_epoch(iterator, info, num_steps, epoch_idx)
            if self._epoch_is_over():
                module.on_train_epoch_end()
            result.update(_numbers(surroundings.take_logged()))
        return result

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        module, index = self.module, batch_info["batch_idx"]
        batch, num_samples = self._move_to_device(batch)
        if module.on_train_batch_start(batch, index) == -1:
            raise RuntimeError(
                f"{type(module).__name__}.on_train_batch_start returned -1. The rest of an epoch "
                "cannot be skipped: return None."
            )
        with self.timers.record("fwd"), self.autocast():
            output = self._step(module.training_step, batch, index)
        outputs = dict(output) if isinstance(output, Mapping) else {"loss": output}
        loss, num_items = outputs.get("loss"), self._count_items(batch, num_samples)
        if module.automatic_optimization:
            if not isinstance(loss, torch.Tensor):
                raise TypeError(
                    f"{type(module).__name__}.training_step returned {output!r}; it must return "
                    'the loss, or a dict with "loss". Batches cannot be skipped.'
                )
            self._update(loss, num_items)
        metrics = {}
        if isinstance(loss, torch.Tensor):
            metrics["train_loss"] = mean_of(loss, num_items)
        module.on_train_batch_end(outputs, batch, index)
        return {**metrics, **self._surroundings.take_logged(), NUM_SAMPLES: num_samples}

    def _update(self, loss: torch.Tensor, num_items: float | None) -> None:
        module, optimizer = self.module, self.optimizers[0]
        with self.timers.record("grad"):
            module.on_before_backward(loss)
            self.backward(loss, num_samples=num_items)
            module.on_after_backward()
        with self.timers.record("apply"):
            if self._train_state.step.place.is_last:
                self._train_state.optimization.precision.unscale(optimizer)
                module.on_before_optimizer_step(optimizer)
            if self.optimizer_step(optimizer):
                module.on_before_zero_grad(optimizer)

    def _step(self, step: Callable[..., Any], batch: Any, index: int) -> Any:
        """Run a step of the module.

        In training, call it through the wrapper to average gradients.
        """
        arguments = [batch, index][: len(inspect.signature(step).parameters)]
        wrapper, module = self.model, self.module
        if not isinstance(wrapper, DistributedDataParallel) or not torch.is_grad_enabled():
            return step(*arguments)
        if not module.automatic_optimization:
            ddp.begin_step(wrapper)  # each backward pass prepares the wrapper itself
            return step(*arguments)

        def forward(*given: Any) -> Any:
            del module.forward  # the step must call the module's own method
            return step(*given)

        module.forward = forward
        try:
            return wrapper(*arguments)
        finally:
            vars(module).pop("forward", None)

    def _move_to_device(self, batch: Any) -> tuple[Any, int]:
        """Return a batch on this worker's device, and its number of samples."""
        module = self.module
        batch = module.on_before_batch_transfer(batch, 0)
        batch = module.transfer_batch_to_device(batch, self.device, 0)
        batch = module.on_after_batch_transfer(batch, 0)
        size_of = importlib.import_module(f"{_home(module)}.utilities.data").extract_batch_size
        return batch, size_of(batch)

    # ---- validation

    def validate(
        self, val_iterator: Iterator[Any], info: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        module = self.module
        with torch.no_grad(), self._surrounded(validating=True) as surroundings:
            self.train_mode(False)
            module.on_validation_start()
            module.on_validation_epoch_start()
            result = super().validate(val_iterator, info)
            module.on_validation_epoch_end()
            module.on_validation_end()
            result.update(_numbers(surroundings.take_logged()))
        return result

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        module, index = self.module, batch_info["batch_idx"]
        batch, num_samples = self._move_to_device(batch)
        module.on_validation_batch_start(batch, index)
        with self.timers.record("eval_fwd"), self.autocast():
            output = self._step(module.validation_step, batch, index)
        module.on_validation_batch_end(output, batch, index)
        returned = dict(output) if isinstance(output, Mapping) else {"loss": output}
        loss = returned.pop("loss", None)
        # Modules for older versions of Lightning return what newer ones log.
        metrics = {name: value for name, value in returned.items() if _is_scalar(value)}
        if isinstance(loss, torch.Tensor):
            metrics["val_loss"] = mean_of(loss, self._count_items(batch, num_samples))
        return {**metrics, **self._surroundings.take_logged(), NUM_SAMPLES: num_samples}

    def predict_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        batch, _ = self._move_to_device(batch)
        with self._surrounded(), self.autocast():
            return self._step(self.module.predict_step, batch, batch_info["batch_idx"])

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return what ``on_save_checkpoint`` of the module adds to a checkpoint."""
        state: dict[str, Any] = {}
        self.module.on_save_checkpoint(state)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Pass the state to ``on_load_checkpoint`` of the module."""
        self.module.on_load_checkpoint(state)


class _Surroundings:
    """Replaces ``self.trainer`` and ``self.fabric`` of a module."""

    sanity_checking = False
    logger = None
    loggers: tuple[Any, ...] = ()

    def __init__(self, operator: LightningMethods) -> None:
        self._operator = operator
        self._logged: dict[str, Any] = {}
        self._reduce_fx = "mean"
        self.datamodule: Any = None
        self.optimizers: list[Any] = []
        self.lr_scheduler_configs: list[Any] = []
        self.offered: Any = []
        """Result of ``self.optimizers()``."""

    def offer(self, optimizers: list[Any], schedulers: list[Any]) -> None:
        self.optimizers = optimizers
        self.lr_scheduler_configs = [SimpleNamespace(scheduler=each) for each in schedulers]
        offered = [_Optimizer(self._operator, each) for each in optimizers]
        self.offered = offered[0] if len(offered) == 1 else offered

    @property
    def current_epoch(self) -> int:
        """Number of completed epochs."""
        return self._operator._train_state.epoch

    @property
    def global_step(self) -> int:
        return self._operator.global_step

    @property
    def global_rank(self) -> int:
        return self._operator.world_rank

    @property
    def local_rank(self) -> int:
        return self._operator.local_rank

    @property
    def world_size(self) -> int:
        return self._operator.world_size

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def log_dict(self, metrics: Mapping[str, Any]) -> None:
        """Collect what the module logs, for the metrics of its batch."""
        for name, value in metrics.items():
            value = value.detach() if isinstance(value, torch.Tensor) else value
            is_other = self._reduce_fx in _REDUCTIONS and _is_scalar(value)
            self._logged[name] = _Reduced(self._reduce_fx, value) if is_other else value

    def noting_reduction(self, log: Callable[..., None]) -> Callable[..., None]:
        """Return a log method that also sets the reduction for `log_dict`."""

        def noting(*args: Any, reduce_fx: Any = "mean", **kwargs: Any) -> None:
            self._reduce_fx = _reduction(reduce_fx)
            try:
                log(*args, reduce_fx=reduce_fx, **kwargs)
            finally:
                self._reduce_fx = "mean"

        return noting

    def take_logged(self) -> dict[str, Any]:
        logged, self._logged = self._logged, {}
        return logged

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients: ``self.manual_backward(loss)``."""
        operator = self._operator
        operator.module.on_before_backward(loss)
        if isinstance(operator.model, DistributedDataParallel):
            ddp.prepare_for_backward(operator.model, loss)
        operator.backward(loss)
        operator.module.on_after_backward()

    def clip_gradients(
        self, module: Any, optimizer: Any, clip_val: float | None, max_norm: float | None
    ) -> None:
        """Clip gradients: ``self.clip_gradients(optimizer, ...)``."""
        precision = self._operator._train_state.optimization.precision
        held = getattr(optimizer, "optimizer", optimizer)
        precision.unscale(held)
        if clip_val is not None:
            torch.nn.utils.clip_grad_value_(precision.parameters(held), clip_val)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(precision.parameters(held), max_norm)


class _Optimizer:
    """An optimizer for manual optimization."""

    def __init__(self, operator: LightningMethods, optimizer: torch.optim.Optimizer) -> None:
        self._operator = operator
        self.optimizer = optimizer

    def step(self) -> None:
        if self._operator._train_state.step.place.is_last:
            self._operator.module.on_before_optimizer_step(self.optimizer)
        self._operator.optimizer_step(self.optimizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def lightning_operator(
    base: type[TrainingOperator],
    root: type[TrainingOperator],
    module_cls: Any,
    loaders: Mapping[str, Iterable[Any] | None],
    data_creator: Any,
    datamodule: Any,
) -> type[TrainingOperator]:
    """Return a subclass of `base` that trains a module, see ``TrainingOperator.from_ptl``."""
    if not isinstance(module_cls, type) or _base_of(module_cls) is None:
        raise TypeError(
            f"from_ptl(lightning_module_cls={module_cls!r}): must be a subclass of LightningModule "
            '(the class, not an instance) of Lightning 2: pip install "raysgd[lightning]".'
        )
    if data_creator is not None and not callable(data_creator):
        raise TypeError(f"from_ptl(data_creator={data_creator!r}): must be a function.")
    given = {
        "_module_cls": module_cls,
        "_loaders": {name: loader for name, loader in loaders.items() if loader is not None},
        "_data_creator": None if data_creator is None else staticmethod(data_creator),
        "_datamodule": datamodule,
    }
    own = type("LightningOperator", (LightningMethods, root), {})
    return type("CustomLightningOperator", mixed_bases(base, own), given)


def _base_of(kind: type[Any]) -> type[Any] | None:
    """Return the Lightning class that a module or data module derives from."""
    names = ("LightningModule", "LightningDataModule")
    own = (each for each in kind.__mro__ if each.__name__ in names and _package_of(each))
    return next(own, None)


def _package_of(kind: type[Any]) -> str:
    """Return the package of a Lightning class (it has two names). Return "" for other classes."""
    package = kind.__module__.partition(".core.")[0]
    return package if package in ("lightning.pytorch", "pytorch_lightning") else ""


def _home(module: Any) -> str:
    base = _base_of(type(module))
    assert base is not None
    return _package_of(base)


def _overrides(module: Any, name: str) -> bool:
    """Return whether user code overrides a method of Lightning."""
    own = getattr(type(module), name, None)
    is_other = own is not None and own is not getattr(_base_of(type(module)), name, None)
    return is_other or name in vars(module)


def _is_scalar(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, int | float)


def _check_hooks(module: Any) -> None:
    """Reject methods that raysgd does not call as the module expects."""
    if refused := [name for name in _REFUSED if _overrides(module, name)]:
        reasons = "; ".join(f"{name} ({_REFUSED[name]})" for name in refused)
        raise TypeError(
            f"from_ptl({type(module).__name__}): its methods would not be called: {reasons}."
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise TypeError(
            f"from_ptl({type(module).__name__}): training_step(dataloader_iter) is not supported; "
            "take batch and batch_idx."
        )


def _make(given: Any, config: dict[str, Any], unused: set[str]) -> Any:
    """Create a module with the config, or with the keys that its constructor takes.

    Args:
        given: the class. A module is returned as it is.
        config: the config.
        unused: the keys that no constructor has taken. This call removes those that it takes.
    """
    if not isinstance(given, type):
        return given
    parameters = inspect.signature(given).parameters
    takes_any = any(each.kind == each.VAR_KEYWORD for each in parameters.values())
    if "config" in parameters:
        unused.clear()
        return given(config=config)
    if takes_any and given.__init__ is not _base_of(given).__init__:  # type: ignore[misc]
        arguments = config
    else:
        arguments = {name: value for name, value in config.items() if name in parameters}
    unused.difference_update(arguments)
    return given(**arguments)


class _Reduced(MergeableMetric):
    """A number that was logged with a ``reduce_fx`` other than the mean.

    Args:
        reduce_fx: "sum", "min" or "max".
        value: a number, or a tensor of one element.
    """

    def __init__(self, reduce_fx: str, value: Any) -> None:
        self._reduce_fx = reduce_fx
        # A GPU tensor stays on the GPU, because reading it would synchronize.
        self._value = value.detach().double() if isinstance(value, torch.Tensor) else value

    def merge(self, other: _Reduced) -> _Reduced:
        merged = _REDUCTIONS[self._reduce_fx](self._value, other._value)
        return _Reduced(self._reduce_fx, merged)

    def compute(self) -> float:
        return float(self._value)

    def __getstate__(self) -> dict[str, Any]:
        return {"_reduce_fx": self._reduce_fx, "_value": float(self._value)}


_REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {"sum": operator.add, "min": min, "max": max}


def _reduction(reduce_fx: Any) -> str:
    """Return the name of a ``reduce_fx``.

    Raises:
        ValueError: if Lightning does not support it.
    """
    name = str(getattr(reduce_fx, "__name__", reduce_fx)).lower()
    if name not in (*_REDUCTIONS, "mean", "avg"):
        raise ValueError(
            f'self.log(reduce_fx={reduce_fx!r}): must be "mean", "sum", "min" or "max". Return a '
            "raysgd.metrics.MergeableMetric from train_batch of the operator for another."
        )
    return name


def _numbers(logged: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in logged.items():
        if isinstance(value, MergeableMetric):
            found.update(computed(name, value))
        else:
            found[name] = value.item() if isinstance(value, torch.Tensor) else value
    return found
