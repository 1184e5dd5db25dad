"""Pickles in files with checksums that detect damage."""

import io
import pickle

import pytest
import torch

from raysgd.checkpoint.file import read_manifest, read_pickle, write_pickle
from raysgd.checkpoint.manifest import Manifest
from raysgd.errors import CheckpointError

BLOB = pickle.dumps({"epoch": 3, "weights": list(range(100))})


@pytest.fixture
def path(tmp_path):
    write_pickle(BLOB, tmp_path / "file", Manifest(global_step=7, metrics={"loss": 0.5}))
    return tmp_path / "file"


def test_pickle_comes_back_with_its_manifest(path):
    blob, manifest = read_pickle(path)
    assert blob == BLOB
    assert (manifest.global_step, manifest.metrics) == (7, {"loss": 0.5})
    assert read_manifest(path) == manifest


def test_a_pickle_that_ends_with_an_archive_comes_back(tmp_path):
    """The checkpoint of a folder ends like this if ``torch.save`` wrote the last file."""
    file = io.BytesIO()
    torch.save({"w": torch.ones(3)}, file)
    blob = pickle.dumps({"model.pt": file.getvalue()})
    write_pickle(blob, tmp_path / "file", Manifest(global_step=7))
    found, manifest = read_pickle(tmp_path / "file")
    assert (found, manifest.global_step) == (blob, 7)
    (tmp_path / "plain").write_bytes(blob)
    assert read_pickle(tmp_path / "plain") == (blob, None)


def test_damage_to_any_byte_and_a_cut_are_found(path):
    content = path.read_bytes()
    places = range(0, len(content), 7)
    damaged = [content[:n] + bytes([content[n] ^ 4]) + content[n + 1 :] for n in places]
    for each in (*damaged, *(content[: int(len(content) * left)] for left in (0.3, 0.9, 0.99))):
        path.write_bytes(each)
        with pytest.raises(CheckpointError, match="damaged"):
            read_pickle(path)
