"""Gauges in the metrics of Ray, which Prometheus can collect."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any


@functools.cache
def _gauge(name: str, description: str, tags: tuple[str, ...]) -> Any:
    from ray.util.metrics import Gauge

    return Gauge(name, description, tags)


def export(
    name: str, description: str, tags: tuple[str, ...], values: Mapping[tuple[str, ...], float]
) -> None:
    """Set a gauge, given its values by the values of its tags. Ray sends it in the background."""
    gauge = _gauge(name, description, tags)
    for given, value in values.items():
        gauge.set(value, dict(zip(tags, given, strict=True)))
