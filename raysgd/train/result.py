"""The result of ``fit()``, and the file with its reports."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysgd._internal.files import append_lines, read_lines
from raysgd._internal.imports import import_extra
from raysgd._internal.values import to_json_dict
from raysgd.train.checkpoint import Checkpoint
from raysgd.train.constants import TRAINING_ITERATION

REPORTS = "result.json"
"""Name of the file with the reports of worker 0."""


@dataclass
class Result:
    """The result of a run."""

    metrics: dict[str, Any] | None
    """Last report of worker 0; None if worker 0 reported nothing."""
    checkpoint: Checkpoint | None
    best_checkpoints: Sequence[tuple[Checkpoint, dict[str, Any]]] = ()
    """Checkpoints on disk, best first, each with the numbers that were reported with it."""
    path: str = ""
    error: BaseException | None = None
    """Always None, because ``fit()`` raises errors. For scripts that read this attribute."""

    @property
    def log_dir(self) -> Path:
        """`path` as a Path."""
        return Path(self.path)

    @property
    def history(self) -> list[dict[str, Any]]:
        """All reports of worker 0, also from before a `restore`. Repeated ones count once."""
        return read_reports(Path(self.path) / REPORTS)

    @property
    def metrics_dataframe(self) -> Any:
        """All reports of worker 0, as a DataFrame of pandas, which must be installed."""
        return import_extra("Result.metrics_dataframe", "pandas", "data").DataFrame(self.history)


def read_reports(path: Path) -> list[dict[str, Any]]:
    """Return the reports in a file of JSON lines, except those that a restart has repeated."""
    reports: list[dict[str, Any]] = []
    for report in read_lines(path):
        number = report.get(TRAINING_ITERATION, math.inf)
        while reports and reports[-1].get(TRAINING_ITERATION, 0) >= number:
            reports.pop()
        reports.append(report)
    return reports


def append_report(path: Path, report: Mapping[str, Any]) -> None:
    """Append a report to a file of JSON lines, without the values that JSON cannot represent."""
    append_lines(path, [to_json_dict(report, keep_nan=True)], keep_nan=True)
