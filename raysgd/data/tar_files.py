"""Numbered samples of tar archives."""

from __future__ import annotations

import io
import re
import tarfile
from typing import Any

import numpy as np

from raysgd.data.formats import ByteRecords


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
