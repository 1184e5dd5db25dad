"""Count the items of losses, and recognize losses of PyTorch that are not means over samples."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import CrossEntropyLoss, NLLLoss, functional

from raysgd.loop.update import LossCount
from raysgd.torch.input.batches import IGNORED
from raysgd.torch.strategies.ddp import plain
from raysgd.torch.train_state import TorchTrainState

_PYTORCH = ("torch.nn.modules.loss", "torch.nn.functional")
_CLASS_LOSSES = (
    CrossEntropyLoss.forward,
    NLLLoss.forward,
    functional.cross_entropy,
    functional.nll_loss,
)
_UNCOUNTED = (
    "The loss ignores targets of %d, but raysgd counts all samples, so batches with fewer targets "
    "weigh too much. Override num_items(batch), and return the number of the other targets."
)


def _function_of(criterion: Any) -> tuple[Any, Callable[..., Any]]:
    """Return the function that computes a loss, and a function that returns its settings."""
    if isinstance(criterion, functools.partial):
        return criterion.func, criterion.keywords.get
    if isinstance(criterion, torch.nn.Module):
        module = plain(criterion)
        return type(module).forward, lambda name, default=None: getattr(module, name, default)
    return criterion, lambda name, default=None: default


def ignored_index(criterion: Any) -> int:
    index = _function_of(criterion)[1]("ignore_index")
    return index if isinstance(index, int) else IGNORED


def count_of(
    criterion: Any, target: Any, num_samples: float, train_state: TorchTrainState
) -> LossCount:
    """Return the count of a loss. Other losses than those of PyTorch are means over samples."""
    function, setting = _function_of(criterion)
    is_sum = setting("reduction") == "sum" and getattr(function, "__module__", "") in _PYTORCH
    return LossCount(_num_counted(function, setting, target, train_state), num_samples, is_sum)


def _num_counted(
    function: Any, setting: Callable[..., Any], target: Any, train_state: TorchTrainState
) -> float | None:
    """Return the number of items over which a loss of PyTorch is a mean, or None for samples.

    Cross entropies leave out targets, and count the others by the weights of their classes. To
    exchange counts costs time, so plain classes count as samples, unless a data set is known to
    have targets to leave out.
    """
    if function not in _CLASS_LOSSES or setting("reduction", "mean") != "mean":
        return None
    if not isinstance(target, torch.Tensor) or target.is_floating_point():
        return None  # class probabilities
    index, weight = setting("ignore_index", IGNORED), setting("weight")
    is_plain = weight is None and index == IGNORED and target.dim() < 2
    if is_plain and not train_state.data.ignores_targets:
        step = train_state.global_step
        is_checked = target.device.type == "cpu" or not step & (step - 1)  # a GPU would wait
        if not is_checked or not bool((target == index).any()):
            return None
        if torch.is_grad_enabled():
            train_state.settings.warn_once("ignored", _UNCOUNTED, index, anywhere=True)
            return None
    counted = target[target != index]
    return float(counted.numel() if weight is None else weight[counted].sum())


def as_count(count: Any, origin: str = "backward(num_samples={})") -> float:
    """Return a number, or a tensor of one element, as a float. `origin` is for errors."""
    is_scalar = isinstance(count, torch.Tensor) and count.numel() == 1
    value = count.item() if is_scalar else count
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{origin.format(repr(count))}: the count must be a number.")
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"{origin.format(repr(value))}: the count must be finite and at least 0.")
    return float(value)
