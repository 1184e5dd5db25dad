"""Files behind URLs, through fsspec. Whoever does not answer is not waited for without end."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import IO, Any, TypeVar

import fsspec

from raysgd._internal.config import env_seconds
from raysgd._internal.files import temporary_name
from raysgd._internal.paths import shown_url, without_secrets
from raysgd.checkpoint.location import (
    UnreachableError,
    first_line,
    system_error,
)
from raysgd.errors import CheckpointError

__all__ = ["RemoteFile"]

T = TypeVar("T")

_TIMEOUT = "SGD_CHECKPOINT_TIMEOUT_S"
_DEFAULT_TIMEOUT_S = 60.0
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci"}
"""Where a file appears whole when its upload ends, and renaming would be a second upload."""


class _Progress(fsspec.callbacks.Callback):  # type: ignore[misc]  # fsspec has no types
    """Counts what a transfer has moved, and ends one that nobody waits for any more."""

    def __init__(self) -> None:
        super().__init__()
        self.num_moves = 0
        self.is_abandoned = False

    def call(self, *arguments: Any, **keywords: Any) -> None:
        """Note that something has been moved."""
        if self.is_abandoned:
            raise TimeoutError("Nobody waits for this any more.")
        self.num_moves += 1


Action = Callable[[Any, str, _Progress], T]
"""What is to be done: is given a file system, the path in it, and what to tell the progress."""


class RemoteFile:
    """A URL. What is written or loaded goes through a temporary file on local disk.

    All methods raise CheckpointError.

    Attributes:
        name: the URL.
        shown: how messages name it: without passwords and signatures.
    """

    def __init__(self, url: str) -> None:
        self.name = url
        self.shown = shown_url(url)
        for protocol in (part.partition("://")[0] for part in url.split("::")):
            self._check_protocol(protocol)

    def _check_protocol(self, protocol: str) -> None:
        """Check that there is a file system for a protocol, without asking any server."""
        try:
            fsspec.get_filesystem_class(protocol)
        except ImportError as error:  # which says what to install
            raise CheckpointError(f"Cannot open {self.shown}: {error}") from error
        except ValueError as error:
            # a password with :: in it looks like a chain
            named = f"{protocol}://" if protocol in self.shown else "it"
            raise CheckpointError(
                f"Cannot open {self.shown}: nothing opens {named}. Known are file://, "
                "memory://, and with the package in brackets installed, s3:// (s3fs), "
                "gs:// (gcsfs), az:// (adlfs), hdfs:// (pyarrow), sftp:// (paramiko), "
                "https:// (aiohttp) and others, which fsspec lists."
            ) from self._cause(error)

    def _cause(self, error: BaseException) -> BaseException | None:
        """Return an error as the cause of ours, unless its text may show what is not shown."""
        return error if self.shown == self.name else None

    def check_writable(self) -> str:
        """Return the URL: whether it can be written to shows when it is."""
        return self.name

    def write(self, fill: Callable[[IO[bytes]], None]) -> str:
        """Write to local disk and upload it, to a temporary name where a name is not atomic."""

        def upload(fs: Any, path: str, progress: _Progress) -> None:
            if _is_object_store(fs):
                fs.put_file(local, path, callback=progress)
                return
            if fs.isdir(path):
                raise IsADirectoryError("it is a folder; give the name of a file in it")
            folder, name = fs._parent(path), path.rsplit("/", 1)[-1]
            temporary = f"{folder}/{temporary_name(name)}"
            try:
                fs.put_file(local, temporary, callback=progress)
                progress.call()  # ends here where nobody waits any more
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

        with _scratch_folder() as scratch:
            local = str(Path(scratch) / "state")
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
        """Fetch all of the file and open it for reading."""
        with _scratch_folder() as scratch:
            local = Path(scratch) / "state"
            self._bounded(
                "load",
                lambda fs, path, progress: fs.get_file(path, str(local), callback=progress),
            )
            if not local.is_file():
                raise CheckpointError(f"Cannot load {self.shown}: it is a folder.")
            with local.open("rb") as file:
                yield file

    def inspect(self, read: Callable[[IO[bytes]], T]) -> T:
        """Return what `read` makes of the file, which is fetched only where it is read."""

        def action(fs: Any, path: str, progress: _Progress) -> T:
            with fs.open(path, "rb") as file:
                return read(file)

        return self._bounded("load", action)

    def remove(self) -> None:
        """Remove the file, if it is there."""

        def action(fs: Any, path: str, progress: _Progress) -> None:
            with contextlib.suppress(FileNotFoundError):
                fs.rm_file(path)

        self._bounded("remove", action)

    def child(self, name: str) -> RemoteFile:
        """Return a file in this folder."""
        return RemoteFile(f"{self.name.rstrip('/')}/{name}")

    def make_folder(self) -> None:
        """Make this folder, where there are such: an object store has none, and makes buckets."""

        def action(fs: Any, path: str, progress: _Progress) -> None:
            if not _is_object_store(fs):
                fs.makedirs(path, exist_ok=True)

        self._bounded("make the folder", action)

    def file_names(self) -> list[str]:
        """Return the names of the files in this folder; none if there is no such folder."""

        def action(fs: Any, path: str, progress: _Progress) -> list[str]:
            fs.invalidate_cache()  # another process may have written since
            try:
                infos = fs.ls(path, detail=True)
            except FileNotFoundError:
                return []
            files = (info["name"] for info in infos if info["type"] == "file")
            return [name.rstrip("/").rsplit("/", 1)[-1] for name in files]

        return self._bounded("list", action)

    def _bounded(self, verb: str, action: Action[T]) -> T:
        """Run an action in another thread, as long as it makes progress.

        A thread that hangs cannot be ended; it is left behind, and ends when it moves on.
        """
        timeout_s = env_seconds(_TIMEOUT, _DEFAULT_TIMEOUT_S)
        progress, outcome = _Progress(), Future[T]()

        def run() -> None:
            try:
                fs, path = fsspec.core.url_to_fs(self.name)  # which may connect
                outcome.set_result(action(fs, path, progress))
            except BaseException as error:
                outcome.set_exception(error)

        # a daemon: one that hangs must not keep the interpreter from ending
        threading.Thread(target=run, name="raysgd-checkpoint-io", daemon=True).start()
        seen = 0
        try:
            while not wait([outcome], timeout_s).done and progress.num_moves != seen:
                seen = progress.num_moves
        finally:
            progress.is_abandoned = True
        if not outcome.done():
            raise UnreachableError(
                f"Cannot {verb} {self.shown}: no answer for {timeout_s:g} seconds. Is the server "
                f"up, and the network? A slow one may be given more time by {_TIMEOUT}."
            )
        error = outcome.exception()
        if error is None:
            return outcome.result()
        if isinstance(error, CheckpointError) or not isinstance(error, Exception):
            raise error
        if isinstance(error, FileNotFoundError) and verb == "load":
            raise CheckpointError(
                f"Cannot load {self.shown}: there is no such file."
            ) from self._cause(error)
        said = without_secrets(first_line(error).replace(self.name, self.shown))
        raise UnreachableError(f"Cannot {verb} {self.shown}: {said}") from self._cause(error)


def _scratch_folder() -> tempfile.TemporaryDirectory[str]:
    # an abandoned transfer may still be writing into it
    return tempfile.TemporaryDirectory(prefix="raysgd-", ignore_cleanup_errors=True)


def _is_object_store(fs: Any) -> bool:
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    return not _OBJECT_STORES.isdisjoint(protocols)
