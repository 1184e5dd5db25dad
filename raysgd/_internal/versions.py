"""The versions of other packages: those that are installed, and those that the tests cover."""

import contextlib
import functools
import importlib.metadata
import platform
import re

TESTED = {
    "Python": ("3.11", "3.13"),
    "ray": ("2.44", "2.60"),
    "torch": ("2.9", "2.15"),
    "numpy": ("1.26", "2.5"),
    "tensorflow": ("2.21", "2.21"),
    "horovod": ("0.28.1", "0.28.1"),
}
"""The oldest and the newest tested version of each package. Any patch release counts."""


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that are installed."""
    installed = {"python": platform.python_version()}
    for library in ("raysgd", "ray", "torch", "tensorflow", "keras"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[library] = importlib.metadata.version(library)
    return installed


def is_tested(name: str, version: str) -> bool:
    """Return whether `version` is in the tested range of a package of `TESTED`."""
    oldest, newest = TESTED[name]
    return is_at_least(version, oldest) and _truncate(version, newest) <= _truncate(newest, newest)


def is_at_least(version: str, oldest: str) -> bool:
    """Return whether `version` is `oldest` or newer."""
    return _truncate(version, oldest) >= _truncate(oldest, oldest)


def check_oldest(owner: str, name: str, version: str) -> None:
    """Raise ImportError if `version` is older than `owner` supports."""
    oldest, newest = TESTED[name]
    if not is_at_least(version, oldest):
        raise ImportError(
            f"{owner} needs {name} {oldest} or newer, but this Python has {version}. The tests "
            f'cover {oldest} to {newest}. Run pip install "{name}>={oldest}" on the driver and all '
            "workers."
        )


def _truncate(version: str, precision: str) -> list[int]:
    """Return the first numbers of a version, as many as `precision` has."""
    return [*map(int, re.findall(r"\d+", version))][: precision.count(".") + 1]
