"""The seal of a checkpoint file, which detects damage to any byte, and its manifest."""

import hashlib
import io
import tempfile
import zipfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raysgd.checkpoint import Manifest, manifest, write_file
from raysgd.checkpoint.manifest import HashingFile, verify
from raysgd.errors import CheckpointError
from tests.unit.checkpoint.states import STATE, flip, state_at


def found(content, checks_content=True):
    """Verify a content and return its manifest."""
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(content)
        return verify(file, "x.pt", checks_content)


def sealed(state=STATE):
    """Return the content of a checkpoint."""
    with tempfile.TemporaryFile() as file:
        writing = HashingFile(file)
        torch.save(state, writing)
        writing.seal(Manifest(epoch=2))
        file.seek(0)
        return file.read()


SMALL = sealed()
LARGER = sealed({**state_at(3), "text": "x" * 3000})


def check(content):
    """Check that a content is damaged, and return the error message."""
    with pytest.raises(CheckpointError, match="damaged") as caught:
        found(content)
    return str(caught.value)


def damaged(content, place, bits):
    return content[:place] + bytes([content[place] ^ bits]) + content[place + 1 :]


@pytest.mark.parametrize("bits", [0x01, 0x20])
def test_no_flipped_byte_of_a_small_file_passes(bits):
    """Flip each byte in turn. The bit 0x20 changes the case of letters in a hash."""
    assert found(SMALL).epoch == found(SMALL, checks_content=False).epoch == 2
    for place in range(len(SMALL)):
        check(damaged(SMALL, place, bits))


def test_no_truncated_file_passes():
    for size in range(len(SMALL)):
        try:
            assert found(SMALL[:size]) is None
        except CheckpointError:
            continue
        # PyTorch rejects a file that is too short to look like an archive
        assert size < 4


@given(content=st.sampled_from([SMALL, LARGER]), added=st.binary(min_size=1, max_size=2000))
def test_nothing_may_be_added(content, added):
    check(content + added)
    check(added + content)


# ---- files without a seal


def torch_saved(**arguments):
    file = io.BytesIO()
    torch.save(STATE, file, **arguments)
    return file.getvalue()


def test_a_file_that_lost_its_seal_does_not_pass_for_an_older_one():
    """Another program has rewritten the directory of the archive. The rest is intact."""
    file = io.BytesIO(SMALL)
    with zipfile.ZipFile(file, "a") as archive:
        archive.comment = b""
    assert b"raysgd-checkpoint" not in file.getvalue()
    assert "its end has changed" in check(file.getvalue())


def test_an_archive_within_a_truncated_file_does_not_pass():
    """A tensor holds a whole archive, and the file ends with it."""
    inner = torch_saved()
    content = sealed({**STATE, "models": [torch.frombuffer(bytearray(inner), dtype=torch.uint8)]})
    end = content.find(inner) + len(inner)
    check(content[:end])


def test_an_archive_that_unpacks_to_more_than_its_size_does_not_pass():
    file = io.BytesIO(torch_saved())
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/9", bytes(1_000_000))
    assert "its records are compressed or overlap" in check(file.getvalue())


# ---- errors that name the file


def manifest_of(path, checks_content=True):
    with path.open("rb") as file:
        return verify(file, str(path), checks_content)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "state.pt"
    write_file(STATE, path, Manifest(operator_name="Digits"))
    return path


def test_damage_to_the_content_is_found_where_all_of_it_is_checked(path):
    flip(path, path.stat().st_size // 4)
    with pytest.raises(CheckpointError, match=r"Cannot load .*state\.pt: the file is damaged: "):
        manifest_of(path)
    assert manifest_of(path, checks_content=False).operator_name == "Digits"


def test_a_flipped_byte_is_found_in_each_part(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "_CHUNK_BYTES", 1 << 14)
    path = tmp_path / "state.pt"
    write_file({**STATE, "models": [{"w": torch.arange(50_000.0)}]}, path)
    assert manifest_of(path)
    assert path.stat().st_size > 10 << 14
    for place in range(100, path.stat().st_size, 1 << 14):
        flip(path, place)
        with pytest.raises(CheckpointError, match="damaged"):
            manifest_of(path)
        flip(path, place)


def test_a_file_with_a_single_hash_of_an_older_version_passes(path):
    content = path.read_bytes()[: -manifest._SEAL_SIZE]
    digest = hashlib.sha256(content).hexdigest()
    path.write_bytes(content + f"raysgd-checkpoint sha256={digest}\n".encode())
    assert manifest_of(path).operator_name == "Digits"
    flip(path, path.stat().st_size // 4)
    with pytest.raises(CheckpointError, match="damaged"):
        manifest_of(path)


def test_parts_are_hashed_while_they_are_written(tmp_path, monkeypatch):
    """The end of the archive spans several parts, and the manifest replaces it."""
    monkeypatch.setattr(manifest, "_CHUNK_BYTES", 1 << 12)
    state, hashed = {str(i): torch.arange(1e4) for i in range(300)}, []
    with open(tmp_path / "state.pt", "xb+") as file:
        writing = HashingFile(file)
        torch.save(state, writing)
        num_chunks, hash_ = len([h.result() for h in writing._hashes]), manifest._hash
        monkeypatch.setattr(manifest, "_hash", lambda *at: hashed.append(at[1]) or hash_(*at))
        writing.seal(Manifest(operator_name="Digits"))
        assert 2 < len(hashed) < num_chunks / 20
        assert verify(file, "state.pt").operator_name == "Digits"


def test_damage_to_the_manifest_is_found_either_way(path):
    flip(path, path.read_bytes().find(b'"operator_name"') + 1)
    for checks_content in (True, False):
        with pytest.raises(CheckpointError, match=r"Cannot load .*state\.pt: the file .*damaged"):
            manifest_of(path, checks_content)


def test_a_disk_that_fails_is_an_error_that_names_the_file(tmp_path):
    class Failing(io.BytesIO):
        def read(self, *arguments):
            raise OSError("input/output error")

    with pytest.raises(CheckpointError, match=r"state\.pt: .*\(input/output error\)"):
        verify(Failing(b"x" * 1000), "state.pt")


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b'{"format": "x"}', b"\xff", b'{"format": 1}'],
)
def test_a_crafted_manifest_is_an_error_that_names_the_file(tmp_path, monkeypatch, text):
    path = tmp_path / "state.pt"
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "to_json", lambda manifest: text)
        write_file(STATE, path)
    with pytest.raises(CheckpointError, match=r"state\.pt: the file is damaged or is not a check"):
        manifest_of(path)
