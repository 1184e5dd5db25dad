"""Hashes over every byte of a checkpoint, so that damage is found wherever it is.

``torch.save`` writes a zip archive. `add_checksums` adds a record to it, the manifest, with the
SHA-256 of all that came before, and makes this line the archive's comment, the end of the file::

    raysgd-checkpoint manifest=OFFSET+SIZE sha256=… rest=… trailer=…

``sha256`` is the hash of the manifest's content; ``rest`` that of all other bytes that the manifest
tells nothing of, joined; ``trailer`` that of this line up to there. So each byte of the file is in
exactly one hash, and is read once. The layout of the line is the same in all formats: what changes
is told by the manifest. In earlier files each record of the archive is a part with a hash of its
own.

In a file that is no archive the manifest and the line follow the content.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import struct
import zipfile
from collections.abc import Sequence
from typing import IO, Any

from raysgd.checkpoint.manifest import Manifest, Part

__all__ = ["DamageError", "add_checksums", "find_manifest", "verify"]

_RECORD = "raysgd-manifest.json"
_MAGIC = b"raysgd-checkpoint"
_LINE = b"%s manifest=%020d+%010d sha256=%s rest=%s"
_TRAILER = re.compile(
    rb"(raysgd-checkpoint manifest=([0-9]{20})\+([0-9]{10}) sha256=([0-9a-f]{64})"
    rb" rest=([0-9a-f]{64})) trailer=([0-9a-f]{64})\n"
)
_TRAILER_SIZE = len(_LINE % (_MAGIC, 0, 0, b"0" * 64, b"0" * 64)) + len(" trailer=\n") + 64
_SIGNS = (_MAGIC, b" manifest=", b" sha256=", b" trailer=")
"""Of these words at the end of a file with checksums damage to one byte spares all but one."""
_CHUNK = 1 << 20
_LOCAL_HEADER = 30
_END_RECORD = 22


class DamageError(ValueError):
    """A file is not as it was written. Its text goes on a sentence about the file."""


@dataclasses.dataclass(frozen=True)
class _Trailer:
    """Where the manifest lies, and the hashes that are not in it."""

    offset: int
    size: int
    sha256: str
    rest: str


def add_checksums(file: IO[bytes], manifest: Manifest, is_archive: bool = True) -> None:
    """Add a manifest and the hashes to what was written into `file`.

    Args:
        file: open for reading and writing.
        manifest: what to say; its part is filled in.
        is_archive: whether it is a zip archive, and to stay one.
    """
    if not is_archive:
        size = file.seek(0, 2)
        part, content = _described(file, size, manifest)
        file.seek(0, 2)
        file.write(content + bytes(_TRAILER_SIZE))
        _write_trailer(file, part, size, content)
        return
    with zipfile.ZipFile(file) as archive:
        size = archive.start_dir
        prefix = archive.namelist()[0].split("/")[0] + "/"
    part, content = _described(file, size, manifest)
    with zipfile.ZipFile(file, "a") as archive:
        added = zipfile.ZipInfo(prefix + _RECORD)
        archive.writestr(added, content)
        archive.comment = bytes(_TRAILER_SIZE)  # the directory tells its length
    _write_trailer(file, part, _content_offset(file, added), content)


def _described(file: IO[bytes], size: int, manifest: Manifest) -> tuple[Part, bytes]:
    """Return the part that the first bytes of a file are, and the manifest's content."""
    part = Part(name="state", record="state", offset=0, size=size, sha256=_hash_of(file, 0, size))
    return part, dataclasses.replace(manifest, parts=(part,)).to_json()


def _write_trailer(file: IO[bytes], part: Part, offset: int, content: bytes) -> None:
    """Write the line at the end, in the place that was left for it."""
    rest = _rest_of(file, [part], (offset, len(content))).encode()
    sha256 = hashlib.sha256(content).hexdigest().encode()
    line = _LINE % (_MAGIC, offset, len(content), sha256, rest)
    file.seek(-_TRAILER_SIZE, 2)
    file.write(b"%s trailer=%s\n" % (line, hashlib.sha256(line).hexdigest().encode()))


def verify(file: IO[bytes]) -> Manifest | None:
    """Check every byte of a checkpoint and return its manifest.

    Returns:
        None for a file that never had one, of an older library; nothing but the archive's own
        checksums could be checked then.

    Raises:
        DamageError: if it is not as it was written.
        NewerFormatError: if a newer library wrote it.
    """
    found = _find(file)
    if found is None:
        _check_archive(file)
        return None
    trailer, manifest = found
    parts = manifest.parts
    if any(_hash_of(file, part.offset, part.size) != part.sha256 for part in parts):
        raise DamageError("is damaged: its state has another SHA-256 than when it was written")
    if _rest_of(file, parts, (trailer.offset, trailer.size)) != trailer.rest:
        raise DamageError("is damaged: its headers are not as they were written")
    return manifest


def find_manifest(file: IO[bytes]) -> Manifest | None:
    """Return the manifest of a checkpoint without looking at the rest of the file.

    Returns:
        None for a file that never had one.

    Raises:
        DamageError: if its trailer or its manifest is not as it was written.
        NewerFormatError: if a newer library wrote it.
    """
    found = _find(file)
    return None if found is None else found[1]


def _find(file: IO[bytes]) -> tuple[_Trailer, Manifest] | None:
    size = file.seek(0, 2)
    file.seek(max(0, size - _TRAILER_SIZE))
    match = _TRAILER.fullmatch(file.read())
    if match is None:
        _check_has_none(file, size)
        return None
    line, offset, length, sha256, rest, check = match.groups()
    if hashlib.sha256(line).hexdigest() != check.decode():
        raise DamageError("is damaged: its trailer is not as it was written")
    trailer = _Trailer(int(offset), int(length), sha256.decode(), rest.decode())
    file.seek(trailer.offset)
    content = file.read(trailer.size)
    if hashlib.sha256(content).hexdigest() != trailer.sha256:
        raise DamageError("is damaged: its manifest is not as it was written")
    return trailer, Manifest.from_json(content)


def _check_has_none(file: IO[bytes], size: int) -> None:
    """Check that damage has not hidden the trailer of what is now without one.

    An archive of ``torch.save`` alone ends in a directory without a comment, and starts at the
    file's first byte. No damage to the last bytes of one that has one makes it look so.
    """
    file.seek(max(0, size - 2 * _TRAILER_SIZE))
    tail = file.read()
    if any(sign in tail for sign in _SIGNS):
        raise DamageError("is damaged: its trailer is not as it was written")
    file.seek(0)
    if file.read(4) != b"PK\x03\x04":
        return  # no archive: torch's older format, or something else
    end = tail[-_END_RECORD:]
    if end[:4] != b"PK\x05\x06" or end[-2:] != b"\0\0":
        raise DamageError(
            "is damaged or is not a checkpoint: its trailer is missing, as if it was cut off"
        )
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error) as error:
        raise DamageError(f"is damaged or is not a checkpoint: {error}") from error
    if any(info.filename.endswith(_RECORD) for info in records):
        raise DamageError("is damaged: it has a manifest, but its trailer is missing")
    if records and min(info.header_offset for info in records) != 0:
        raise DamageError("is damaged or is not a checkpoint: its trailer is missing")


def _check_archive(file: IO[bytes]) -> None:
    """Check the archive's own checksums: torch does not look at them."""
    if not zipfile.is_zipfile(file):
        return
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except Exception as error:  # whatever a reader of archives makes of nonsense
        raise DamageError(f"is damaged or is not a checkpoint: {error}") from error
    if damaged is not None:
        raise DamageError(f"is damaged: record {damaged} has another checksum")


def _rest_of(file: IO[bytes], parts: Sequence[Part], manifest: tuple[int, int]) -> str:
    """Return the hash of what lies between the parts, up to the trailer."""
    end = file.seek(0, 2) - _TRAILER_SIZE
    digest = hashlib.sha256()
    position = 0
    for offset, size in [*sorted((part.offset, part.size) for part in parts), manifest]:
        _feed(file, position, offset - position, digest)
        position = offset + size
    _feed(file, position, end - position, digest)
    return digest.hexdigest()


def _hash_of(file: IO[bytes], offset: int, size: int) -> str:
    """Return the hash of a segment of the file."""
    digest = hashlib.sha256()
    _feed(file, offset, size, digest)
    return digest.hexdigest()


def _feed(file: IO[bytes], offset: int, size: int, digest: Any) -> None:
    """Put a segment of the file into a hash."""
    file.seek(offset)
    while size > 0:
        chunk = file.read(min(size, _CHUNK))
        if not chunk:
            raise DamageError("is damaged: it ends early")
        digest.update(chunk)
        size -= len(chunk)


def _content_offset(file: IO[bytes], info: zipfile.ZipInfo) -> int:
    """Return where the content of a record begins: behind a header of its own."""
    file.seek(info.header_offset)
    name_size, extra_size = struct.unpack("<HH", file.read(_LOCAL_HEADER)[-4:])
    return info.header_offset + _LOCAL_HEADER + int(name_size) + int(extra_size)
