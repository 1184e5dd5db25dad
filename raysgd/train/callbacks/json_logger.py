"""The log of a run as one JSON file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from raysgd.callbacks.values import json_dict
from raysgd.train.callbacks.callback import FileCallback
from raysgd.train.constants import RESULT_FILE_JSON

__all__ = ["JsonLoggerCallback"]


class JsonLoggerCallback(FileCallback):
    """Writes ``results.json``: a list with, for each report, the list of the workers' results.

    The file is whole after each report. What JSON has no form for is written as text.

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
        self.log_path.write_text("[]", encoding="utf-8")

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
