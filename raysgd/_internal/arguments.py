"""Checks of arguments. `caller` is the class or method that messages name."""

import difflib
import functools
import inspect
import logging
import math
import numbers
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

logger = logging.getLogger(__name__)

_F = TypeVar("_F", bound=Callable[..., Any])
_NOTHING = nullcontext()

MAX_WORKERS = 10_000  # for more, Ray takes minutes to report that there is no room


def closest_name(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the most similar of the known names, or an empty string if none is similar.

    >>> closest_name("num_worker", ["config", "num_workers"]), closest_name("x", ["config"])
    ('num_workers', '')
    """
    return next(iter(difflib.get_close_matches(name, known, 1, cutoff)), "")


def unknown_argument(caller: str, name: str, known: Iterable[str]) -> TypeError:
    close = closest_name(name, known)
    hint = f" Did you mean {close!r}?" if close else ""
    return TypeError(f"{caller}() got an unexpected keyword argument {name!r}.{hint}")


def suggest_arguments(method: _F, context: AbstractContextManager[object] = _NOTHING) -> _F:
    """Name the closest argument in the error of a call with an unknown one."""
    known = inspect.signature(method).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in () if takes_any else kwargs.keys() - known.keys():
            caller = f"{type(args[0]).__name__}.{method.__name__}".removesuffix(".__init__")
            raise unknown_argument(caller, name, known)
        with context:
            return method(*args, **kwargs)

    return cast(_F, call)


def set_fields(options: Any, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(options, name, value)


def plain_int(value: Any) -> Any:
    """Return a whole number, such as ``numpy.int64(3)`` or 3.0, as an int, else `value`."""
    is_integer = isinstance(value, numbers.Integral) or (
        isinstance(value, float) and value.is_integer()
    )
    return int(value) if is_integer and not isinstance(value, bool) else value


def is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def as_int(
    caller: str, name: str, value: Any, lowest: int | None = None, highest: int | None = None
) -> int:
    """Return an argument as an int from `lowest` to `highest`."""
    value = plain_int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{caller}({name}={value!r:.200}): must be an int.")
    if lowest is not None and value < lowest:
        raise ValueError(f"{caller}({name}={value}): must be at least {lowest}.")
    if highest is not None and value > highest:
        raise ValueError(f"{caller}({name}={value}): must be at most {highest}.")
    return value


def check_number(caller: str, name: str, value: Any, above: float = -1) -> None:
    """Check that an argument is a finite number of at least 0, and `above` a limit."""
    if not is_number(value):
        raise TypeError(f"{caller}({name}={value!r:.200}): must be a number.")
    if not 0 <= value < math.inf:
        raise ValueError(f"{caller}({name}={value!r}): must be at least 0, and finite.")
    if value <= above:
        raise ValueError(f"{caller}({name}={value!r}): must be above {above}.")


def check_timeout(caller: str, seconds: Any) -> None:
    if not is_number(seconds) or not 0 < seconds <= 1e9:  # `socket` refuses 1e10
        raise ValueError(f"{caller}(timeout_s={seconds!r}): must be above 0, at most 1e9 seconds.")


_SMALLER = re.compile(
    r"(?i)loss|error|mae|mse|nll|perplexity|distance|brier|(err|fid|ppl|(?<![a-z])wer)(?![a-z])"
)
_LARGER = re.compile(
    r"(?i)acc|auc|auroc|f1|precision|recall|specificity|iou|dice|(?<![a-z])map|r2|bleu|psnr|reward"
)


def resolve_mode(caller: str, monitor: Any, mode: Any) -> Any:
    """Return "min" or "max": the given mode, or the one that fits the name of a metric."""
    check_choice(caller, "mode", mode, ("min", "max", None))
    if not isinstance(monitor, str | None):
        raise TypeError(f"{caller}(monitor={monitor!r:.200}): must be the name of a metric.")
    if mode is None and monitor is not None and not _SMALLER.search(monitor):
        if _LARGER.search(monitor):
            return "max"
        text = '%s(monitor=%r): smaller values count as better. If not, pass mode="max".'
        logger.warning(text, caller, monitor)
    return mode or "min"


def check_choice(caller: str, name: str, value: Any, allowed: Collection[Any]) -> None:
    if not any(value is choice or (type(value) is str and value == choice) for choice in allowed):
        choices = ", ".join(repr(choice) for choice in allowed)
        raise ValueError(f"{caller}({name}={value!r:.200}): must be one of {choices}.")


def check_flags(caller: str, **flags: Any) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{caller}({name}={value!r:.200}): must be True or False.")


def as_dict(caller: str, name: str, value: Any) -> dict[str, Any]:
    """Return a copy of a dict. None gives an empty dict."""
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(f"{caller}({name}={value!r:.200}): must be a dict.")
    return dict(value or {})


def is_deferred(function: Any) -> bool:
    """Return whether a call of a function only creates a generator or a coroutine."""
    kinds = (
        inspect.isgeneratorfunction,
        inspect.iscoroutinefunction,
        inspect.isasyncgenfunction,
    )
    bodies = (function, getattr(type(function), "__call__", None))  # noqa: B004
    return any(kind(body) for kind in kinds for body in bodies)


def check_function(caller: str, name: str, function: Any) -> None:
    if not callable(function):
        raise TypeError(f"{caller}({name}={function!r:.200}): must be a function.")
    if is_deferred(function):
        raise TypeError(
            f"{caller}({name}={function!r}): must be a plain function, not a generator or an async "
            "function. It can call asyncio.run()."
        )
