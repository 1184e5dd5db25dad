"""Averages of the weights, which replace them in validation and exports."""

from typing import Any

from raysgd._internal.arguments import as_int, is_number
from raysgd.callbacks.base import AnyTrainer, Callback


class _WeightAveraging(Callback):
    """Averages the trained weights on all workers.

    The averages replace the weights in validation, `predict`, `test`, ``get_model`` and
    ``save_model``. They are part of the trainer's state, as ``averages``, and stay when this
    callback ends. Use one of `EMA` and `SWA` at a time. For PyTorch.
    """

    _decay: float | None = None
    _start_epoch = 1

    def on_train_start(self, trainer: AnyTrainer) -> None:
        name, arguments = type(self).__name__, (self._decay, self._start_epoch)

        def begin(operator: Any) -> None:  # runs on the workers, which do not get the callback
            if not hasattr(operator, "_start_averaging"):
                raise NotImplementedError(
                    f"{name} averages only the weights of PyTorch models. With Keras, create the "
                    "optimizer with use_ema=True."
                )
            operator._start_averaging(*arguments)

        trainer.apply_all_operators(begin)


class EMA(_WeightAveraging):
    """Keeps an exponential moving average of the weights.

    After each update the average becomes ``decay * average + (1 - decay) * weights``. The first
    average is a copy of the weights. Buffers, such as running statistics, are not averaged.

    Args:
        decay: between 0 and 1; 0.999 averages over about the last 1,000 updates.

    Raises:
        ValueError: if `decay` is not between 0 and 1.
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not is_number(decay) or not 0 < decay < 1:
            raise ValueError(f"EMA(decay={decay!r}): must be a number between 0 and 1.")
        self._decay = float(decay)


class SWA(_WeightAveraging):
    """Keeps the mean of the weights at the ends of epochs (Izmailov et al., 2018).

    For a learning rate that stays high, register a scheduler, such as
    ``torch.optim.swa_utils.SWALR``. Buffers are not averaged. With batch normalization, call
    ``torch.optim.swa_utils.update_bn(loader, model)`` on the result of ``trainer.get_model()``.

    Args:
        start_epoch: the first epoch whose end counts, from 1.

    Raises:
        TypeError: if `start_epoch` is not an int.
        ValueError: if it is below 1.
    """

    def __init__(self, start_epoch: int) -> None:
        self._start_epoch = as_int("SWA", "start_epoch", start_epoch, 1)
