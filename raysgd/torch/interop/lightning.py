"""Operators that train a LightningModule, created by ``TrainingOperator.from_ptl``.

A module uses Lightning's Trainer through ``self.trainer``. `TrainerStandIn` replaces it while the
module's code runs.
"""

import contextlib
import copy
import importlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from raysgd._internal.files import lock_of_node
from raysgd.metrics import NUM_SAMPLES, merge_segment_metrics
from raysgd.torch.interop.lightning_trainer import TrainerStandIn
from raysgd.torch.interop.torchmetrics import compute_logged

logger = logging.getLogger(__name__)

_Base: Any = object  # `lightning_operator` adds TrainingOperator, whose module imports this one

_REFUSED = {
    "backward": "override train_batch of the operator",
    "configure_callbacks": "pass raysgd.callbacks to the trainer",
    "configure_gradient_clipping": "clip in on_before_optimizer_step",
    "configure_sharded_model": "use configure_model",
    "lr_scheduler_step": "use scheduler_step_freq of the trainer",
    "on_fit_end": "call it in the script, after trainer.train()",
    "on_train_end": "call it in the script, after trainer.train()",
    "on_validation_model_eval": "override train_mode of the operator",
    "on_validation_model_train": "override train_mode of the operator",
    "on_validation_model_zero_grad": "raysgd zeroes gradients with the update",
    "optimizer_step": "override train_batch of the operator",
    "optimizer_zero_grad": "raysgd zeroes gradients with the update",
    "training_epoch_end": "use on_train_epoch_end",
    "training_step_end": "use training_step",
    "validation_epoch_end": "use on_validation_epoch_end",
    "validation_step_end": "use validation_step",
}
"""Hooks that raysgd does not call, and what to do instead."""


class LightningOperatorMixin(_Base):  # type: ignore[misc]
    """Trains a LightningModule. Calls its steps and hooks, and collects what it logs."""

    module: Any

    _module_cls: type[Any]
    _loaders: Mapping[str, Any]
    _datamodule: Any = None

    def setup(self, config: dict[str, Any]) -> None:
        unused = set(config) - {"max_epochs"}
        module = self.module = _make(self._module_cls, config, unused)
        _check_hooks(module)
        self._stand_in = TrainerStandIn(self)
        self._epoch_metrics: dict[str, Any] | None = None  # None before training
        with self._attach_trainer():
            loaders = self._load(config, unused)
            module.configure_model()
            self.register_data(**loaders)
            optimizers, schedulers = self._configure_optimizers()
            # The hook sees the gradients of all workers and parts of a batch.
            optimizers[0].register_step_pre_hook(lambda o, *_: module.on_before_optimizer_step(o))
            self.model, self.optimizer, *_ = self.register(
                models=module, optimizers=optimizers[0], schedulers=schedulers or None
            )
            self.schedulers = schedulers
            self._stand_in.optimizers.append(self.optimizer)
            self._stand_in.lr_scheduler_configs = [SimpleNamespace(scheduler=s) for s in schedulers]
            module.on_fit_start()
        if unused and self.world_rank == 0:
            logger.warning(
                "The constructors of %s and of its data module ignore these keys of the config: "
                "%s. Add arguments with their names, or one argument config.",
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
                data = self._stand_in.datamodule = copy.copy(_make(data, config, unused))
                _check_hooks(data, "state_dict")
                data.trainer = self._stand_in
                data.prepare_data()
                data.setup("fit")
            module.prepare_data()
            module.setup("fit")
            loaders = dict(self._loaders)
        owner = module if data is None else data
        names = {"train_loader": "train_dataloader", "validation_loader": "val_dataloader"}
        for name, method in names.items():
            if name not in loaders and _overrides(owner, method):
                loaders[name] = getattr(owner, method)()
        if not _overrides(module, "validation_step"):
            loaders.pop("validation_loader", None)
        return loaders

    def _configure_optimizers(self) -> tuple[list[Any], list[Any]]:
        """Return the module's optimizers and schedulers."""
        module, name = self.module, type(self.module).__name__
        # Lightning has no public function that reads all forms of configure_optimizers().
        parser = _import_beside(module, "core.optimizer")
        optimizers, configs, _ = parser._configure_optimizers(module.configure_optimizers())
        if not module.automatic_optimization or len(optimizers) != 1:
            raise RuntimeError(
                f"from_ptl({name}): the module must have one optimizer, and "
                "automatic_optimization = True. For other modules, write a TrainingOperator with "
                "your own train_batch."
            )
        frequency = self.scheduler_step_freq
        default = None if frequency else "epoch"  # of Lightning
        schedulers = []
        for each in configs:
            options = each if isinstance(each, dict) else {"scheduler": each}
            interval, every = options.get("interval", default), options.get("frequency", 1)
            if frequency != "manual" and options.get("monitor") is not None:
                raise ValueError(
                    f"{name} has a scheduler with monitor={options['monitor']!r}. Pass "
                    'scheduler_step_freq="manual" to the trainer, and call '
                    "trainer.update_scheduler(metric) in on_validation_end of a callback."
                )
            wanted = {"step": "batch", "epoch": "epoch"}.get(str(interval))
            frequency = frequency or wanted
            if frequency != "manual" and (wanted not in (None, frequency) or every != 1):
                raise ValueError(
                    f"{name} has a scheduler with interval={interval!r} and frequency={every}, but "
                    f"the trainer has scheduler_step_freq={frequency!r}. Use frequency=1, and "
                    'interval="step" with "batch" or interval="epoch" with "epoch".'
                )
            schedulers.append(options["scheduler"])
        self._train_state.scheduler_step_freq = frequency
        return optimizers, schedulers

    @contextlib.contextmanager
    def _attach_trainer(self, **state: bool) -> Iterator[TrainerStandIn]:
        """Give the module a replacement for Lightning's Trainer.

        Remove it afterwards, so that the module can be sent to the driver.
        """
        module, stand_in = self.module, self._stand_in
        if "log" in vars(module):  # another method has given it
            yield stand_in
            return
        vars(stand_in).update({"training": False, "validating": False} | state)
        module.trainer = stand_in
        modules = [each for each in module.modules() if isinstance(each, _base_of(type(module)))]
        for each in modules:
            each.log, each.log_dict = stand_in.log, stand_in.log_dict
        try:
            yield stand_in
        finally:
            for each in modules:
                del each.log, each.log_dict
            module.trainer = None
            stand_in.pop_logged()  # of a batch that failed

    @property
    def _num_stepped(self) -> Any:
        """The global step, with a step of the optimizer in the current update."""
        return self.global_step + self._train_state.update.should_commit(True)

    @property
    def _running_epoch(self) -> int:
        """The current epoch. In Lightning, an epoch ends after its validation."""
        position = self._train_state.position
        is_over = self._stand_in.validating and position.epoch > 0 and position.offset == 0
        return int(position.epoch - is_over)

    # ---- training

    def train_epoch(
        self,
        iterator: Iterator[Any],
        info: dict[str, Any] | None = None,
        num_steps: int | None = None,
        epoch_idx: int = 0,
    ) -> dict[str, Any]:
        module, state = self.module, self._train_state
        begins = self._epoch_metrics is None or state.position.offset == 0
        with self._attach_trainer(training=True) as stand_in:
            if begins and not state.call.keeps_modes and _overrides(module, "train"):
                self.train_mode(True)  # before the hooks, which may change modes
            state.call.keeps_modes = True
            if self._epoch_metrics is None:
                self._epoch_metrics = {}
                module.on_train_start()
            if begins:
                module.on_train_epoch_start()
            result: dict[str, Any] = super().train_epoch(iterator, info, num_steps, epoch_idx)
            earlier = self._epoch_metrics
            self._epoch_metrics = result if begins else merge_segment_metrics([earlier, result])
            if self._loop_ends_epoch():
                with stand_in.restoring_metrics(self._epoch_metrics):
                    module.on_train_epoch_end()
            result.update(compute_logged(stand_in.pop_logged()))
        return result

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        module, index, update = self.module, batch_info["batch_idx"], self._train_state.update
        batch = self._move_to_device(batch)
        if update.begins_step and module.on_train_batch_start(batch, index) == -1:
            raise RuntimeError(
                f"{type(module).__name__}.on_train_batch_start returned -1, but raysgd cannot skip "
                "the rest of an epoch. Return None."
            )
        with self.autocast():
            output = self._step(module.training_step, batch, index)
        outputs = dict(output) if isinstance(output, Mapping) else {"loss": output}
        loss, num_samples = outputs.get("loss"), self._num_samples(batch)
        count = self.count_items(batch, num_samples)
        if not isinstance(loss, torch.Tensor):
            raise TypeError(
                f"{type(module).__name__}.training_step returned {output!r}. It must return "
                'the loss, or a dict with "loss". raysgd cannot skip a batch.'
            )
        module.on_before_backward(loss)
        self.backward(loss, count)
        module.on_after_backward()
        if self.optimizer_step(self.optimizer):
            module.on_before_zero_grad(self.optimizer)
        if update.micro_batch.ends_step:
            module.on_train_batch_end(outputs, batch, index)
        logged = self._stand_in.pop_logged()
        return {"train_loss": self._mean_of(loss, count), **logged, NUM_SAMPLES: num_samples}

    def _step(self, step: Callable[..., Any], batch: Any, index: int) -> Any:
        """Run a step of the module. In training, run it in the wrapper that averages gradients."""
        arguments = [batch, index][: len(inspect.signature(step).parameters)]
        wrapper, module = self.model, self.module
        if not isinstance(wrapper, DistributedDataParallel) or not torch.is_grad_enabled():
            return step(*arguments)

        def forward(*inputs: Any) -> Any:
            del module.forward  # the step must call the module's own method
            return step(*inputs)

        module.forward = forward
        try:
            return wrapper(*arguments)
        finally:
            vars(module).pop("forward", None)

    def _move_to_device(self, batch: Any) -> Any:
        self._stand_in.batch_size = None  # of a hook, or of a batch that ran out of memory
        batch = self._transfer_hook("on_before_batch_transfer")(batch, 0)
        batch = self._transfer_hook("transfer_batch_to_device")(batch, self.device, 0)
        return self._transfer_hook("on_after_batch_transfer")(batch, 0)

    def _transfer_hook(self, name: str) -> Any:
        data = self._stand_in.datamodule  # its hooks replace those of the module
        owner = data if data is not None and _overrides(data, name) else self.module
        return getattr(owner, name)

    def _num_samples(self, batch: Any) -> int:
        """Return the batch size that the step has logged, or else the one that Lightning finds."""
        data, size = _import_beside(self.module, "utilities.data"), self._stand_in.batch_size
        return int(data.extract_batch_size(batch) if size is None else size)

    # ---- validation

    def validate(
        self, val_iterator: Iterator[Any], info: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        module = self.module
        self._train_state.save_modes()
        with torch.no_grad(), self._attach_trainer(validating=True) as stand_in:
            self.train_mode(False)
            module.on_validation_start()
            module.on_validation_epoch_start()
            result: dict[str, Any] = super().validate(val_iterator, info)
            with stand_in.restoring_metrics(result):
                module.on_validation_epoch_end()
                module.on_validation_end()
            result.update(compute_logged(stand_in.pop_logged()))
        return result

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        module, index = self.module, batch_info["batch_idx"]
        batch = self._move_to_device(batch)
        module.on_validation_batch_start(batch, index)
        with self.timers.record("eval_fwd"), self.autocast():
            output = self._step(module.validation_step, batch, index)
        num_samples = self._num_samples(batch)
        module.on_validation_batch_end(output, batch, index)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        metrics = {}
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:  # or the output of the model
            metrics["val_loss"] = self._mean_of(loss, self.count_items(batch, num_samples))
        return {**metrics, **self._stand_in.pop_logged(), NUM_SAMPLES: num_samples}

    def predict_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        batch = self._move_to_device(batch)
        with self._attach_trainer(), self.autocast():
            return self._step(self.module.predict_step, batch, batch_info["batch_idx"])

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        with self._attach_trainer():
            self.module.on_save_checkpoint(state)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._attach_trainer():
            self.module.on_load_checkpoint(state)


def lightning_operator(
    base: type[Any],
    root: type[Any],
    module_cls: Any,
    loaders: Mapping[str, Iterable[Any] | None],
    datamodule: Any,
) -> type[Any]:
    """Return an operator class that trains `module_cls`, for ``from_ptl`` of the class `base`.

    `root` is `TrainingOperator`, whose module imports this module. Overrides in a subclass `base`
    come before `LightningOperatorMixin`, and these come before `root`.

    Raises:
        TypeError: If `module_cls` is not a LightningModule of Lightning 2.
    """
    if not isinstance(module_cls, type) or _base_of(module_cls) is None:
        raise TypeError(
            f"from_ptl(lightning_module_cls={module_cls!r}): must be a subclass of LightningModule "
            'of Lightning 2, not an instance. To install it: pip install "raysgd[lightning]".'
        )
    attributes = {
        "_module_cls": module_cls,
        "_loaders": {name: loader for name, loader in loaders.items() if loader is not None},
        "_datamodule": datamodule,
    }
    bases = (LightningOperatorMixin, root) if base is root else (base, LightningOperatorMixin, root)
    return type("CustomLightningOperator", bases, attributes)


def _base_of(kind: type[Any]) -> Any:
    """Return the Lightning class that a module or data module derives from, or None."""
    names, packages = ("LightningModule", "LightningDataModule"), ("lightning", "pytorch_lightning")
    of_lightning = (each for each in kind.__mro__ if each.__module__.split(".")[0] in packages)
    return next((each for each in of_lightning if each.__name__ in names), None)


def _import_beside(module: Any, name: str) -> Any:
    """Import a module of ``lightning`` or ``pytorch_lightning``, whichever the user's code uses."""
    package, _, _ = _base_of(type(module)).__module__.partition(".core.")
    return importlib.import_module(f"{package}.{name}")


def _overrides(module: Any, name: str) -> bool:
    """Return whether user code overrides a method of Lightning."""
    own, base = (getattr(kind, name, None) for kind in (type(module), _base_of(type(module))))
    return vars(module).get(name, own) not in (None, base)


def _check_hooks(module: Any, *uncalled: str) -> None:
    name = type(module).__name__
    if refused := [f"{hook} ({_REFUSED[hook]})" for hook in _REFUSED if _overrides(module, hook)]:
        raise TypeError(f"from_ptl({name}): raysgd does not call methods: {'; '.join(refused)}.")
    for hook in (*uncalled, "on_exception", "teardown"):
        if _overrides(module, hook):
            logger.warning("raysgd does not call %s.%s. Call it in the script.", name, hook)


def _make(cls: Any, config: dict[str, Any], unused: set[str]) -> Any:
    """Create a module with the config, or with the keys that its constructor takes.

    Remove these keys from `unused`. If `cls` is an object and not a class, return it.
    """
    if not isinstance(cls, type):
        return cls
    parameters = inspect.signature(cls).parameters
    takes_any = any(each.kind == each.VAR_KEYWORD for each in parameters.values())
    if "config" in parameters:
        unused.clear()
        return cls(config=config)
    takes_any &= cls.__init__ is not _base_of(cls).__init__  # type: ignore[misc]
    arguments = {key: value for key, value in config.items() if takes_any or key in parameters}
    unused.difference_update(arguments)
    return cls(**arguments)
