"""The manifest of a checkpoint, and the hash that detects damage.

A checkpoint is a zip archive, such as ``torch.save`` writes. `HashingFile.seal` adds the manifest
as a record, ``raysgd-manifest.json``. The comment of the archive, at the end of the file, is its
seal: ``raysgd-checkpoint hashes=…``. It covers all bytes before the comment, in chunks of 64
MiB. The digits are the SHA-256 of the hashes of the chunks (32 bytes each). The seal of an older
file, ``sha256=…``, is the SHA-256 of all bytes before it.

After other content, such as a pickle, it appends an archive that holds only the manifest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import re
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import IO, Any, Self

from raysgd._internal.versions import versions
from raysgd.checkpoint.location import UnreachableError
from raysgd.errors import CheckpointError

FORMAT = 2
"""Format version that raysgd writes. raysgd reads this version and older ones."""

_RECORD = "raysgd-manifest.json"
_SEAL = re.compile(rb"raysgd-checkpoint (hashes|sha256)=([0-9a-f]{64})\n")
_SEAL_SIZE = len("raysgd-checkpoint hashes=\n") + 64
_CHUNK_BYTES = 1 << 26
_BUFFER_BYTES = 1 << 20
_NUM_THREADS = min(8, len(os.sched_getaffinity(0)))


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Describes a checkpoint."""

    format: int = FORMAT
    versions: Mapping[str, str] = field(default_factory=versions)
    world_size: int = 1
    epoch: int = 0
    global_step: int = 0
    operator_name: str = ""
    experiment: str = ""
    """Name of the experiment, if a `CheckpointStore` wrote the checkpoint."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Where the state came from: command, commit, loaders, and so on."""

    def to_json(self) -> bytes:
        """Return the manifest as JSON text, in which metrics can be NaN or Infinity."""
        return json.dumps(dataclasses.asdict(self), indent=1).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Read the output of `to_json`. Other text raises errors of any kind."""
        content = json.loads(text)
        if content["format"] > FORMAT:
            raise UnreachableError(
                f"raysgd {content['versions']['raysgd']} wrote the file in format "
                f"{content['format']}, but this version reads formats up to {FORMAT}. Update "
                "raysgd."
            )
        content.setdefault("provenance", {})  # older files have none
        if content["format"] == 1:
            content |= {"operator_name": content["operator"], "experiment": content["job"]}
        content["metrics"] = {name: float(value) for name, value in content["metrics"].items()}
        return cls(**{entry.name: content[entry.name] for entry in dataclasses.fields(cls)})


class HashingFile(io.RawIOBase):
    """A new file that is written from start to end. Threads hash its chunks meanwhile."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._size = file, 0
        self._hashes: list[Future[bytes]] = []
        self._threads = ThreadPoolExecutor(_NUM_THREADS)

    def restart(self) -> Self:
        """Delete the content, and return this file."""
        self._file.seek(0)
        self._file.truncate()
        self._size, self._hashes = 0, []
        return self

    def write(self, content: Any) -> int:
        self._file.write(content)
        self._size += (size := memoryview(content).nbytes)
        if (end := self._size // _CHUNK_BYTES) > len(self._hashes):
            self._file.flush()
            with contextlib.suppress(RuntimeError):  # no threads as Python ends: see `_digest`
                for number in range(len(self._hashes), end):
                    self._hashes.append(self._threads.submit(_hash_of_chunk, self._file, number))
        return size

    def seal(self, manifest: Manifest) -> None:
        """Append a manifest and a hash."""
        with self._threads:
            hashes = [future.result() for future in self._hashes]
        is_zip, file = is_archive(self._file), self._file
        file.seek(0, 2)
        with zipfile.ZipFile(file, "a" if is_zip else "w") as archive:
            num_kept = archive.start_dir // _CHUNK_BYTES  # the manifest replaces the rest
            folder = archive.namelist()[0].split("/")[0] if is_zip else "raysgd"
            archive.writestr(zipfile.ZipInfo(f"{folder}/{_RECORD}"), manifest.to_json())
            archive.comment = bytes(_SEAL_SIZE)
        digest = _digest(file, hashes[:num_kept])
        file.seek(-_SEAL_SIZE, 2)
        file.write(f"raysgd-checkpoint hashes={digest}\n".encode())


def _digest(file: IO[bytes], hashes: Sequence[bytes] = ()) -> str:
    """Return the SHA-256 of the hashes of all chunks before the seal."""
    file.flush()
    size = file.seek(-_SEAL_SIZE, 2)
    rest = range(len(hashes), -(-size // _CHUNK_BYTES))
    try:
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            new_hashes = list(threads.map(lambda number: _hash_of_chunk(file, number, size), rest))
    except RuntimeError:  # a callback saves while Python ends
        new_hashes = [_hash_of_chunk(file, number, size) for number in rest]
    return hashlib.sha256(b"".join([*hashes, *new_hashes])).hexdigest()


def _hash_of_chunk(file: IO[bytes], number: int, size: int = sys.maxsize) -> bytes:
    start = number * _CHUNK_BYTES
    return _hash(file, start, min(start + _CHUNK_BYTES, size))


def _hash(file: IO[bytes], start: int, end: int) -> bytes:
    hasher, buffer = hashlib.sha256(), memoryview(bytearray(_BUFFER_BYTES))
    while read := os.preadv(file.fileno(), [buffer[: end - start]], start):
        hasher.update(buffer[:read])
        start += read
    return hasher.digest()


def verify(file: IO[bytes], label: str, checks_content: bool = True) -> Manifest | None:
    """Check a checkpoint for damage and return its manifest.

    Return None for a file without a seal, which only PyTorch or an older library wrote. Without
    `checks_content`, check only the manifest. `label` is the name in messages.
    """
    try:
        compute_digest, digest = _digest_in(file)
        if digest and checks_content and digest != compute_digest(file):
            raise CheckpointError("the file is damaged: its SHA-256 has changed.")
        if not digest and not is_archive(file):
            return None
        with zipfile.ZipFile(file) as archive:
            # An archive of another program may unpack to more than fits in memory.
            size = sum(record.file_size for record in archive.infolist())
            if is_archive(file) and size > archive.start_dir:
                raise CheckpointError("the file is damaged: its records are compressed or overlap.")
            records = [name for name in archive.namelist() if name.endswith(f"/{_RECORD}")]
            if digest:
                return Manifest.from_json(archive.read(records[0]))
            # An archive that starts later is a tensor in a truncated file.
            if archive.comment or records or archive.infolist()[0].header_offset > 0:
                raise CheckpointError("the file is damaged: its end has changed.")
            return None
    except CheckpointError as error:
        raise type(error)(f"Cannot load {label}: {error}") from error
    except Exception as error:  # a failing disk or a damaged archive can raise anything
        raise CheckpointError(
            f"Cannot load {label}: the file is damaged or is not a checkpoint ({error})."
        ) from error


def is_archive(file: IO[bytes]) -> bool:
    """Return whether a file starts like a zip archive. PyTorch uses the same test."""
    file.seek(0)
    return file.read(4) == b"PK\x03\x04"


def unsealed_size(file: IO[bytes]) -> int:
    """Return the size of a file without the archive that `HashingFile.seal` appended."""
    with zipfile.ZipFile(file) as archive:
        return archive.infolist()[0].header_offset


def _digest_in(file: IO[bytes]) -> tuple[Callable[[IO[bytes]], str], str | None]:
    """Return the function that computes the digest of a file, and the digest in its seal."""
    size = max(0, file.seek(0, 2) - _SEAL_SIZE)
    file.seek(size)
    if (match := _SEAL.fullmatch(file.read())) is None:
        return _digest, None
    by_chunk = match[1] == b"hashes"
    return _digest if by_chunk else lambda file: _hash(file, 0, size).hex(), match[2].decode()
