"""Read-only properties whose value is elsewhere."""

import operator
from typing import Any


def forward_to(path: str, doc: str | None = None) -> Any:
    """Return a property that reads a path of attributes, such as ``"_options.num_workers"``.

    It may override an attribute of a base class, and then needs no `doc` of its own.
    """
    return property(operator.attrgetter(path), doc=doc)
