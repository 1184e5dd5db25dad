"""Options of the ready-made operators: defaults, and checks with clear errors."""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from raysgd._internal.arguments import closest
from raysgd._internal.config import BATCH_SIZE

logger = logging.getLogger(__name__)

REQUIRED: Any = type("Required", (), {"__repr__": lambda self: "required"})()


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option: a key of a config, its default, and its allowed values."""

    default: Any
    """Value if the config lacks the key. The default may be otherwise not allowed, such as None."""
    fits: Callable[[Any], bool]
    """Function that returns whether a value is allowed."""
    allowed: str
    """Description of the allowed values, to follow "must be"."""


def number(
    default: Any,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    above: bool = False,
    kind: type[Any] = numbers.Real,
) -> Option:
    """Return an option for a finite number from `low` to `high`, or above `low`.

    A default of None allows None too.
    """

    def fits(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, kind):
            return value is None and default is None
        is_finite = abs(value) < math.inf
        return is_finite and low <= value <= high and not (above and value == low)

    allowed = "an int" if kind is numbers.Integral else "a number"
    if low > -math.inf:
        allowed += f" above {low}" if above else f" of at least {low}"
    if high < math.inf:
        allowed += f" and at most {high}"
    if default is None:
        allowed += " or None"
    return Option(default=default, fits=fits, allowed=allowed)


def integer(default: Any, low: float = -math.inf) -> Option:
    """Return an option for an int of at least `low`. A default of None allows None too."""
    return number(default, low, kind=numbers.Integral)


def choice(default: Any, *values: Any) -> Option:
    """Return an option for one of several values."""
    return Option(
        default=default,
        fits=lambda value: any(type(value) is type(each) and value == each for each in values),
        allowed=" or ".join(map(repr, values)),
    )


def any_of(default: Any, fits: Callable[[Any], bool], allowed: str) -> Option:
    """Return an option with its own check. The default is always allowed."""
    return Option(
        default=default, fits=lambda value: value is default or fits(value), allowed=allowed
    )


def read_options(
    owner: str, options: Mapping[str, Option], config: Mapping[str, Any], warns: bool = True
) -> dict[str, Any]:
    """Return the value of each option, from `config` or its default.

    With `warns`, log a warning about each key that resembles an option.

    Raises:
        ValueError: If a value is missing or not allowed.
    """
    for key, option in options.items():
        if key in config and not option.fits(config[key]):
            raise ValueError(
                f"{owner}: config[{key!r}]={shown(config[key])} must be {option.allowed}."
            )
        if key not in config and option.default is REQUIRED:
            raise ValueError(f"{owner}: config[{key!r}] is missing; it must be {option.allowed}.")
    for key in config:
        if warns and isinstance(key, str) and key not in options and key != BATCH_SIZE:
            close = closest(key, options.keys() - config.keys(), cutoff=0.85)
            if close:
                logger.warning("%s has no option %r. Did you mean %r?", owner, key, close)
    return {key: _plain(config.get(key, option.default)) for key, option in options.items()}


def shown(value: Any) -> str:
    """Return the `repr` of a value, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _plain(value: Any) -> Any:
    """Convert NumPy numbers, which hyperparameter searches draw, to Python numbers."""
    return value.item() if isinstance(value, numbers.Number) and hasattr(value, "item") else value
