"""Manifests that are read with errors that name the file."""

import io

import pytest

from raysgd.checkpoint import Manifest, write_file
from raysgd.checkpoint.checked import checked_manifest
from raysgd.checkpoint.location import locate
from raysgd.errors import CheckpointError
from tests.unit.checkpoint.states import STATE, flip


def manifest_of(path, whole=True):
    with path.open("rb") as file:
        return checked_manifest(locate(path), file, whole)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "state.pt"
    write_file(STATE, path, Manifest(operator="Digits"))
    return path


def test_the_manifest_of_a_file_in_order(path):
    for whole in (True, False):
        assert manifest_of(path, whole).operator == "Digits"


def test_damage_to_the_content_is_found_where_all_of_it_is_checked(path):
    flip(path, path.stat().st_size // 4)
    with pytest.raises(CheckpointError, match=r"Cannot load .*state\.pt: the file is damaged: "):
        manifest_of(path)
    assert manifest_of(path, whole=False).operator == "Digits"


def test_damage_to_the_manifest_is_found_either_way(path):
    flip(path, path.read_bytes().find(b'"operator"') + 1)
    for whole in (True, False):
        with pytest.raises(CheckpointError, match=r"Cannot load .*state\.pt: the file .*damaged"):
            manifest_of(path, whole)


def test_a_newer_format_is_no_damage(tmp_path):
    path = tmp_path / "state.pt"
    write_file(STATE, path, Manifest(format=2, versions={"raysgd": "9.1"}))
    with pytest.raises(CheckpointError) as caught:
        manifest_of(path)
    assert "raysgd 9.1 wrote it in format 2" in str(caught.value)
    assert "damaged" not in str(caught.value)


def test_a_file_of_something_else_never_had_one(tmp_path):
    path = tmp_path / "state.pt"
    path.write_bytes(b"some words")
    for whole in (True, False):
        assert manifest_of(path, whole) is None


def test_a_disk_that_fails_is_an_error_that_names_the_file(tmp_path):
    class Failing(io.BytesIO):
        def read(self, *arguments):
            raise OSError("input/output error")

    with pytest.raises(CheckpointError, match=r"state\.pt: .*\(input/output error\)"):
        checked_manifest(locate(tmp_path / "state.pt"), Failing(b"x" * 1000), whole=True)
