"""Gauges in the metrics of Ray, which Prometheus can collect."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any


@functools.cache
def _gauge(name: str, description: str, tags: tuple[str, ...]) -> Any:
    from ray.util.metrics import Gauge

    return Gauge(name, description, tags)


def export(
    name: str, description: str, tags: tuple[str, ...], rows: Iterable[tuple[Any, ...]]
) -> None:
    """Set a gauge to the first value of each row, with the others as tags.

    Ray sends the values in the background.
    """
    gauge = _gauge(name, description, tags)
    for value, *tag_values in rows:
        gauge.set(value, dict(zip(tags, map(str, tag_values), strict=True)))
