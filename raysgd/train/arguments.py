"""Checks and conversions of the arguments of trainers and executors."""

from __future__ import annotations

import datetime
import functools
import inspect
import itertools
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from raysgd._internal.arguments import MOST_WORKERS, checked_dict, is_deferred
from raysgd._internal.paths import checked_path
from raysgd.cluster.serialization import dumps, unpicklable_key

logger = logging.getLogger(__name__)


def checked_size(num_workers: Any) -> tuple[int, int]:
    """Return the minimum and the maximum number of workers that ``num_workers`` asks for."""
    pair = num_workers if isinstance(num_workers, tuple | list) else (num_workers, num_workers)
    if (
        len(pair) != 2
        or any(isinstance(n, bool) or not isinstance(n, int) for n in pair)
        or not 1 <= pair[0] <= pair[1] <= MOST_WORKERS
    ):
        raise ValueError(
            f"num_workers={num_workers!r}: must be an int from 1 to {MOST_WORKERS}, or a pair "
            "(min, max) of such ints."
        )
    return pair[0], pair[1]


def bound_function(
    train_func: Callable[..., Any], config: dict[str, Any] | None
) -> Callable[[], Any]:
    """Return the training function, bound to its config, as a function of no arguments."""
    if not callable(train_func):
        raise ValueError(f"The training function must be callable, but it is {train_func!r}.")
    if is_deferred(train_func):
        raise TypeError(
            f"The training function {train_func!r} is a generator or async function. Pass a plain "
            "function, which may call asyncio.run(...)."
        )
    parameters = inspect.signature(train_func).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind != p.VAR_KEYWORD]
    if len(required) > 1:
        raise ValueError(
            f"The training function {train_func!r} requires {len(required)} arguments. It may "
            "require only one, the config."
        )
    if required:
        return functools.partial(train_func, {} if config is None else config)
    if config and parameters:
        logger.warning(
            "%r is called without the config, because it requires no argument. To get the config, "
            "write def train_func(config).",
            train_func,
        )
    return train_func


def worker_resources(
    use_gpu: bool, resources: Mapping[str, float] | None
) -> tuple[float, float, dict[str, float]]:
    """Return the CPUs, GPUs, and other resources of each worker."""
    others = checked_dict("ScalingConfig", "resources_per_worker", resources)
    if use_gpu not in (True, False):  # 1 and 0 as well
        raise TypeError(f"use_gpu={use_gpu!r}: must be True or False.")
    num_cpus, num_gpus = others.pop("CPU", 1), others.pop("GPU", int(use_gpu))
    if bool(use_gpu) != (num_gpus > 0):
        raise ValueError(
            f"resources_per_worker={{'GPU': {num_gpus!r}}} contradicts use_gpu={use_gpu}. Change "
            "one of them."
        )
    return num_cpus, num_gpus, others


def env_flag(name: str, default: bool = False) -> bool:
    return os.environ.get(name, str(int(default))) in ("1", "true", "True")


def run_folder(
    kind: str,
    name: str | os.PathLike[str] | None,
    parent: str | os.PathLike[str] | None = None,
) -> Path:
    """Return the absolute path of a folder. The default name is `kind` and the date."""
    date = f"{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}"
    path = f"{kind}_{date}" if name is None else checked_path("logdir", name)
    return Path(parent or "~/ray_results").expanduser().absolute() / path


def make_folder(wanted: Path) -> Path:
    """Create and return a folder for one run: `wanted`, or a numbered name if it exists."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    folder = wanted
    for number in itertools.count(2):
        try:
            folder.mkdir()
            break
        except FileExistsError:
            folder = wanted.with_name(f"{wanted.name}_{number:03d}")
    if folder != wanted:
        logger.warning("%s exists, so this run is in %s.", wanted, folder)
    return folder


def pickled_function(function: Callable[[], Any]) -> bytes:
    """Return the pickled training function, including its bound config."""
    try:
        return dumps(function)
    except Exception as error:
        name, bound = "the training function", getattr(function, "args", ())
        if bound and isinstance(bound[0], Mapping) and (key := unpicklable_key(bound[0])):
            name = f"config[{key!r}]"
        raise TypeError(
            f"Cannot send {name} to the workers, because it cannot be pickled: {error}. Create "
            "such objects in the training function."
        ) from error
