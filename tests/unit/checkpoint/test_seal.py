"""The seal of a file: no damage, wherever it is, passes for the state."""

import copy
import io
import itertools
import json
import time
import warnings
import zipfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raysgd.checkpoint import Manifest, read_file, read_manifest, write_file
from raysgd.checkpoint.manifest import seal, verify
from raysgd.errors import CheckpointError
from tests.unit.checkpoint.states import STATE, flip, state_at


def found(content, whole=True):
    """Return the manifest of a content."""
    return verify(io.BytesIO(content), "x.pt", whole)


def sealed(state=STATE):
    """Return the content of a checkpoint."""
    file = io.BytesIO()
    torch.save(state, file)
    seal(file, Manifest(epoch=2))
    return file.getvalue()


SMALL = sealed()
LARGER = sealed({**state_at(3), "text": "x" * 3000})


def check(content):
    """Verify a content and return what is wrong with it."""
    with pytest.raises(CheckpointError, match="damaged") as caught:
        found(content)
    return str(caught.value)


def damaged(content, place, bits):
    return content[:place] + bytes([content[place] ^ bits]) + content[place + 1 :]


def test_what_is_in_order_passes():
    for content in (SMALL, LARGER):
        assert found(content).epoch == 2
        assert found(content, whole=False).epoch == 2


@pytest.mark.parametrize("bits", [0xFF, 0x01, 0x20, 0x80])
def test_no_flipped_byte_of_a_small_file_passes(bits):
    """Every byte, one after the other; 0x20 makes another letter of the same hash."""
    for place in range(len(SMALL)):
        check(damaged(SMALL, place, bits))


@given(place=st.integers(0, len(LARGER) - 1), bits=st.integers(1, 255))
def test_no_flipped_byte_passes(place, bits):
    check(damaged(LARGER, place, bits))


@given(
    start=st.integers(0, len(LARGER) - 1),
    size=st.integers(1, 3000),
    byte=st.sampled_from(b"\0\xffP"),
)
def test_no_overwritten_segment_passes(start, size, byte):
    segment = LARGER[start : start + size]
    if segment.strip(bytes([byte])):
        check(LARGER[:start] + bytes([byte]) * len(segment) + LARGER[start + size :])


def test_no_truncated_file_passes():
    for size in range(len(SMALL)):
        try:
            assert found(SMALL[:size]) is None
        except CheckpointError:
            continue
        # what has no sign left of an archive is for torch to refuse
        assert size < 4


@given(content=st.sampled_from([SMALL, LARGER]), added=st.binary(min_size=1, max_size=2000))
def test_nothing_may_be_added(content, added):
    check(content + added)
    check(added + content)


@given(
    places=st.lists(st.integers(0, len(LARGER) - 1), min_size=2, max_size=6, unique=True),
    data=st.data(),
)
def test_several_flipped_bytes_do_not_pass(places, data):
    content = LARGER
    for place in places:
        content = damaged(content, place, data.draw(st.integers(1, 255)))
    check(content)


@pytest.mark.parametrize("size", [0, 3, 100, 5000])
def test_a_damaged_file_is_never_loaded(tmp_path, size):
    """The way that users go, with places all over the file."""
    path = tmp_path / "state.pt"
    write_file({**STATE, "models": [{"w": torch.randn(size)}]}, path)
    content = path.read_bytes()
    places = itertools.chain(range(0, len(content), 37), range(len(content) - 500, len(content), 3))
    for place in places:
        path.write_bytes(damaged(content, place, 0x10))
        with pytest.raises(CheckpointError, match=r"state\.pt: .* damaged"):
            read_file(path)
        path.write_bytes(content[:place])
        with pytest.raises(CheckpointError, match=r"state\.pt: .* damaged"):
            read_file(path)


# ---- files without a seal


def torch_saved(**arguments):
    file = io.BytesIO()
    torch.save(STATE, file, **arguments)
    return file.getvalue()


def test_what_torch_alone_wrote_has_no_manifest():
    for legacy in (False, True):
        content = torch_saved(_use_new_zipfile_serialization=not legacy)
        assert found(content) is None
        assert found(content, whole=False) is None


def test_a_file_that_lost_its_seal_does_not_pass_for_an_older_one():
    """Also one that looks well otherwise: another program has written the directory anew."""
    file = io.BytesIO(SMALL)
    with zipfile.ZipFile(file, "a") as archive:
        archive.comment = b""
    assert b"raysgd-checkpoint" not in file.getvalue()
    assert "its seal is not" in check(file.getvalue())


def test_a_comment_of_another_kind_is_none_of_an_older_library():
    """All else that tells a sealed file is gone, and each checksum of the archive is right."""
    content = SMALL.replace(b"raysgd-manifest.json", b"raysgd-manifest.jsox")
    start = content.rfind(b"raysgd-checkpoint")
    content = content[:start] + bytes(len(content) - start)
    assert zipfile.ZipFile(io.BytesIO(content)).testzip() is None
    assert "its seal" in check(content)


def test_an_archive_within_a_truncated_file_does_not_pass():
    """A tensor holds a whole archive, and the file ends with it."""
    inner = torch_saved()
    content = sealed({**STATE, "models": [torch.frombuffer(bytearray(inner), dtype=torch.uint8)]})
    end = content.find(inner) + len(inner)
    check(content[:end])


def test_an_older_file_with_another_checksum_is_damaged():
    content = torch_saved()
    place = content.find(torch.arange(4.0).numpy().tobytes())
    assert "record archive/data/0" in check(damaged(content, place, 1))


# ---- the cost


class Counting(io.BytesIO):
    """Counts the bytes that are read from it."""

    num_read = 0

    def read(self, size=-1):
        chunk = super().read(size)
        self.num_read += len(chunk)
        return chunk


def test_every_byte_is_read_once_to_be_checked():
    content = sealed({**STATE, "models": [{"w": torch.randn(300_000)}]})
    file = Counting(content)
    verify(file, "x.pt")
    assert len(content) <= file.num_read < len(content) + 150_000
    file = Counting(content)
    verify(file, "x.pt", whole=False)
    assert file.num_read < 100_000  # zipfile looks for the end of the directory


def test_a_manifest_is_found_in_a_file_on_disk_without_reading_it(tmp_path):
    path = write_file(STATE, tmp_path / "state.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a file left open would be one
        assert read_manifest(path).epoch == 2


# ---- errors that name the file


def manifest_of(path, whole=True):
    with path.open("rb") as file:
        return verify(file, str(path), whole)


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
        verify(Failing(b"x" * 1000), "state.pt")


CONTENT = json.loads(Manifest().to_json())


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"3", b'{"format": "x"}', b"\xff"]
    + [json.dumps({**CONTENT, "metrics": metrics}).encode() for metrics in ("ab", {"a": "x"})]
    + [
        json.dumps({key: CONTENT[key] for key in CONTENT if key != left_out}).encode()
        for left_out in CONTENT
    ],
)
def test_a_crafted_manifest_is_an_error_that_names_the_file(tmp_path, monkeypatch, text):
    path = tmp_path / "state.pt"
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "to_json", lambda manifest: text)
        write_file(STATE, path)
    with pytest.raises(CheckpointError, match=r"state\.pt: the file is damaged or is not a check"):
        manifest_of(path)


# ---- small files of much


def with_records(write):
    """The records of a state, written into another archive by `write(archive, name, content)`."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(torch_saved())) as records, zipfile.ZipFile(file, "w") as to:
        for name in records.namelist():
            write(to, name, records.read(name))
    return file


def bomb():
    """100 MB of zeros in 100 KB."""
    return with_records(
        lambda to, name, content: to.writestr(
            name, bytes(100_000_000) if "data/0" in name else content, zipfile.ZIP_DEFLATED
        )
    )


def overlapping():
    """A record of 1 MB a thousand times."""
    file = with_records(lambda to, name, content: to.writestr(name, content))
    with zipfile.ZipFile(file, "a") as to:
        to.writestr("archive/data/1", bytes(1_000_000))
        record = to.filelist[-1]
        for number in range(2, 1000):
            again = copy.copy(record)
            again.filename = again.orig_filename = f"archive/data/{number}"
            to.filelist.append(again)
    return file


def behind_another():
    return io.BytesIO(b"PK\x03\x04" + torch_saved())


@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize("craft", [bomb, overlapping, behind_another])
def test_an_archive_that_could_unpack_to_more_than_the_file_is_refused(tmp_path, craft, is_sealed):
    file = craft()
    if is_sealed:
        seal(file, Manifest())
    path = tmp_path / "state.pt"
    path.write_bytes(file.getvalue())
    began = time.process_time()
    for read in (read_file, manifest_of):
        with pytest.raises(CheckpointError, match="records are compressed, overlap, or"):
            read(path)
    assert time.process_time() - began < 1.0
