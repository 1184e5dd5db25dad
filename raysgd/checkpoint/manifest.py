"""What a checkpoint says about itself, beside the state that it holds."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["FORMAT", "Manifest", "NewerFormatError", "Part"]

FORMAT = 1
"""The format that this library writes, and the newest that it reads."""

_LIBRARIES = ("raysgd", "torch", "keras", "ray")


@functools.cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for library in _LIBRARIES:
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


class NewerFormatError(ValueError):
    """A checkpoint was written in a format that came after this library."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A segment of the file that has a hash of its own.

    There is one, all that the state was written as; of earlier files each record is one.
    """

    name: str = "state"
    record: str = "state"
    offset: int
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint says about itself."""

    format: int = FORMAT
    versions: Mapping[str, str] = field(default_factory=_versions)
    """Version of raysgd and Python, and of torch, Keras and Ray where they are installed."""
    world_size: int = 1
    epoch: int = 0
    global_step: int = 0
    operator: str = ""
    """Name of the operator."""
    job: str = ""
    """Name of the job, where a store wrote it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    of_training: bool = False
    """Whether the metrics are those of training alone, which a validation's may still replace."""
    parts: tuple[Part, ...] = ()

    def to_json(self) -> bytes:
        """Return it as JSON text."""
        content = dataclasses.asdict(self)
        # JSON has no numbers for these
        content["metrics"] = {
            name: value if math.isfinite(value) else str(value)
            for name, value in self.metrics.items()
        }
        return json.dumps(content, indent=1, allow_nan=False).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Read what `to_json` wrote; nonsense leads to errors of any kind.

        Raises:
            NewerFormatError: if a newer library wrote it.
        """
        content = json.loads(text)
        if content["format"] > FORMAT:
            writer = content.get("versions", {}).get("raysgd", "of a later version")
            raise NewerFormatError(
                f"raysgd {writer} wrote it in format {content['format']}, and this raysgd "
                f"reads formats up to {FORMAT}. Update raysgd"
            )
        # the first files of this format had no of_training
        content = {"of_training": False, **content}
        values = {entry.name: content[entry.name] for entry in dataclasses.fields(cls)}
        for entry in dataclasses.fields(cls):
            kind, value = type(entry.default), values[entry.name]
            if kind in (int, str) and not isinstance(value, kind):
                raise ValueError(f"its {entry.name} is {value!r}")
        metrics = {name: float(value) for name, value in content["metrics"].items()}
        parts = tuple(Part(**part) for part in content["parts"])
        return cls(**{**values, "metrics": metrics, "parts": parts})
