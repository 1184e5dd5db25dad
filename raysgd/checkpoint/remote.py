"""Files behind URLs, through fsspec. Whoever does not answer is not waited for without end."""

from __future__ import annotations

import contextlib
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import IO, Any, TypeVar

import fsspec

from raysgd.checkpoint.leftovers import temporary_name
from raysgd.checkpoint.location import (
    Entry,
    Location,
    UnreachableError,
    first_line,
    system_error,
)
from raysgd.config import env_seconds
from raysgd.errors import CheckpointError

__all__ = ["RemoteFile"]

T = TypeVar("T")
Tick = Callable[[], None]

_TIMEOUT = "SGD_CHECKPOINT_TIMEOUT_S"
_DEFAULT_TIMEOUT_S = 60.0
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci"}
"""Where a file appears whole when its upload ends, and renaming would be a second upload."""
_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "oss": "ossfs",
    "oci": "ocifs",
    "hdfs": "pyarrow",
    "sftp": "paramiko",
    "ssh": "paramiko",
    "smb": "smbprotocol",
    "http": "aiohttp",
    "https": "aiohttp",
}


class RemoteFile(Location):
    """A URL. What is written or loaded goes through a temporary file on local disk."""

    def __init__(self, url: str) -> None:
        self.name = url
        # a password is not for logs
        self.shown = re.sub(r"//([^/@:]*):[^/@]*@", r"//\1:***@", url)
        for protocol in (part.partition("://")[0] for part in url.split("::")):
            self._check_protocol(protocol)

    def check_writable(self) -> str:
        """Return the URL: whether it can be written to shows when it is."""
        return self.name

    def write(self, fill: Callable[[IO[bytes]], None]) -> str:
        """Write to local disk and upload it, to a temporary name where a name is not atomic."""

        def upload(fs: Any, path: str, tick: Tick) -> None:
            if _is_object_store(fs):
                fs.put_file(local, path, callback=_Progress(tick))
                return
            if fs.isdir(path):
                raise IsADirectoryError("it is a folder; give the name of a file in it")
            temporary = f"{fs._parent(path)}/{temporary_name()}"
            try:
                fs.put_file(local, temporary, callback=_Progress(tick))
                tick()
                fs.mv(temporary, path)
                fs.invalidate_cache()  # which may list the temporary file still
                if fs.exists(temporary):  # WebHDFS refuses without an error
                    raise OSError(
                        "what was uploaded was not renamed to it. Some servers replace no file: "
                        "save to another name, or remove the one that is there"
                    )
            except BaseException:
                with contextlib.suppress(Exception):
                    fs.rm_file(temporary)
                raise

        with _scratch_folder() as folder:
            local = str(Path(folder) / "state")
            try:
                with open(local, "xb+") as file:
                    fill(file)
            except Exception as error:
                cause = system_error(error)
                raise CheckpointError(f"Cannot save to {self.shown}: {cause}") from cause
            self._bounded("save to", upload)
        return self.name

    @contextlib.contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """Fetch the file and open it for reading."""
        with _scratch_folder() as folder:
            local = Path(folder) / "state"
            self._bounded(
                "load",
                lambda fs, path, tick: fs.get_file(path, str(local), callback=_Progress(tick)),
            )
            if not local.is_file():
                raise CheckpointError(f"Cannot load {self.shown}: it is a folder.")
            with local.open("rb") as file:
                yield file

    def inspect(self, read: Callable[[IO[bytes]], T]) -> T:
        """Return what `read` makes of the file, which is fetched only where it is read."""

        def action(fs: Any, path: str, tick: Tick) -> T:
            with fs.open(path, "rb") as file:
                return read(file)

        return self._bounded("load", action)

    def remove(self) -> None:
        """Remove the file, if it is there."""

        def action(fs: Any, path: str, tick: Tick) -> None:
            with contextlib.suppress(FileNotFoundError):
                fs.rm_file(path)

        self._bounded("remove", action)

    def child(self, name: str) -> RemoteFile:
        """Return a file in this folder."""
        return RemoteFile(f"{self.name.rstrip('/')}/{name}")

    def make_folder(self) -> None:
        """Make this folder, where there are such: an object store has none, and makes buckets."""

        def action(fs: Any, path: str, tick: Tick) -> None:
            if not _is_object_store(fs):
                fs.makedirs(path, exist_ok=True)

        self._bounded("make the folder", action)

    def entries(self) -> list[Entry]:
        """Return the files in this folder; none if there is no such folder."""

        def action(fs: Any, path: str, tick: Tick) -> list[Entry]:
            fs.invalidate_cache()  # another process may have written since
            try:
                infos = fs.ls(path, detail=True)
            except FileNotFoundError:
                return []
            return [
                Entry(info["name"].rstrip("/").rsplit("/", 1)[-1], _modified(info))
                for info in infos
                if info["type"] == "file"
            ]

        return self._bounded("list", action)

    # ---- helpers

    def _check_protocol(self, protocol: str) -> None:
        """Check that there is a file system for a protocol, without asking any server."""
        try:
            fsspec.get_filesystem_class(protocol)
        except ImportError as error:
            package = _PACKAGES.get(protocol)
            hint = f" (pip install {package})" if package else ""
            raise CheckpointError(f"Cannot open {self.shown}: {error}{hint}") from error
        except ValueError as error:
            known = ", ".join(f"{name}:// ({package})" for name, package in _PACKAGES.items())
            raise CheckpointError(
                f"Cannot open {self.shown}: nothing opens {protocol}://. Known are file://, "
                f"memory://, and with the package in brackets installed, {known}."
            ) from error

    def _bounded(self, verb: str, action: Callable[[Any, str, Tick], T]) -> T:
        """Run an action in another thread, as long as it makes progress.

        A thread that hangs cannot be ended; it is left behind, and stops at its next tick.
        """
        timeout_s = env_seconds(_TIMEOUT, _DEFAULT_TIMEOUT_S)

        def opened(tick: Tick) -> T:
            fs, path = fsspec.core.url_to_fs(self.name)  # which may connect
            return action(fs, path, tick)

        watched = _Watched(opened)
        if not watched.run(timeout_s):
            raise UnreachableError(
                f"Cannot {verb} {self.shown}: no answer for {timeout_s:g} seconds. Is the server "
                f"up, and the network? A slow one may be given more time by {_TIMEOUT}."
            )
        error = watched.error
        if error is None:
            result: T = watched.result
            return result
        if isinstance(error, CheckpointError) or not isinstance(error, Exception):
            raise error
        if isinstance(error, FileNotFoundError) and verb == "load":
            raise CheckpointError(f"Cannot load {self.shown}: there is no such file.") from error
        raise UnreachableError(f"Cannot {verb} {self.shown}: {first_line(error)}") from error


class _Watched:
    """An action in a thread of its own, which is waited for while it makes progress."""

    def __init__(self, action: Callable[[Tick], Any]) -> None:
        self._action = action
        self._done = threading.Event()
        self._num_ticks = 0
        self._abandoned = False
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self, timeout_s: float) -> bool:
        """Run it; False if it has made no progress for so long."""
        # a daemon: one that hangs must not keep the interpreter from ending
        threading.Thread(target=self._run, name="raysgd-checkpoint-io", daemon=True).start()
        seen = -1
        try:
            while not self._done.wait(timeout_s):
                if seen == self._num_ticks:
                    return False
                seen = self._num_ticks
            return True
        finally:
            self._abandoned = not self._done.is_set()

    def _run(self) -> None:
        try:
            self.result = self._action(self._tick)
        except BaseException as error:
            self.error = error
        self._done.set()

    def _tick(self) -> None:
        if self._abandoned:
            raise TimeoutError("Nobody waits for this any more.")
        self._num_ticks += 1


class _Progress(fsspec.callbacks.Callback):  # type: ignore[misc]  # fsspec has no types
    """Counts what a transfer has moved as progress."""

    def __init__(self, tick: Tick) -> None:
        super().__init__()
        self._tick = tick

    def call(self, *arguments: Any, **keywords: Any) -> None:
        """Note that something has been moved."""
        self._tick()


def _scratch_folder() -> tempfile.TemporaryDirectory[str]:
    # an abandoned transfer may still be writing into it
    return tempfile.TemporaryDirectory(prefix="raysgd-", ignore_cleanup_errors=True)


def _is_object_store(fs: Any) -> bool:
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    return not _OBJECT_STORES.isdisjoint(protocols)


def _modified(info: dict[str, Any]) -> float | None:
    for key in ("mtime", "modified", "LastModified", "last_modified", "updated", "created"):
        value = info.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return None
