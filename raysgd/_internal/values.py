"""Metrics and configs as plain values that files and services accept."""

import contextlib
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from raysgd._internal.paths import HIDDEN, is_secret, without_secrets


def missing_metric(callback: str, name: str, metrics: Iterable[str]) -> str:
    """Return the error message for a monitored metric that does not exist."""
    return (
        f"{callback}(monitor={name!r}): there is no such metric. The metrics are: "
        f"{', '.join(metrics)}."
    )


def redact_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with ``***`` in place of secrets, which their names identify.

    >>> redact_config({"lr": 0.5, "wandb": {"apiKey": "abc"}, "max_tokens": 5, "db_password": 1})
    {'lr': 0.5, 'wandb': {'apiKey': '***'}, 'max_tokens': 5, 'db_password': '***'}
    >>> redact_config({"db_pass": "abc", "auth": ["abc"], "num_passes": "all", "author": "me"})
    {'db_pass': '***', 'auth': '***', 'num_passes': 'all', 'author': 'me'}
    """
    shown = {}
    for name, value in config.items():
        with contextlib.suppress(RecursionError):  # a value that contains itself
            shown[name] = _without_secrets(value, str(name))
    return shown


def _without_secrets(value: Any, name: str) -> Any:
    if is_secret(name, is_count=value is None or isinstance(value, numbers.Number)):
        return HIDDEN
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, Mapping):
        return {key: _without_secrets(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_secrets(item, "") for item in value]
    return value


def flatten_scalars(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float | int | str]:
    """Return the numbers and strings in metrics. Names of nested values are ``outer/inner``.

    >>> flatten_scalars({"loss": 0.5, "profile": {"mean_fwd_s": 1.0}, "note": "x", "other": [1]})
    {'loss': 0.5, 'profile/mean_fwd_s': 1.0, 'note': 'x'}
    """
    flat: dict[str, float | int | str] = {}
    for key, value in metrics.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flatten_scalars(value, f"{name}/")
        elif (plain := _as_scalar(value)) is not None:
            flat[name] = plain
    return flat


def numbers_in(metrics: Mapping[str, Any]) -> dict[str, float | int]:
    """Return the numbers in metrics. Names of nested numbers are ``outer/inner``."""
    return {name: v for name, v in flatten_scalars(metrics).items() if not isinstance(v, str)}


def to_jsonable(value: Any, keep_nan: bool = False) -> Any:
    """Return `value` with JSON types only, or raise TypeError.

    Numbers that are not finite become strings, unless `keep_nan`.

    >>> to_jsonable({"a": (1, float("nan")), "b": -float("inf")})
    {'a': [1, 'nan'], 'b': '-inf'}
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {str(key): to_jsonable(item, keep_nan) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_jsonable(item, keep_nan) for item in value]
    if (plain := _as_scalar(value)) is None:
        raise TypeError(f"JSON cannot represent {value!r:.100}.")
    if isinstance(plain, float) and not math.isfinite(plain) and not keep_nan:
        return str(plain)
    return plain


def to_json_dict(
    values: Mapping[Any, Any],
    otherwise: Callable[[Any], Any] | None = None,
    keep_nan: bool = False,
) -> dict[str, Any]:
    """Return a dict with JSON types only. `otherwise` converts other values; None omits them.

    >>> to_json_dict({"lr": 0.5, "odd": {1}}), to_json_dict({"odd": {1}}, repr)
    ({'lr': 0.5}, {'odd': '{1}'})
    """
    converted = {}
    for key, value in values.items():
        try:
            converted[str(key)] = to_jsonable(value, keep_nan)
        except (TypeError, ValueError, RecursionError):
            if otherwise is not None:
                converted[str(key)] = otherwise(value)
    return converted


def _as_scalar(value: Any) -> float | int | str | None:
    """Return a number or string as a Python type, or None if it is neither."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, numbers.Real):  # before `item`, which returns a long double unchanged
        with contextlib.suppress(OverflowError):
            number = float(value)
            return int(value) if isinstance(value, numbers.Integral) else number
        return -math.inf if value < 0 else math.inf
    if isinstance(value, numbers.Complex):
        return None
    if hasattr(value, "tolist") and math.prod(value.shape) == 1:  # an array or a tensor
        return _as_scalar(value.item())
    with contextlib.suppress(Exception):  # such as a tensor of TensorFlow
        return float(value) if hasattr(value, "__float__") else None
    return None
