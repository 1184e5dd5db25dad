"""Objects that users register: a single one, a list, or a tuple."""

from __future__ import annotations

from typing import Any


def listed(given: Any) -> list[Any]:
    """Return registered objects as a new list."""
    return list(given) if isinstance(given, list | tuple) else [given]


def shaped_like(given: Any, members: list[Any]) -> Any:
    """Return `members` in the shape of `given`: a single one, a list, or a tuple."""
    if isinstance(given, tuple):
        return tuple(members)
    return members if isinstance(given, list) else members[0]
