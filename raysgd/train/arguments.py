"""Checks and conversions of the arguments of trainers and executors."""

import contextlib
import datetime
import functools
import inspect
import itertools
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from raysgd._internal.arguments import check_function
from raysgd._internal.paths import as_path
from raysgd.cluster.serialization import dumps, find_unpicklable

logger = logging.getLogger(__name__)


def bind_config(train_func: Callable[..., Any], config: dict[str, Any] | None) -> Callable[[], Any]:
    """Return the training function, bound to its config, as a function of no arguments."""
    if not callable(train_func):
        raise ValueError(f"The training function must be callable, but it is {train_func!r}.")
    check_function("run", "train_func", train_func)
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


def env_flag(name: str, default: bool = False) -> bool:
    return os.environ.get(name, str(int(default))) in ("1", "true", "True")


def run_folder(
    kind: str,
    name: str | os.PathLike[str] | None,
    parent: str | os.PathLike[str] | None = None,
) -> Path:
    """Return the absolute path of a folder. The default name is `kind` and the date."""
    date = f"{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}"
    path = f"{kind}_{date}" if name is None else as_path("logdir", name)
    return Path(parent or "~/ray_results").expanduser().absolute() / path


def make_folder(wanted: Path) -> Path:
    """Create and return a folder for one run: `wanted`, or a numbered name if it exists."""
    others = (f"{wanted.name}_{number:03d}" for number in itertools.count(2))
    folder = new_folder(wanted.parent, itertools.chain([wanted.name], others))
    if folder != wanted:
        logger.warning("%s exists, so this run is in %s.", wanted, folder)
    return folder


def new_folder(parent: Path, names: Iterable[str]) -> Path:
    """Create and return the first of these folders that does not exist."""
    parent.mkdir(parents=True, exist_ok=True)
    for folder in map(parent.joinpath, names):
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            break
    return folder


def pickle_function(function: Callable[[], Any]) -> bytes:
    """Return the pickled training function, including its bound config."""
    try:
        return dumps(function)
    except Exception as error:
        config = "".join(find_unpicklable(each)[0] for each in getattr(function, "args", ()))
        used, _ = find_unpicklable(getattr(function, "func", function))
        name = f"config{config}" if config else f"the training function{used}"
        raise TypeError(
            f"Cannot send {name} to the workers, because it cannot be pickled: {error}. Create "
            "such objects in the training function."
        ) from error
