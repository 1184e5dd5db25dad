"""Any Python object in one file, pickled: what the functions of `raysgd.train` save.

The file begins with the pickle, so that ``pickle.load`` reads it as well; the manifest and the
hashes follow (see `add_checksums`). Unpickling runs code: load only files that you trust.
"""

from __future__ import annotations

import os
from typing import IO

from raysgd.checkpoint.checksum import add_checksums, checked_manifest
from raysgd.checkpoint.location import locate
from raysgd.checkpoint.manifest import Manifest
from raysgd.errors import CheckpointError

__all__ = ["read_pickle", "write_pickle"]

_STOP = b"."
"""How every pickle ends."""


def write_pickle(blob: bytes, path: str | os.PathLike[str], manifest: Manifest) -> str:
    """Write what was pickled to a path or a URL, whole or not at all.

    Returns:
        The absolute path, or the URL.

    Raises:
        CheckpointError: if it cannot be written there.
    """

    def fill(file: IO[bytes]) -> None:
        file.write(blob)
        add_checksums(file, manifest, is_archive=False)

    return locate(path).write(fill)


def read_pickle(path: str | os.PathLike[str]) -> tuple[bytes, Manifest | None]:
    """Read a pickle that `write_pickle`, or ``pickle.dump``, wrote; it is not unpickled.

    Returns:
        The pickle; and the manifest, None where the file was written by ``pickle.dump``.

    Raises:
        CheckpointError: if the file is missing, damaged or of a newer format.
    """
    source = locate(path)
    with source.open() as file:
        manifest = checked_manifest(source, file, whole=True)
        file.seek(0)
        blob = file.read(manifest.parts[0].size if manifest else -1)
    if not blob.endswith(_STOP):
        raise CheckpointError(
            f"Cannot load {source.shown}: the file is damaged or is not a checkpoint: it is no "
            "pickle, or was cut off."
        )
    return blob, manifest
