"""The arguments of ``train_epoch``, also of older overrides."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

NUM_STEPS = "__num_steps__"
"""Key of ``info``: requested number of batches; None for the whole epoch."""
SCHEDULER_STEP = "scheduler_step"
"""Key of ``info``: the trainer's ``scheduler_step_freq``."""
USE_FP16 = "__use_fp16__"
"""Key of ``info``: whether training runs in mixed precision."""
_INFO_KEYS = (NUM_STEPS, SCHEDULER_STEP, USE_FP16)


def epoch_arguments(
    operator: Any, info: Mapping[str, Any], num_steps: int | None, epoch_idx: int
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments that ``train_epoch`` takes. Older overrides end at ``info``."""
    info = {
        **info,
        NUM_STEPS: num_steps,
        SCHEDULER_STEP: getattr(operator, "scheduler_step_freq", None),
        USE_FP16: operator.use_fp16,
    }
    parameters = inspect.signature(operator.train_epoch).parameters
    kinds = [each.kind for each in parameters.values()]
    named: dict[str, Any] = {"num_steps": num_steps, "epoch_idx": epoch_idx}
    positional = []
    # Older overrides may give the second parameter another name.
    if len(kinds) > 1 and kinds[1] <= inspect.Parameter.VAR_POSITIONAL:
        positional = [info]
    else:
        named["info"] = info
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        named = {name: value for name, value in named.items() if name in parameters}
    return positional, named


def info_of_user(info: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the info of an epoch without the keys that `epoch_arguments` adds."""
    return {name: value for name, value in (info or {}).items() if name not in _INFO_KEYS}
