"""The log of what worker 0 reports, which a restored run goes on with."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raysgd.callbacks.values import jsonable
from raysgd.train.result import read_reports

__all__ = ["ReportLog"]


class ReportLog:
    """What worker 0 has reported, as one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.last: dict[str, Any] | None = None

    def __enter__(self) -> ReportLog:
        earlier = read_reports(self._path)
        self.last = earlier[-1] if earlier else None
        # written anew, since the last line may have been cut off; beside it, since this may be, too
        temporary = self._path.with_name(f"{self._path.name}.new")
        text = "".join(json.dumps(entry) + "\n" for entry in earlier)
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, self._path)
        self._file = self._path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, result: Mapping[str, Any]) -> None:
        """Add a report."""
        self.last = dict(result)
        shown = {key: value for key, value in result.items() if _has_form({key: value})}
        self._file.write(json.dumps(jsonable(shown)) + "\n")
        self._file.flush()


def _has_form(value: Any) -> bool:
    try:
        jsonable(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
