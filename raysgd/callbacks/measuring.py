"""Callbacks that ask the workers for further metrics, and for a table of the models."""

from __future__ import annotations

import functools
import logging
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, ClassVar

import psutil

from raysgd.callbacks.base import Callback, Trainer
from raysgd.errors import WorkerLostError
from raysgd.metrics import learning_rates

logger = logging.getLogger(__name__)

_WIDTH = 50
"""Maximum width of a layer's type and arguments, in characters."""
_ROW = f"{{:<20}}  {{:<{_WIDTH}}}  {{:>14}}  {{:>14}}  {{:>10}}"


class _Measurement(Callback):
    stage: ClassVar[int] = -1  # run before the loggers

    def measure(self, trainer: Trainer) -> dict[str, float]:
        """Return the metrics to add."""
        raise NotImplementedError

    def on_epoch_end(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        try:
            metrics.update(self.measure(trainer))
        except WorkerLostError as error:  # the next call repairs the group
            name = type(self).__name__
            logger.warning("%s has no metrics for epoch %d: %s", name, trainer.epoch, error)

    on_steps_end = on_epoch_end


class DeviceStats(_Measurement):
    """Adds the resource use of the workers' processes to the metrics of training.

    ``memory_mib`` is the largest resident memory of a worker. ``cpu_percent`` is the mean CPU use
    since the last call (100 is one core). ``gpu_memory_mib``, if PyTorch uses GPUs, is the largest
    peak of allocated GPU memory since the last call.
    """

    def measure(self, trainer: Trainer) -> dict[str, float]:
        uses = trainer.apply_all_operators(_resource_use)
        metrics: dict[str, float] = {
            name: max(each[name] for each in uses)
            for name in ("memory_mib", "gpu_memory_mib")
            if all(name in each for each in uses)
        }
        metrics["cpu_percent"] = sum(each["cpu_percent"] for each in uses) / len(uses)
        return metrics


def _resource_use(operator: Any) -> dict[str, float]:
    """Return the resource use of this process. Runs on the worker."""
    process = _process()
    used = {"memory_mib": process.memory_info().rss / 2**20, "cpu_percent": process.cpu_percent()}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        used["gpu_memory_mib"] = torch.cuda.max_memory_allocated() / 2**20
        torch.cuda.reset_peak_memory_stats()
    return used


_process = functools.cache(psutil.Process)  # `cpu_percent` needs the time of its last call


class LearningRateLogger(_Measurement):
    """Adds the learning rates at the end of each call to the metrics of training.

    The name is ``lr``; with several optimizers ``lr-0``, ``lr-1``; and with several parameter
    groups ``lr/group0``, ``lr/group1``.
    """

    def measure(self, trainer: Trainer) -> dict[str, float]:
        rates: dict[str, float] = trainer.apply_all_operators(_rates)[0]
        return rates


def _rates(operator: Any) -> dict[str, float]:
    return learning_rates(operator._train_state.optimizers)


class ModelSummary(Callback):
    """Prints the layers of the models, their parameters and sizes, when training starts."""

    def on_train_start(self, trainer: Trainer) -> None:
        print(trainer.apply_all_operators(_summary)[0], flush=True)


def _summary(operator: Any) -> str:
    """Return a table of an operator's models. Runs on the worker."""
    models = operator._train_state.given_models
    lines: list[str] = []
    if not hasattr(operator, "unwrapped"):  # of Keras
        for model in models:
            model.summary(line_length=100, print_fn=lines.append)
        return "\n".join(lines)
    models = [operator.unwrapped(model) for model in models]  # without DistributedDataParallel
    lines = [_ROW.format("part", "type", "parameters", "trained", "size")]
    for number, model in enumerate(models):
        prefix = f"{number}." if len(models) > 1 else ""
        for part, module in model.named_children():
            text = f"{type(module).__name__}({module.extra_repr()})".removesuffix("()")
            kind = textwrap.shorten(text, _WIDTH, placeholder="…")
            lines.append(_row(f"{prefix}{part}", kind, [module]))
    return "\n".join([*lines, _row("all", "", models)])


def _row(part: str, kind: str, modules: Sequence[Any]) -> str:
    parameters = [parameter for module in modules for parameter in module.parameters()]
    count = sum(p.numel() for p in parameters)
    num_trained = sum(p.numel() for p in parameters if p.requires_grad)
    size = sum(p.nbytes for p in parameters)
    exponent, unit = (10, "KiB") if size < 2**20 else (20, "MiB")
    shown = f"{size / 2**exponent:.1f} {unit}"
    return _ROW.format(part, kind, f"{count:,}", f"{num_trained:,}", shown)
