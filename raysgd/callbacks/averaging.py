"""Averages of the weights: what is validated, and handed out, in place of the newest ones."""

from __future__ import annotations

import functools
from typing import Any

from raysgd.callbacks.base import Callback, Trainer

__all__ = ["EMA", "SWA"]


class _WeightAveraging(Callback):
    """Lets all workers average the weights that they train; runs there, at no call of the driver.

    The averages take the place of the weights in validation, `predict`, `test`, ``get_model`` and
    ``save_model``, and are in the trainer's state under ``averages``: checkpoints, restarts and
    replacement workers have them. They are kept when this callback ends, as long as the trainer
    lives. One of `EMA` and `SWA` at a time; for PyTorch.
    """

    _decay: float | None = None
    _start_epoch = 1

    def on_train_start(self, trainer: Trainer) -> None:
        """Begin, or go on with what a state that was loaded has."""
        begin = functools.partial(_begin, type(self).__name__, self._decay, self._start_epoch)
        trainer.apply_all_operators(begin)


class EMA(_WeightAveraging):
    """Keeps an exponential moving average of the weights, and has it validated and handed out.

    After each update the average becomes ``decay * average + (1 - decay) * weights``. The first one
    is the weights. Buffers, such as running statistics, are not averaged.

    Args:
        decay: between 0 and 1; 0.999 averages over about the last 1,000 updates.

    Raises:
        ValueError: if `decay` is not between 0 and 1.
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"EMA(decay={decay!r}): must be between 0 and 1.")
        self._decay = float(decay)


class SWA(_WeightAveraging):
    """Keeps the mean of the weights at the ends of epochs, and has it validated and handed out.

    It is the stochastic weight averaging of Izmailov et al., 2018; a learning rate that stays high
    meanwhile is a scheduler of yours, such as ``torch.optim.swa_utils.SWALR``. Buffers are not
    averaged: before a model with batch normalization is used, compute its statistics anew, by
    ``torch.optim.swa_utils.update_bn(loader, trainer.get_model())``.

    Args:
        start_epoch: the first epoch whose end counts, from 1.

    Raises:
        ValueError: if `start_epoch` is no int from 1 on.
    """

    def __init__(self, start_epoch: int) -> None:
        if isinstance(start_epoch, bool) or not isinstance(start_epoch, int) or start_epoch < 1:
            raise ValueError(f"SWA(start_epoch={start_epoch!r}): must be an int from 1 on.")
        self._start_epoch = start_epoch


def _begin(name: str, decay: float | None, start_epoch: int, operator: Any) -> None:
    """Let the operator average its weights. Runs on the worker."""
    averaging = operator._train_state.feature("Averaging")
    if averaging is None:
        raise NotImplementedError(
            f"{name} averages the weights of PyTorch models. Optimizers of Keras do it by "
            "themselves: use_ema=True."
        )
    averaging.begin(decay, start_epoch)
