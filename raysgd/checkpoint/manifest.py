"""The manifest of a checkpoint, and the hash that detects damage.

A checkpoint is a zip archive, such as ``torch.save`` writes. `seal` adds the manifest as a record,
``raysgd-manifest.json``. The comment of the archive, at the end of the file, holds the SHA-256 of
all bytes before it: ``raysgd-checkpoint sha256=…``. After other content, such as a pickle, `seal`
appends an archive that holds only the manifest.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import platform
import re
import threading
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from raysgd.errors import CheckpointError

FORMAT = 1
"""Format version that raysgd writes. raysgd reads this version and older ones."""

_LIBRARIES = ("raysgd", "torch", "keras", "ray")
_RECORD = "raysgd-manifest.json"
_SEAL = re.compile(rb"raysgd-checkpoint sha256=([0-9a-f]{64})\n")
_SEAL_SIZE = len("raysgd-checkpoint sha256=\n") + 64
_CHUNK = 1 << 20


@functools.cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for library in _LIBRARIES:
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Describes a checkpoint."""

    format: int = FORMAT
    versions: Mapping[str, str] = field(default_factory=_versions)
    """Versions of Python and raysgd, and of torch, Keras, and Ray if they are installed."""
    world_size: int = 1
    epoch: int = 0
    global_step: int = 0
    operator: str = ""
    job: str = ""
    """Name of the job, if a `CheckpointStore` wrote the checkpoint."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Return the manifest as JSON text, in which metrics can be NaN or Infinity."""
        return json.dumps(dataclasses.asdict(self), indent=1).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Read the output of `to_json`. Other text raises errors of any kind."""
        content = json.loads(text)
        if content["format"] > FORMAT:
            raise CheckpointError(
                f"raysgd {content['versions']['raysgd']} wrote the file in format "
                f"{content['format']}, but this version reads formats up to {FORMAT}. Update "
                "raysgd."
            )
        return cls(**{entry.name: content[entry.name] for entry in dataclasses.fields(cls)})


class HashingFile:
    """A file that is open for reading and writing, and hashes its content while it is written.

    Large parts are hashed in another thread. `digest` reads the rest, or everything if a hashed
    part was overwritten.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash, self._hashed = hashlib.sha256(), 0  # hash of the first bytes, and their number
        self._is_ordered = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, content: Any) -> int:
        start, part = self._file.tell(), memoryview(content)
        if start < self._hashed:
            self._hash, self._hashed, self._is_ordered = hashlib.sha256(), 0, False
        if part.nbytes < _CHUNK or not self._is_ordered:
            return self._file.write(part)
        self._read(start)
        self._file.seek(start)
        hashing = threading.Thread(target=self._hash.update, args=(part,))
        hashing.start()
        try:
            self._file.write(part)
        finally:
            hashing.join()
        self._hashed += part.nbytes
        return part.nbytes

    def digest(self, size: int) -> str:
        """Return the SHA-256 of the first `size` bytes."""
        self._read(size)
        return self._hash.hexdigest()

    def _read(self, end: int) -> None:
        self._file.seek(self._hashed)
        while (left := end - self._hashed) > 0 and (part := self._file.read(min(left, _CHUNK))):
            self._hash.update(part)
            self._hashed += len(part)


def seal(file: Any, manifest: Manifest) -> None:
    """Append a manifest and a hash to a file that is open for reading and writing."""
    is_zip = is_archive(file)
    file.seek(0, 2)
    with zipfile.ZipFile(file, "a" if is_zip else "w") as archive:
        folder = archive.namelist()[0].split("/")[0] if is_zip else "raysgd"
        archive.writestr(zipfile.ZipInfo(f"{folder}/{_RECORD}"), manifest.to_json())
        archive.comment = bytes(_SEAL_SIZE)
    hashing = file if isinstance(file, HashingFile) else HashingFile(file)
    digest = hashing.digest(file.seek(-_SEAL_SIZE, 2))
    file.write(f"raysgd-checkpoint sha256={digest}\n".encode())


def verify(file: IO[bytes], shown: str, whole: bool = True) -> Manifest | None:
    """Check a checkpoint for damage and return its manifest.

    Return None for a file without a seal, which only PyTorch or an older library wrote. Without
    `whole`, check only the manifest. `shown` is the name in messages.
    """
    try:
        digest = _digest_in(file)
        if digest and whole and HashingFile(file).digest(file.seek(-_SEAL_SIZE, 2)) != digest:
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
        raise CheckpointError(f"Cannot load {shown}: {error}") from error
    except Exception as error:  # a failing disk or a damaged archive can raise anything
        raise CheckpointError(
            f"Cannot load {shown}: the file is damaged or is not a checkpoint ({error})."
        ) from error


def is_archive(file: IO[bytes]) -> bool:
    """Return whether a file starts like a zip archive. PyTorch uses the same test."""
    file.seek(0)
    return file.read(4) == b"PK\x03\x04"


def sealed_size(file: IO[bytes]) -> int:
    """Return the size of a file without the archive that `seal` appended."""
    with zipfile.ZipFile(file) as archive:
        return archive.infolist()[0].header_offset


def _digest_in(file: IO[bytes]) -> str | None:
    file.seek(max(0, file.seek(0, 2) - _SEAL_SIZE))
    match = _SEAL.fullmatch(file.read())
    return match and match[1].decode()
