"""Read-only properties whose value is elsewhere."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any


def forward_to(source: str | Callable[[Any], Any], doc: str | None = None) -> Any:
    """Return a property: a function, or an attribute such as ``"_options.num_workers"``.

    It may override an attribute of a base class, and then needs no `doc` of its own.
    """
    return property(operator.attrgetter(source) if isinstance(source, str) else source, doc=doc)
