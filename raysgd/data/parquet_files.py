"""Numbered rows of Parquet files."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from raysgd._internal.imports import import_extra
from raysgd.data.formats import Records, consecutive_runs


class parquet(Records):  # noqa: N801  users call the formats like functions
    """The rows of Parquet files as dicts, with all `columns` by default.

    Row groups are decoded as a whole. `Records` describes the other arguments.
    """

    def __init__(self, paths: Any, *, columns: Sequence[str] | None = None, **options: Any) -> None:
        names = [] if isinstance(columns, str) or not isinstance(columns, Iterable) else [*columns]
        if columns is not None and not (names and all(isinstance(name, str) for name in names)):
            raise TypeError(f"parquet(columns={columns!r}): must be a list of names, or None.")
        _pyarrow()  # takes 0.1 s, which the first batch should not wait for
        self._columns = names or None
        super().__init__(paths, **options)
        sizes = [np.diff(index).max() for index in self._indexes if len(index) > 1]
        self.block = int(max(sizes, default=1))

    def _build_index(self, file: int) -> np.ndarray[Any, Any]:
        metadata = self._with_file(file, lambda opened: _pyarrow().ParquetFile(opened).metadata)
        sizes = [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]
        return np.array([0, *itertools.accumulate(sizes)], np.int64)

    def _num_records(self, index: Any) -> int:
        return int(index[-1])

    def _read(self, file: int, numbers: np.ndarray[Any, Any]) -> list[Any]:
        index, records = self._indexes[file], []
        groups = np.searchsorted(index, numbers, side="right") - 1
        for first, stop in consecutive_runs(groups, 0):
            group = int(groups[first])
            rows, table = numbers[first:stop] - index[group], self._table(file, group)
            is_run = bool((rows[1:] - rows[:-1] == 1).all())
            selected = table.slice(int(rows[0]), len(rows)) if is_run else table.take(rows)
            records += selected.to_pylist()
            if self.in_order and numbers[stop - 1] == index[group + 1] - 1:
                self._tables.move_to_end((file, group), last=False)  # the first to be released
        return records

    def _row_group(self, opened: Any, group: int) -> Any:
        # INT96 of Spark: nanoseconds, the default, wrap around after 2262
        file = _pyarrow().ParquetFile(opened, coerce_int96_timestamp_unit="us")
        schema, names = file.schema_arrow, file.schema_arrow.names
        if missing := set(self._columns or ()) - set(names):
            raise ValueError(
                f"parquet(columns={self._columns!r}): there is no {sorted(missing)}. The columns "
                f"are {names}."
            )
        if repeated := [n for n in self._columns or names if schema.get_field_index(n) < 0]:
            raise ValueError(
                f"parquet(): several columns have the name {repeated[0]!r}. Rename them, or pass "
                "the names of other columns=[...]."
            )
        return file.read_row_group(group, columns=self._columns, use_threads=False)

    def _table(self, file: int, group: int) -> Any:
        key = file, group
        if key not in self._tables:
            while sum(map(len, self._tables.values())) > self.kept_rows:
                self._tables.popitem(last=False)
            self._tables[key] = self._with_file(file, lambda opened: self._row_group(opened, group))
        self._tables.move_to_end(key)
        return self._tables[key]


def _pyarrow() -> Any:
    return import_extra("parquet()", "pyarrow.parquet", "data")
