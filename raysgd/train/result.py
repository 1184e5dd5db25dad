"""What ``fit()`` returns, and the file of reports behind it."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysgd._internal.files import replacing
from raysgd.callbacks.values import jsonable
from raysgd.train.checkpoint import Checkpoint

__all__ = ["REPORTS", "ReportLog", "Result", "read_reports"]

REPORTS = "result.json"
"""Name of the file of what worker 0 reports."""


@dataclass
class Result:
    """What came of a run."""

    metrics: dict[str, Any] | None
    """What worker 0 reported last; None where it reported nothing."""
    checkpoint: Checkpoint | None
    """The newest checkpoint."""
    best_checkpoints: Sequence[tuple[Checkpoint, dict[str, Any]]] = ()
    """Those on disk, the best first, each with the numbers that came with it."""
    path: str = ""
    """Folder of the run."""
    error: BaseException | None = None
    """None: ``fit()`` raises what ended a run. It is there for scripts that look at it."""

    @property
    def history(self) -> list[dict[str, Any]]:
        """All that worker 0 reported, read from ``result.json``; before a `restore` as well."""
        return read_reports(Path(self.path) / REPORTS)

    @property
    def metrics_dataframe(self) -> Any:
        """All that worker 0 reported, as a pandas DataFrame.

        Raises:
            ImportError: if pandas is not installed.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise ImportError(
                f"metrics_dataframe needs pandas, which cannot be imported ({error}): "
                'pip install "raysgd[data]". The same is in `history`, as a list of dicts.'
            ) from error
        return pandas.DataFrame(self.history)

    @property
    def log_dir(self) -> str:
        """The same as `path`."""
        return self.path


def read_reports(path: Path) -> list[dict[str, Any]]:
    """Return the reports in a file of one JSON object a line; none if there is no such file."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):  # its writer was killed in the midst of it
            found.append(json.loads(line))
    return found


class ReportLog:
    """What worker 0 reports, as one JSON object a line; a restored run goes on with it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.last: dict[str, Any] | None = None

    def __enter__(self) -> ReportLog:
        earlier = read_reports(self._path)
        self.last = earlier[-1] if earlier else None
        # written anew, since the last line may have been cut off; beside it, since this may be, too
        with replacing(self._path) as file:
            file.write("".join(json.dumps(entry) + "\n" for entry in earlier).encode())
        self._file = self._path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, result: Mapping[str, Any]) -> None:
        """Add a report; what JSON has no form for is left out of the file."""
        self.last = dict(result)
        shown: dict[str, Any] = {}
        for key, value in result.items():
            with contextlib.suppress(TypeError, ValueError, RecursionError):
                shown |= jsonable({key: value}, keep_nan=True)
        self._file.write(json.dumps(shown) + "\n")
        self._file.flush()
