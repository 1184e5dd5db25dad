"""Names that users know: the batch-size key, meters and timers."""

import importlib
import importlib.util
import random
import sys
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from raysgd._internal.config import BATCH_SIZE
from raysgd._internal.timers import TimerCollection, TimerStat
from raysgd.metrics import BATCH_COUNT, NUM_SAMPLES, AverageMeter, AverageMeterCollection

__all__ = [
    "BATCH_COUNT",
    "BATCH_SIZE",
    "NUM_SAMPLES",
    "AverageMeter",
    "AverageMeterCollection",
    "TimerCollection",
    "TimerStat",
    "override",
    "seed_everything",
]

_Method = TypeVar("_Method", bound=Callable[..., object])


def override(overridden: type) -> Callable[[_Method], _Method]:
    """Mark a method as one that overrides a method of another class, as older scripts do.

    Raises:
        AttributeError: if that class has none of the name.
    """

    def marked(method: _Method) -> _Method:
        getattr(overridden, method.__name__)
        return method

    return marked


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, numpy, torch and, where it is imported, TensorFlow.

    They are those of this process: call it in ``setup`` for a worker. With one seed all workers
    draw the same dropout and noise; end `setup` with ``seed_everything(seed + self.world_rank)``
    where they should not. (Initial weights and the order of samples are the same for all anyway.)

    Args:
        seed: from 0 to 2**32 - 1.

    Raises:
        TypeError: if it is no int.
        ValueError: if it is out of that range.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed_everything({seed!r}): must be an int.")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed_everything({seed}): must be from 0 to 2**32 - 1.")
    random.seed(seed)
    np.random.seed(seed)
    if importlib.util.find_spec("torch") is not None:
        importlib.import_module("torch").manual_seed(seed)  # and GPUs
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].random.set_seed(seed)
