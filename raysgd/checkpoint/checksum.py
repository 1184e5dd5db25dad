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
import zipfile
from collections.abc import Sequence
from typing import IO, Any

from raysgd.checkpoint.location import Location
from raysgd.checkpoint.manifest import Manifest, NewerFormatError, Part
from raysgd.errors import CheckpointError

__all__ = ["DamageError", "add_checksums", "checked_manifest", "find_manifest", "is_archive"]

_RECORD = "raysgd-manifest.json"
_LINE = b"raysgd-checkpoint manifest=%020d+%010d sha256=%s rest=%s"
_TRAILER = re.compile(
    rb"(raysgd-checkpoint manifest=([0-9]{20})\+([0-9]{10}) sha256=([0-9a-f]{64})"
    rb" rest=([0-9a-f]{64})) trailer=([0-9a-f]{64})\n"
)
_TRAILER_SIZE = len(_LINE % (0, 0, b"0" * 64, b"0" * 64)) + len(" trailer=\n") + 64
_SIGNS = (b"raysgd-checkpoint", b" manifest=", b" sha256=", b" trailer=")
"""Of these words at the end of a file with checksums damage to one byte spares all but one."""
_CHUNK = 1 << 20


class DamageError(ValueError):
    """A file is not as it was written."""


def add_checksums(file: IO[bytes], manifest: Manifest, is_archive: bool = True) -> None:
    """Add a manifest and the hashes to what was written into `file`.

    Args:
        file: open for reading and writing.
        manifest: what to say; its part is filled in.
        is_archive: whether it is a zip archive, and to stay one.
    """
    if is_archive:
        with zipfile.ZipFile(file, "a") as archive:
            part, content = _described(file, archive.start_dir, manifest)
            folder = archive.namelist()[0].split("/")[0]
            archive.writestr(zipfile.ZipInfo(f"{folder}/{_RECORD}"), content)
            offset = archive.start_dir - len(content)  # the directory follows what was added last
            archive.comment = bytes(_TRAILER_SIZE)  # the directory tells its length
    else:
        part, content = _described(file, file.seek(0, 2), manifest)
        offset = file.seek(0, 2)
        file.write(content + bytes(_TRAILER_SIZE))
    rest = _rest_of(file, [part], (offset, len(content))).encode()
    line = _LINE % (offset, len(content), _sha256(content).encode(), rest)
    file.seek(-_TRAILER_SIZE, 2)
    file.write(b"%s trailer=%s\n" % (line, _sha256(line).encode()))


def _described(file: IO[bytes], size: int, manifest: Manifest) -> tuple[Part, bytes]:
    """Return the part that the first bytes of a file are, and the manifest's content."""
    part = Part(offset=0, size=size, sha256=_hash_of(file, 0, size))
    return part, dataclasses.replace(manifest, parts=(part,)).to_json()


def checked_manifest(source: Location, file: IO[bytes], whole: bool) -> Manifest | None:
    """Return the manifest of a file that is open, as `find_manifest` does.

    Args:
        source: the file, for messages.
        file: the same, open for reading.
        whole: whether to check every byte, or the manifest alone.

    Raises:
        CheckpointError: if the file is damaged or of a newer format.
    """
    try:
        manifest = find_manifest(file, whole)
        if whole and is_archive(file):
            with zipfile.ZipFile(file) as archive:
                _check_layout(archive)
        return manifest
    except (DamageError, NewerFormatError) as error:
        raise CheckpointError(f"Cannot load {source.shown}: {error}.") from error
    except Exception as error:  # whatever a disk that fails, or a crafted file, leads to
        raise CheckpointError(
            f"Cannot load {source.shown}: the file is damaged or is not a checkpoint ({error})."
        ) from error


def find_manifest(file: IO[bytes], whole: bool) -> Manifest | None:
    """Check a checkpoint, every byte or the manifest alone, and return its manifest.

    Returns:
        None for a file that never had one, of an older library; nothing but the archive's own
        checksums could be checked then.

    Raises:
        DamageError: if it is not as it was written.
        NewerFormatError: if a newer library wrote it.
    """
    size = file.seek(0, 2)
    file.seek(max(0, size - _TRAILER_SIZE))
    match = _TRAILER.fullmatch(file.read())
    if match is None:
        _check_without_manifest(file, whole)
        return None
    line, *numbers, sha256, rest, trailer = match.groups()
    if _sha256(line) != trailer.decode():
        raise DamageError("the file is damaged: its trailer is not as it was written")
    offset, length = map(int, numbers)
    file.seek(offset)
    content = file.read(min(length, size))
    if _sha256(content) != sha256.decode():
        raise DamageError("the file is damaged: its manifest is not as it was written")
    manifest = Manifest.from_json(content)
    if whole:
        parts = manifest.parts
        if _rest_of(file, parts, (offset, length)) != rest.decode():
            raise DamageError("the file is damaged: its headers are not as they were written")
        if any(_hash_of(file, part.offset, part.size) != part.sha256 for part in parts):
            raise DamageError(
                "the file is damaged: its state has another SHA-256 than when it was written"
            )
    return manifest


def _check_without_manifest(file: IO[bytes], whole: bool) -> None:
    """Check that damage has not hidden the trailer of what is now without one.

    An archive of ``torch.save`` alone has no comment, and starts at the file's first byte. Its own
    checksums are checked as well, where all of it is to be: torch does not look at them.
    """
    size = file.seek(0, 2)
    file.seek(max(0, size - 2 * _TRAILER_SIZE))
    tail = file.read()
    if any(sign in tail for sign in _SIGNS):
        raise DamageError("the file is damaged: its trailer is not as it was written")
    if not is_archive(file):
        return  # no archive: torch's older format, or something else
    try:
        with zipfile.ZipFile(file) as archive:
            _check_layout(archive)
            records, comment = archive.infolist(), archive.comment
            damaged = archive.testzip() if whole else None
    except DamageError:
        raise
    except Exception as error:  # whatever a reader of archives makes of nonsense
        raise DamageError(
            "the file is damaged or is not a checkpoint: its trailer is missing, as if it was "
            "cut off"
        ) from error
    if damaged is not None:
        raise DamageError(f"the file is damaged: record {damaged} has another checksum")
    has_manifest = any(record.filename.endswith(_RECORD) for record in records)
    if has_manifest or comment:
        raise DamageError("the file is damaged or is not a checkpoint: its trailer is missing")


def is_archive(file: IO[bytes]) -> bool:
    """Whether a file begins as an archive does, which is how torch knows one."""
    file.seek(0)
    return file.read(4) == b"PK\x03\x04"


def _check_layout(archive: zipfile.ZipFile) -> None:
    """Check that an archive's records follow each other from its start, as they are.

    Nothing is written otherwise, and a small file could unpack to more than there is memory for.
    """
    records = sorted(archive.infolist(), key=lambda record: record.header_offset)
    ends = [*(record.header_offset for record in records[1:]), archive.start_dir]
    if (records and records[0].header_offset) or any(
        record.compress_type != zipfile.ZIP_STORED or record.header_offset + record.file_size > end
        for record, end in zip(records, ends, strict=False)
    ):
        raise DamageError(
            "the file is damaged or is not a checkpoint: its records are compressed, or do not "
            "follow each other from its start"
        )


def _rest_of(file: IO[bytes], parts: Sequence[Part], manifest: tuple[int, int]) -> str:
    """Return the hash of what lies between the parts, up to the trailer."""
    end = file.seek(0, 2) - _TRAILER_SIZE
    digest = hashlib.sha256()
    position = 0
    for offset, size in [*sorted((part.offset, part.size) for part in parts), manifest]:
        if offset < position or size < 0:  # one that is named often would be read as often
            raise DamageError("the file is damaged: its parts lie over each other")
        _feed(file, position, offset - position, digest)
        position = offset + size
    _feed(file, position, end - position, digest)
    return digest.hexdigest()


def _hash_of(file: IO[bytes], offset: int, size: int) -> str:
    digest = hashlib.sha256()
    _feed(file, offset, size, digest)
    return digest.hexdigest()


def _feed(file: IO[bytes], offset: int, size: int, digest: Any) -> None:
    """Put a segment of the file into a hash."""
    file.seek(offset)
    while size > 0:
        chunk = file.read(min(size, _CHUNK))
        if not chunk:
            raise DamageError("the file is damaged: it ends early")
        digest.update(chunk)
        size -= len(chunk)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
