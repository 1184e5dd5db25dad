"""Files of records: the content of records, open files, and the cache."""

import gzip
import importlib.util
import io
import lzma
import os
import tarfile

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from raysgd.data import Stream, formats, jsonl, parquet, tar, text
from raysgd.data.formats import RecordError


def write_tar(path, members):
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


# ---- content


@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("block", [3, 4096])
@pytest.mark.parametrize(
    ("open_records", "content", "expected"),
    [
        (text, b"a\r\n\n b \n\nc", ["a", "", " b ", "", "c"]),
        (jsonl, b"\n[1, 2]\n\n\n1\n\n2", [[1, 2], 1, 2]),
        (jsonl, b"\r\n [1, 2]\r\n\r\n \t\r\n1\r\n2\r\n\r", [[1, 2], 1, 2]),
    ],
)
def test_lines_and_blank_lines(tmp_path, monkeypatch, open_records, content, expected, block, end):
    monkeypatch.setattr(formats, "_BLOCK_BYTES", block)
    (tmp_path / "data").write_bytes(content + end)
    records = open_records(tmp_path / "data", cache_dir=tmp_path / "cache")
    assert records.read(range(len(records))) == expected


def test_sample_of_an_archive_has_the_files_with_its_stem(tmp_path):
    files = {"a.0/x.cls": b"1", "a.0/x.seg.png": b"2", "a.0/y.cls": b"3", "b/y.cls": b""}
    write_tar(tmp_path / "data.tar", files)
    assert list(Stream(tar(tmp_path / "data.tar", cache_dir=tmp_path))) == [
        {"__key__": "a.0/x", "cls": b"1", "seg.png": b"2"},
        {"__key__": "a.0/y", "cls": b"3"},
        {"__key__": "b/y", "cls": b""},
    ]


def test_stamp_of_a_file_depends_on_its_name_size_and_time_but_not_on_its_folder(tmp_path):
    def stamp(name, content="1\n", seconds=10):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
        os.utime(path, (0, seconds))
        return text(path, cache_dir=tmp_path / "cache").stamps()

    first = stamp("one/a.txt")
    assert stamp("two/a.txt") == first
    others = [stamp("one/b.txt"), stamp("one/a.txt", "1\n2\n"), stamp("one/a.txt", seconds=11)]
    assert first not in others


def test_files_match_a_pattern_in_the_order_of_their_names(tmp_path):
    for name in ("b2", "a", "b1", "c"):
        (tmp_path / name).write_text(name)
    paths = [tmp_path / "c", str(tmp_path / "b?")]
    assert list(Stream(text(paths, cache_dir=tmp_path / "cache"))) == ["c", "b1", "b2"]


# ---- errors


def test_broken_record_is_named_with_its_file_and_number(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"1\n2\n\xff\n4\n")
    records = text([tmp_path / "a", tmp_path / "b"], cache_dir=tmp_path / "cache")
    found = records.read([7, 6, 0])
    assert (found[0], found[2]) == ("4", "1")
    assert str(found[1]).startswith(f"{tmp_path / 'b'}, line 3: ")


def test_file_that_is_cut_while_it_is_open_is_an_error(tmp_path):
    (tmp_path / "data").write_text("1234567\n" * 5000)
    records = text(tmp_path / "data", cache_dir=tmp_path / "cache")
    records.read([0])
    os.truncate(tmp_path / "data", 80)
    with pytest.raises(RuntimeError, match=r"data changed while it was read"):
        records.read([4999])


def test_missing_file_is_not_looked_for_again(tmp_path, monkeypatch):
    monkeypatch.setattr(formats.time, "sleep", lambda seconds: pytest.fail("it waits"))
    with pytest.raises(FileNotFoundError, match=r"none\.txt"):
        text(tmp_path / "none.txt")


def cut(data):
    return data[: len(data) * 2 // 3]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data.gz", cut(gzip.compress(os.urandom(5000))), "Compressed file ended"),
        ("data.gz", b"no archive" * 100, "Not a gzipped file"),
        ("data.xz", cut(lzma.compress(os.urandom(5000))), "Compressed file ended"),
        ("data.tar", b"no archive" * 100, "invalid header"),
        ("data.tgz", cut(gzip.compress(os.urandom(5000))), "Compressed file ended"),
        ("data.parquet", b"no archive" * 100, "Parquet magic bytes not found"),
        ("data.jsonl.zst", b"", "to read .zst files, install zstandard"),
    ],
)
def test_file_that_cannot_be_read_is_named_and_leaves_nothing_in_the_cache(
    tmp_path, monkeypatch, name, content, message
):
    if name.endswith(".zst") and importlib.util.find_spec("zstandard"):
        pytest.skip("zstandard is installed")
    monkeypatch.setattr(formats.time, "sleep", lambda seconds: pytest.fail("it tries again"))
    (tmp_path / name).write_bytes(content)
    kinds = {"tar": tar, "tgz": tar, "parquet": parquet}
    open_records = kinds.get(name.rpartition(".")[2], text)
    with pytest.raises(RecordError, match=f"{name}: {message}"):
        open_records(tmp_path / name, cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").iterdir())


def test_compressed_archive_is_read(tmp_path):
    write_tar(tmp_path / "data.tar", {"a.cls": b"1", "b.cls": b"2"})
    (tmp_path / "data.tgz").write_bytes(gzip.compress((tmp_path / "data.tar").read_bytes()))
    records = tar(tmp_path / "data.tgz", cache_dir=tmp_path / "cache")
    assert [record["cls"] for record in records.read([0, 1])] == [b"1", b"2"]


# ---- open files


def test_few_files_stay_open(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "_NUM_OPEN", 2)
    for name in "abc":
        (tmp_path / name).write_text(name)
    records = text(str(tmp_path / "?"), cache_dir=tmp_path / "cache")
    records.close()
    files = []
    for number in (0, 1, 0, 2):  # the file of record 1 is the one that was not used for longest
        records.read([number])
        files = [*dict.fromkeys([*files, *records._files.values()])]
    assert [file.closed for file in files] == [False, True, False]


class Counting(MemoryFileSystem):
    """A file system whose reads fail, and which needs a token."""

    protocol = "counting"
    num_failures = 0
    opened = 0

    def __init__(self, token, **options):
        super().__init__(**options)
        assert token == "mine"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("counting://"))

    def _open(self, path, mode="rb", **options):
        Counting.opened += mode == "rb"
        return (
            Failing(super()._open(path, "rb").read()) if mode == "rb" else super()._open(path, mode)
        )


class ServiceError(Exception):
    """An error of another library, such as aiohttp."""


class Failing(io.BytesIO):
    def read(self, *size):
        if Counting.num_failures:
            Counting.num_failures -= 1
            raise ServiceError
        return super().read(*size)


def test_remote_file_is_opened_once_and_again_after_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(formats.time, "sleep", lambda seconds: None)
    fsspec.register_implementation("counting", Counting, clobber=True)
    for name, change in (("a.txt", bytes), ("a.gz", gzip.compress)):
        with Counting("mine").open(f"/{name}", "wb") as file:
            file.write(change(b"0\n1\n2\n"))
        Counting.opened, Counting.num_failures = 0, 1
        records = text(f"counting:///{name}", cache_dir=tmp_path, token="mine")
        assert records.paths == [f"counting:///{name}"]
        assert [records.read([number]) for number in range(3)] == [["0"], ["1"], ["2"]]
        assert Counting.opened == 2  # and once after the error
    records = text("counting:///a.txt", cache_dir=tmp_path, token="mine")
    assert records.read([0]) == ["0"]
    Counting.opened, Counting.num_failures = 0, 2
    assert records.read([1]) == ["1"]
    assert Counting.opened == 2


def test_remote_file_that_changes_is_an_error_in_the_next_epoch(tmp_path):
    def write(content):
        with fsspec.open("memory://changing.txt", "wb") as file:
            file.write(content)

    write(b"0\n1\n")
    stream = Stream(text("memory://changing.txt", cache_dir=tmp_path))
    assert stream.read(0, [0]) == ["0"]
    write(b"2\n3\n")
    with pytest.raises(RuntimeError, match=r"changing\.txt changed while it was read"):
        stream.read(1, [0])
