"""Metrics and configs as plain values that files and services take."""

from __future__ import annotations

import contextlib
import math
import numbers
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from raysgd._internal.arguments import closest
from raysgd._internal.paths import HIDDEN, without_secrets

__all__ = [
    "json_dict",
    "jsonable",
    "numbers_in",
    "plain_values",
    "scalars",
    "shown_config",
    "shown_repr",
    "suggest_metric",
]

_SECRET = re.compile(r"(?i:password|passwd|passphrase|secret|credential)")
_MAYBE_SECRET = re.compile(
    r"(?i:key|token)s?(?![a-z])|(?<![a-z])(?:pass|pwd|auth)(?![a-z])|(?i:authorization)"
)
"""In names of what is a secret unless it is a number, as num_tokens is; a tokenizer is none."""
_IN_REPR = re.compile(rf"""{_SECRET.pattern}|{_MAYBE_SECRET.pattern}['"]?\s*[=:]\s*(?![\d-])""")


def suggest_metric(name: str, metrics: Iterable[str]) -> str:
    """Return the question whether another metric is meant; empty if none is near.

    >>> known = ["val_loss", "val_f1"]
    >>> suggest_metric("val_los", known), suggest_metric("f1", known)
    (" Is 'val_loss' meant?", " Is 'val_f1' meant?")
    """
    known = list(metrics)
    ends = [each for each in known if each.endswith((f"_{name}", f"/{name}"))]
    close = ends[0] if ends else closest(name, known)
    return f" Is {close!r} meant?" if close else ""


def shown_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config as others may see it: ``***`` in place of what its name calls a secret.

    >>> shown_config({"lr": 0.5, "wandb": {"apiKey": "abc"}, "max_tokens": 5, "db_password": 1})
    {'lr': 0.5, 'wandb': {'apiKey': '***'}, 'max_tokens': 5, 'db_password': '***'}
    >>> shown_config({"db_pass": "abc", "auth": ["abc"], "num_passes": "all", "author": "me"})
    {'db_pass': '***', 'auth': '***', 'num_passes': 'all', 'author': 'me'}
    """
    shown = {}
    for name, value in config.items():
        with contextlib.suppress(RecursionError):  # one that holds itself has no end to show
            shown[name] = _to_plain(value, str(name))
    return shown


def _to_plain(value: Any, name: str) -> Any:
    is_plain = value is None or isinstance(value, numbers.Number)
    if _SECRET.search(name) or (not is_plain and _MAYBE_SECRET.search(name)):
        return HIDDEN
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, Mapping):
        return {key: _to_plain(held, str(key)) for key, held in value.items()}
    return [_to_plain(held, "") for held in value] if isinstance(value, list | tuple) else value


def shown_repr(value: Any) -> str:
    """Return an object's ``repr``; only its type where that names something that may be a secret.

    >>> shown_repr({"a"}), shown_repr(frozenset({("password", "abc")}))
    ("{'a'}", 'frozenset(***)')
    """
    text = without_secrets(repr(value))
    return f"{type(value).__name__}({HIDDEN})" if _IN_REPR.search(text) else text


def scalars(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float | int | str]:
    """Return the numbers and texts in `metrics`; of nested dicts as ``outer/inner``.

    >>> scalars({"loss": 0.5, "profile": {"mean_fwd_s": 1.0}, "note": "x", "other": [1]})
    {'loss': 0.5, 'profile/mean_fwd_s': 1.0, 'note': 'x'}
    """
    return {name: v for name, v in plain_values(metrics, prefix).items() if not isinstance(v, list)}


def plain_values(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the same, and lists, arrays and tensors as lists.

    >>> plain_values({"f1": {"cat": 0.5}, "matrix": [(1, 0), (0, float("nan"))], "odd": {1}})
    {'f1/cat': 0.5, 'matrix': [[1, 0], [0, 'nan']]}
    """
    found: dict[str, Any] = {}
    for key, value in metrics.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found.update(plain_values(value, f"{name}/"))
        elif (plain := _plain(value)) is not None:
            found[name] = plain
        elif isinstance(held := _listed(value), list | tuple):
            with contextlib.suppress(TypeError, ValueError, RecursionError):
                found[name] = jsonable(held)
    return found


def _listed(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def numbers_in(metrics: Mapping[str, Any]) -> dict[str, float | int]:
    """Return the numbers in `metrics`, as `scalars` does."""
    return {name: v for name, v in scalars(metrics).items() if not isinstance(v, str)}


def jsonable(value: Any, keep_nan: bool = False) -> Any:
    """Return `value` as JSON has it, with ``"nan"`` and ``"inf"`` as texts.

    >>> jsonable({"a": (1, float("nan")), "b": -float("inf")})
    {'a': [1, 'nan'], 'b': '-inf'}

    Args:
        value: the value.
        keep_nan: whether these stay numbers, which `json` writes and reads as NaN and Infinity.

    Raises:
        TypeError: if it has no such form.
    """
    if value is None or isinstance(value, str | bool):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("JSON has only texts as keys")
        return {str(key): jsonable(held, keep_nan) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(held, keep_nan) for held in value]
    plain = _plain(value)
    if plain is None:
        raise TypeError(f"JSON has no {type(value).__name__}")
    if isinstance(plain, float) and not math.isfinite(plain) and not keep_nan:
        return str(plain)
    return plain


def json_dict(
    values: Mapping[Any, Any], otherwise: Callable[[Any], Any] | None = None
) -> dict[str, Any]:
    """Return a dict as JSON has it.

    >>> json_dict({"lr": 0.5, "odd": {1}}), json_dict({"odd": {1}}, repr)
    ({'lr': 0.5}, {'odd': '{1}'})

    Args:
        values: the dict.
        otherwise: gives something in place of a value that JSON has no form for; with None it is
            left out.
    """
    found = {}
    for key, value in values.items():
        try:
            found[str(key)] = jsonable(value)
        except (TypeError, ValueError, RecursionError):
            if otherwise is not None:
                found[str(key)] = otherwise(value)
    return found


def _plain(value: Any) -> float | int | str | None:
    """Return a number or a text as Python's own; None where it is neither."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, numbers.Number):  # before `item`: that of a long double is one again
        if isinstance(value, numbers.Integral):
            return int(value)
        return float(value) if isinstance(value, numbers.Real) else None
    if hasattr(value, "item") and (hasattr(value, "numel") or hasattr(value, "size")):
        size = value.numel() if hasattr(value, "numel") else value.size
        return _plain(value.item()) if size == 1 else None
    return None
