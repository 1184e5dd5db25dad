"""Read-only properties whose value is elsewhere."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any


def forward_to(source: str | Callable[[Any], Any], doc: str) -> Any:
    """Return a property: a function, or an attribute such as ``"_options.num_workers"``."""
    return property(operator.attrgetter(source) if isinstance(source, str) else source, doc=doc)
