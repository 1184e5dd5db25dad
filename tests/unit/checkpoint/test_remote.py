"""Checkpoints at URLs: in memory, and in a file system that fails."""

import re
import traceback

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from raysgd.checkpoint import read_file, read_manifest, write_file
from raysgd.checkpoint.location import Location, UnreachableError
from raysgd.errors import CheckpointError
from tests.unit.checkpoint.states import STATE, state_at, step_of

URL = "memory://run/state.pt"


@pytest.fixture(autouse=True)
def empty_memory():
    """Clear the file system in memory before and after each test."""
    for _ in range(2):
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]
        if _ == 0:
            yield


class Failing(MemoryFileSystem):
    """A file system in memory, with one method replaced."""

    protocol = "failing"
    cachable = False
    method = ""
    behave = None

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.removeprefix("failing://"))

    def __getattribute__(self, name):
        if name == type(self).method:
            return type(self).behave
        return super().__getattribute__(name)


@pytest.fixture
def failing(monkeypatch):
    """A function that replaces a method of the file system ``failing://``."""
    monkeypatch.setitem(_registry, "failing", Failing)

    def fail(method, behave, protocol="failing"):
        monkeypatch.setattr(Failing, "method", method)
        monkeypatch.setattr(Failing, "behave", staticmethod(behave))
        monkeypatch.setattr(Failing, "protocol", protocol)

    return fail


def raising(error):
    def behave(*arguments, **keywords):
        raise error

    return behave


def files():
    return sorted(MemoryFileSystem.store)


def test_a_url_may_go_through_another_one(tmp_path):
    write_file(state_at(3), URL)
    assert step_of(read_file(f"simplecache::{URL}")) == 3


def test_a_folder_lists_its_files_only(failing):
    write_file(STATE, URL)
    write_file(STATE, "memory://run/sub/state.pt")
    assert Location("memory://run/").file_names() == ["state.pt"]
    assert Location("memory://missing").file_names() == []
    missing = FileNotFoundError("no such bucket")  # an error of s3fs
    missing.__cause__ = OSError("An error occurred (NoSuchBucket) when calling ListObjectsV2")
    failing("ls", raising(missing))
    with pytest.raises(UnreachableError, match="list failing://bucket/run: no such bucket"):
        Location("failing://bucket/run").file_names()


def test_an_object_store_gets_one_upload_under_the_final_name(failing):
    """Object stores cannot rename files, and would create buckets for folders."""
    puts = []

    def put(local, path):
        puts.append(path)
        MemoryFileSystem().put_file(local, path)

    failing("put_file", put, protocol=("s3", "failing"))
    write_file(STATE, "failing://bucket/state.pt")
    assert puts == ["/bucket/state.pt"]
    Location("failing://fresh").make_folder()
    assert not MemoryFileSystem().exists("/fresh")


def test_other_file_systems_rename_a_file_after_its_complete_upload(failing):
    moved = []

    def move(source, target):
        moved.append((source, target, MemoryFileSystem().size(source)))
        MemoryFileSystem().mv(source, target)

    failing("mv", move)
    write_file(STATE, "failing://run/state.pt")
    ((source, target, size),) = moved
    assert re.fullmatch(r"/run/\.saving-[0-9a-f]{8}-state\.pt", source)
    assert (target, size) == ("/run/state.pt", MemoryFileSystem().size("/run/state.pt"))


# ---- errors


def test_a_folder_is_no_file():
    write_file(STATE, URL)
    with pytest.raises(CheckpointError, match="memory://run: it is a folder"):
        write_file(STATE, "memory://run")
    with pytest.raises(CheckpointError, match="Cannot load memory://run"):
        read_file("memory://run")


@pytest.mark.parametrize("method", ["put_file", "mv"])
def test_the_old_state_survives_a_failing_upload(failing, method):
    url = "failing://run/state.pt"
    write_file(state_at(1), "memory://run/state.pt")
    failing(method, raising(ConnectionResetError("reset by peer")))
    with pytest.raises(UnreachableError, match=f"Cannot save to {url}: reset by peer"):
        write_file(state_at(2), url)
    assert step_of(read_file(URL)) == 1
    assert files() == ["/run/state.pt"]


@pytest.mark.parametrize(
    ("method", "act"),
    [
        ("get_file", lambda url: read_file(url)),
        ("open", lambda url: read_manifest(url)),
        ("ls", lambda url: Location(url).file_names()),
        ("rm_file", lambda url: Location(url).remove()),
        ("makedirs", lambda url: Location(url).make_folder()),
    ],
)
def test_errors_of_the_file_system_name_the_url(failing, method, act):
    failing(method, raising(PermissionError("not yours\nstack of the server")))
    with pytest.raises(UnreachableError, match=r"failing://run: not yours$"):
        act("failing://run")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nowhere://me:secret@host/x.pt", "nowhere://me:***@host/x.pt"),
        ("nowhere://me:pa::secret@host/x.pt", "nowhere://me:***@host/x.pt"),
        ("zip://in.pt::nowhere://me:secret@host/x", "zip://in.pt::nowhere://me:***@host/x"),
        ("nowhere://host/x.pt?sig=secret", r"nowhere://host/x.pt?***"),
        ("nowhere://host/a:b@c.pt", "nowhere://host/a:b@c.pt"),
    ],
)
def test_neither_a_password_nor_a_signature_is_shown(url, shown):
    with pytest.raises(CheckpointError) as caught:
        read_file(url)
    assert str(caught.value).startswith(f"Cannot load {shown}: Protocol not known")
    assert "secret" not in "".join(traceback.format_exception(caught.value, chain=True))


def test_an_error_of_a_server_shows_no_signature(failing):
    url = "failing://run/x.pt?sig=secret"
    failing("get_file", raising(OSError(f"403, url={url}, host=https://me:secret@host/x")))
    with pytest.raises(UnreachableError, match=r"x\.pt\?\*\*\*: 403") as caught:
        read_file(url)
    assert "secret" not in "".join(traceback.format_exception(caught.value, chain=True))


def test_a_state_that_cannot_be_pickled_reaches_no_server(failing):
    failing("put_file", raising(AssertionError("uploaded")))
    with pytest.raises(CheckpointError, match="Cannot save to"):
        write_file({**STATE, "models": [{"hook": lambda: None}]}, "failing://run/state.pt")
