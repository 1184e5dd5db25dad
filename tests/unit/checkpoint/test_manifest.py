"""What a checkpoint says about itself, as text and back."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.checkpoint.manifest import FORMAT, Manifest
from raysgd.errors import CheckpointError

MANIFESTS = st.builds(
    Manifest,
    world_size=st.integers(0),
    epoch=st.integers(0),
    global_step=st.integers(0),
    operator=st.text(),
    job=st.text(),
    metrics=st.dictionaries(st.text(), st.floats(allow_nan=False)),
)


@given(manifest=MANIFESTS)
def test_a_manifest_comes_back(manifest):
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_a_newer_format_is_told_whatever_else_it_holds():
    with pytest.raises(CheckpointError, match=rf"raysgd 7 .* format {FORMAT + 1}, .* Update"):
        Manifest.from_json(json.dumps({"format": FORMAT + 1, "versions": {"raysgd": "7"}}).encode())


def test_additions_within_a_format_are_ignored():
    content = {**json.loads(Manifest(epoch=3).to_json()), "new": 1}
    assert Manifest.from_json(json.dumps(content).encode()).epoch == 3
