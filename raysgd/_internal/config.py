"""The user's config, and the global batch size in it."""

import math
import os
import warnings
from collections.abc import Mapping
from typing import Any

from raysgd._internal.arguments import plain_int
from raysgd._internal.nested import try_copy

BATCH_SIZE = "*batch_size"
"""Key of the global batch size in a config. A worker's config has the worker's part instead."""


def env_seconds(name: str, default: float) -> float:
    """Return the environment variable `name`, a number of seconds, or `default`."""
    text = os.environ.get(name, str(default))
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{name}={text!r}: must be a positive number of seconds.")
    return value


def round_batch_size(size: Any, num_parts: int, argument: str = "num_workers") -> int:
    """Return a global batch size, rounded down to a multiple of the parts of a step.

    Warn if that changes the size.
    """
    size = plain_int(size)
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"config[BATCH_SIZE] must be an int, but it is {size!r}.")
    if size < num_parts:
        raise ValueError(
            f"config[BATCH_SIZE]={size} is smaller than {argument}={num_parts}. Each needs at "
            "least one sample of a global batch."
        )
    part = size // num_parts
    if size % num_parts:
        warnings.warn(
            f"config[BATCH_SIZE]={size} is not a multiple of {argument}={num_parts}. The global "
            f"batch is {part * num_parts}, {part} for each.",
            stacklevel=5,  # the line that creates the trainer
        )
    return part * num_parts


def worker_config(config: Mapping[str, Any], num_parts: int, copies: bool = True) -> dict[str, Any]:
    """Return the config for one worker, with one of `num_parts` parts of the batch size.

    With `copies`, copy the values, so that a worker in the driver's process cannot change them.
    """
    own = {key: try_copy(value) if copies else value for key, value in config.items()}
    if own.get(BATCH_SIZE) is not None:
        own[BATCH_SIZE] //= num_parts
    return own
