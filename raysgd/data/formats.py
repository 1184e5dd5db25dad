"""The formats of files of numbered records: JSON lines, text, tar, and Parquet."""

import io
import itertools
import json
import re
import tarfile
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from raysgd._internal.imports import import_extra
from raysgd.data.records import BLOCK_BYTES, ByteRecords, RecordError, Records, consecutive_runs

_NUM_TESTED = 8000  # first bytes, among which text has no zero; Git uses the same rule


class text(ByteRecords):  # noqa: N801  users call the formats like functions
    """The lines of text files, without line ends.

    `Records` describes the arguments.
    """

    unit = "line"
    keeps_blank = True

    def _build_index(self, file: int) -> np.ndarray[Any, Any]:
        starts, offset, rest = [], 0, b""
        while data := self._read_at(file, offset + len(rest), BLOCK_BYTES):
            if b"\0" in data[: 0 if offset else _NUM_TESTED] or bytes(512) in data:  # it was cut
                raise RecordError(
                    f"{self.label(file)}: has zero bytes, so it is not UTF-8 text, or cut. Read "
                    "tar archives with tar(), Parquet files with parquet(), and convert others."
                )
            data = rest + data
            size = data.rfind(b"\n") + 1
            starts.append(self._starts(data[:size]) + offset)
            offset, rest = offset + size, data[size:]
        if rest:
            starts.append(self._starts(rest + b"\n") + offset)
        return np.concatenate([*starts, np.array([offset + len(rest)])])

    def _starts(self, lines: bytes) -> np.ndarray[Any, Any]:
        values = np.frombuffer(lines, np.uint8)
        ends = np.flatnonzero(values == ord("\n")) + 1
        starts = np.concatenate([ends[:1] * 0, ends[:-1]])
        if self.keeps_blank:
            return starts
        maybe = np.flatnonzero(values[starts] <= ord(" ")).tolist()
        return np.delete(starts, [n for n in maybe if not lines[starts[n] : ends[n]].strip()])

    def _decode(self, data: bytes) -> Any:
        return data.decode().rstrip("\r\n")


class jsonl(text):  # noqa: N801
    """The values of JSON lines. Blank lines do not count.

    `Records` describes the arguments.
    """

    unit = "non-blank line"
    keeps_blank = False

    def _decode(self, data: bytes) -> Any:
        return json.loads(data)


class tar(ByteRecords):  # noqa: N801
    """The samples of tar archives: dicts of the content of consecutive files with the same stem.

    ``"__key__"`` is the path up to the first dot of the file name, and the other keys are the rest
    of the names in lower case, as in WebDataset. Hidden files, and files without an ending, do not
    count, and links are an error. `Records` describes the arguments.
    """

    unit = "sample"

    def _build_index(self, file: int) -> np.ndarray[Any, Any]:
        return self._with_file(file, self._index_of)

    def _index_of(self, file: Any) -> np.ndarray[Any, Any]:
        starts, key, names = [], None, set[str]()
        file.seek(0)
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                vars(archive)["members"] = []  # would grow with the file
                stem, name = _split_name(member.name)
                if stem and (member.islnk() or member.issym()):
                    raise ValueError(
                        f"{member.name!r} is only a link. Pack files instead of links, with the "
                        "options --dereference and --hard-dereference of tar"
                    )
                if not member.isfile() or not stem:
                    continue
                if stem != key:
                    starts.append(member.offset)
                    key, names = stem, set()
                if name in names:
                    raise ValueError(
                        f"a sample has two files {member.name!r}. Give each sample its own stem."
                    )
                names.add(name)
            end = archive.offset
        file.seek(end)
        rest = file.read(2**18)  # tarfile takes a damaged header for the end
        if rest[:512] != bytes(512):
            raise ValueError(f"cut or damaged at byte {end}, where a file or the end must begin")
        if rest.strip(b"\0") or file.read(1):  # a copy that was stopped may end with zeros
            raise ValueError(f"more data follows the end at {end}, as in joined or cut archives")
        return np.array([*starts, end], np.int64)

    def _decode(self, data: bytes) -> Any:
        sample: dict[str, Any] = {}
        for path, content in _members(data):
            stem, name = _split_name(path)
            if stem:
                sample |= {"__key__": stem, name: content}
        return sample


def _members(data: bytes) -> list[tuple[str, bytes]]:
    """Return the names and contents of the files in a part of a tar archive."""
    members, start = [], 0
    while start < len(data):
        header = data[start : start + 512]
        # tarfile takes longer than decoding a small image. It reads all other kinds of members.
        if header[156] not in b"0\0" or header[124] & 128:
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
                files = [member for member in archive if member.isfile()]
                opened: list[Any] = [archive.extractfile(member) for member in files]
                pairs = zip(files, opened, strict=True)
                return [(member.name, file.read()) for member, file in pairs]
        name, prefix = (header[a:b].partition(b"\0")[0] for a, b in ((0, 100), (345, 500)))
        if prefix and header.startswith(b"ustar\0", 257):
            name = prefix + b"/" + name
        size = int(header[124:136].strip(b" \0") or b"0", 8)
        members.append((name.decode(), data[start + 512 : start + 512 + size]))
        start += 512 + -(-size // 512) * 512
    return members


def _split_name(name: str) -> tuple[str, str]:
    """Return the key of a file's sample, and its name in it. The key is empty if it has none."""
    match = re.fullmatch(r"(?!__[^/]*__($|/))((?:.*/)?[^./]+)\.([^/]*)", name, re.DOTALL)
    return (match[2], match[3].lower()) if match else ("", "")


class parquet(Records):  # noqa: N801
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
