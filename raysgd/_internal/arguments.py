"""What the arguments of trainers must be; `trainer` is the name of the one that was called."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar, cast

from raysgd._internal.tracebacks import shorten

__all__ = [
    "MOST_WORKERS",
    "check_choice",
    "check_flags",
    "check_hook",
    "check_timeout",
    "check_workers",
    "checked_config",
    "checked_resources",
    "is_number",
    "suggests",
    "unknown_argument",
    "whole",
]

_Method = TypeVar("_Method", bound=Callable[..., Any])
MOST_WORKERS = 10_000
"""Ray would be busy for minutes with the requests of more, before it says that it has no room."""


def suggests(method: _Method) -> _Method:
    """Let a method, such as ``__init__``, say of an unknown argument which one may be meant.

    One with ``**arguments`` says so itself. What it raises has the frames of the user alone.
    """
    own = inspect.signature(method).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in own.values())
    is_init = method.__name__ == "__init__"

    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in own and not takes_any:
                if not is_init:
                    raise unknown_argument(f"{type(self).__name__}.{method.__name__}", name, own)
                # a subclass that passes it on may take more
                known = {**own, **inspect.signature(type(self)).parameters}
                raise unknown_argument(type(self).__name__, name, known)
        try:
            return method(self, *args, **kwargs)
        except (Exception, KeyboardInterrupt) as error:
            shorten(error)
            raise

    return cast(_Method, checked)


def unknown_argument(trainer: str, name: str, known: Iterable[str]) -> TypeError:
    """Return the error for an argument that there is not, with the one that it is close to."""
    close = difflib.get_close_matches(name, known, 1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return TypeError(f"{trainer}() got an unexpected keyword argument {name!r}.{hint}")


def check_hook(trainer: str, hook: Any) -> None:
    """Check that an initialization hook can be called."""
    if hook is not None and not callable(hook):
        raise TypeError(
            f"{trainer}(initialization_hook=...) must be a function, but it is {hook!r}."
        )
    kinds = (
        inspect.isgeneratorfunction,
        inspect.iscoroutinefunction,
        inspect.isasyncgenfunction,
    )
    if any(is_kind(each) for is_kind in kinds for each in (hook, type(hook).__call__)):
        raise TypeError(
            f"{trainer}(initialization_hook={hook!r}): to call a generator or an async function "
            "runs nothing of it. Use a plain function, with asyncio.run() in it where it has to be."
        )


def checked_config(trainer: str, config: Any) -> dict[str, Any]:
    """Return the config as a dict of its own."""
    if config is not None and not isinstance(config, Mapping):
        raise TypeError(f"{trainer}(config=...) must be a dict, but it is {config!r}.")
    return dict(config or {})


def check_workers(trainer: str, num_workers: Any, min_workers: Any) -> None:
    """Check the numbers of workers."""
    for name, value in (("num_workers", num_workers), ("min_workers", min_workers)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{trainer}({name}={value!r}): must be an int.")
    if num_workers <= 0:
        raise ValueError(f"{trainer}(num_workers={num_workers}): must be at least 1.")
    if num_workers > MOST_WORKERS:
        raise ValueError(f"{trainer}(num_workers={num_workers}): must be at most {MOST_WORKERS}.")
    if not 1 <= min_workers <= num_workers:
        raise ValueError(
            f"{trainer}(min_workers={min_workers}, num_workers={num_workers}): min_workers must "
            "be between 1 and num_workers."
        )


def checked_resources(trainer: str, resources: Any, num_cpus: Any) -> dict[str, float]:
    """Return what each worker reserves beside CPUs."""
    if not is_number(num_cpus) or not num_cpus > 0:
        raise ValueError(
            f"{trainer}(num_cpus_per_worker={num_cpus!r}): must be above 0; 0.001 reserves next to "
            "nothing."
        )
    if resources is not None and not isinstance(resources, Mapping):
        raise TypeError(
            f"{trainer}(resources_per_worker=...) must be a dict, but it is {resources!r}."
        )
    found = dict(resources or {})
    for name, amount in found.items():
        if not is_number(amount) or not amount > 0:
            raise ValueError(
                f"{trainer}(resources_per_worker={{{name!r}: {amount!r}}}): must be above 0."
            )
    if "CPU" in found:
        raise ValueError(
            f"{trainer}(resources_per_worker=...) has 'CPU'; use num_cpus_per_worker for it."
        )
    return found


def check_choice(trainer: str, name: str, value: Any, allowed: Collection[Any]) -> None:
    """Check that a value is one of those that are allowed."""
    if not any(value is choice or (type(value) is str and value == choice) for choice in allowed):
        raise ValueError(
            f"{trainer}({name}={value!r}): must be one of "
            f"{', '.join(repr(choice) for choice in allowed)}."
        )


def check_flags(trainer: str, **flags: Any) -> None:
    """Check that values, given by the names of the arguments, are True or False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{trainer}({name}={value!r}): must be True or False.")


def check_timeout(trainer: str, timeout_s: Any) -> None:
    """Check a bound in seconds."""
    if not is_number(timeout_s) or not 0 < timeout_s < math.inf:
        raise ValueError(
            f"{trainer}(timeout_s={timeout_s!r}): must be a positive number of seconds."
        )


def whole(value: Any) -> Any:
    """Return a count as an int, also one of numpy's and 3.0; what is no whole number as it is."""
    is_whole = isinstance(value, numbers.Integral) or (
        isinstance(value, float) and value.is_integer()
    )
    return int(value) if is_whole and not isinstance(value, bool) else value


def is_number(value: Any) -> bool:
    """Whether a value is a number that is not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)
