"""The log of a run as one JSON file."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from raysgd._internal.files import replacing
from raysgd.callbacks.values import json_dict
from raysgd.train.callbacks.callback import FileCallback
from raysgd.train.constants import RESULT_FILE_JSON

__all__ = ["JsonLoggerCallback"]


class JsonLoggerCallback(FileCallback):
    """Writes ``results.json``: a list with, for each report, the list of the workers' results.

    The file is whole after each report, and a restored run adds to it. What JSON has no form for
    is written as text.

    Args:
        logdir: the folder; None for that of the run.
        filename: name of the file; None for ``results.json``.
        workers_to_log: ranks of the workers whose results are written; None for all.
    """

    def __init__(
        self,
        logdir: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        workers_to_log: int | list[int] | None = 0,
    ) -> None:
        super().__init__(logdir, workers_to_log)
        self._filename = filename or RESULT_FILE_JSON

    def _begin(self, config: dict[str, Any]) -> None:
        rows = self._earlier_rows() if self._is_restored else []
        with replacing(self.log_path) as file:
            file.write(f"[{','.join(rows)}]".encode())

    def _earlier_rows(self) -> list[str]:
        """Return the whole lines of the file, without the comma or bracket at their ends."""
        if not self.log_path.exists():
            return []
        found = []
        for line in self.log_path.read_text(encoding="utf-8").splitlines()[1:]:
            with contextlib.suppress(ValueError):  # the process was killed while it wrote this line
                json.loads(line[:-1])
                found.append(f"\n{line[:-1]}")
        return found

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        """Add the results to the list."""
        text = json.dumps([json_dict(result, repr) for result in results])
        with self.log_path.open("rb+") as file:
            # over the bracket at the end, so that a long log costs no more than a short one
            end = file.seek(-1, os.SEEK_END)
            file.write(f"{',' if end > 1 else ''}\n{text}]".encode())

    @property
    def log_path(self) -> Path:
        """The file."""
        return self.logdir / self._filename
