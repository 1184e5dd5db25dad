"""Public helpers: the batch-size key, meters, timers, and seeds."""

import importlib
import importlib.util
import random
import sys
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from raysgd._internal.arguments import check_int
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
    """Mark a method that overrides a method of `overridden`, for older scripts."""

    def marked(method: _Method) -> _Method:
        getattr(overridden, method.__name__)
        return method

    return marked


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, NumPy, PyTorch, and TensorFlow (if imported).

    This affects the current process only, so call it in ``setup`` to seed a worker. With the same
    seed, all workers draw the same dropout and noise. To make these differ, end ``setup`` with
    ``seed_everything(seed + self.world_rank)``.

    Args:
        seed: an int from 0 to 2**32 - 1.

    Raises:
        TypeError: if `seed` is not an int.
        ValueError: if `seed` is out of range.
    """
    seed = check_int("seed_everything", "seed", seed, 0, 2**32 - 1)
    random.seed(seed)
    np.random.seed(seed)
    if importlib.util.find_spec("torch") is not None:
        importlib.import_module("torch").manual_seed(seed)  # also seeds GPUs
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].random.set_seed(seed)
