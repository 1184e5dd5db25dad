"""Reading a file's manifest, with errors that name the file."""

from __future__ import annotations

from typing import IO

from raysgd.checkpoint.checksum import DamageError, find_manifest, verify
from raysgd.checkpoint.location import Location
from raysgd.checkpoint.manifest import Manifest, NewerFormatError
from raysgd.errors import CheckpointError

__all__ = ["checked_manifest"]


def checked_manifest(source: Location, file: IO[bytes], whole: bool) -> Manifest | None:
    """Return the manifest of a file that is open; None where it never had one.

    Args:
        source: the file, for messages.
        file: the same, open for reading.
        whole: whether to check every byte, or the manifest alone.

    Raises:
        CheckpointError: if the file is damaged or of a newer format.
    """
    try:
        return verify(file) if whole else find_manifest(file)
    except DamageError as error:
        raise CheckpointError(f"Cannot load {source.shown}: the file {error}.") from error
    except NewerFormatError as error:
        raise CheckpointError(f"Cannot load {source.shown}: {error}.") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"Cannot load {source.shown}: the file is damaged or is not a checkpoint ({error})."
        ) from error
