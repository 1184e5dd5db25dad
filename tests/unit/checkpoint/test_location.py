"""Which place a path or a URL names."""

from pathlib import Path

import pytest

from raysgd.checkpoint.location import Location
from raysgd.errors import CheckpointError


def test_a_path_is_local_and_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    for path in ("a/b.pt", Path("a/b.pt"), tmp_path / "a/b.pt", f"file://{tmp_path}/a/b.pt"):
        location = Location(path)
        assert location.is_local
        assert location.name == str(tmp_path / "a" / "b.pt")
    assert Location("~/x.pt").name == "/home/somebody/x.pt"


@pytest.mark.parametrize("nonsense", [None, 3, b"bytes"])
def test_what_is_no_path_is_a_type_error(nonsense):
    with pytest.raises(TypeError, match=r"(?i)path"):
        Location(nonsense)


def test_missing_home_folder_is_named():
    with pytest.raises(CheckpointError, match=r"'~nosuch/x\.pt': the user's home folder"):
        Location("~nosuch/x.pt")
