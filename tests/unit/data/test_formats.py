"""Files of records: the content of records, open files, and the cache."""

import bz2
import errno
import gzip
import http.server
import io
import lzma
import os
import sys
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from raysgd.data import Stream, formats, jsonl, parquet, tar, text
from raysgd.data import records as module
from raysgd.data.records import RecordError


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
    monkeypatch.setattr(formats, "BLOCK_BYTES", block)
    (tmp_path / "data").write_bytes(content + end)
    records = open_records(tmp_path / "data", cache_dir=tmp_path / "cache")
    assert records.read(range(len(records))) == expected


def test_sample_of_an_archive_has_the_files_with_its_stem(tmp_path):
    files = {"a.0/x.cls": b"1", "a.0/x.seg.png": b"2", "a.0/y.cls": b"3", "b/y.cls": b""}
    write_tar(tmp_path / "data.tar", files)
    (tmp_path / "data.tgz").write_bytes(gzip.compress((tmp_path / "data.tar").read_bytes()))
    for name in ("data.tar", "data.tgz"):
        assert list(Stream(tar(tmp_path / name, cache_dir=tmp_path))) == [
            {"__key__": "a.0/x", "cls": b"1", "seg.png": b"2"},
            {"__key__": "a.0/y", "cls": b"3"},
            {"__key__": "b/y", "cls": b""},
        ]


def test_files_that_web_dataset_ignores_are_in_no_sample(tmp_path):
    files = {"._a.JPG": b"0", "a.JPG": b"1", ".DS_Store": b"0", "d/._b.x": b"0", "README": b"0"}
    write_tar(tmp_path / "data.tar", {**files, "a.cls": b"2", "__meta__/c.x": b"0"})
    assert list(Stream(tar(tmp_path / "data.tar", cache_dir=tmp_path))) == [
        {"__key__": "a", "jpg": b"1", "cls": b"2"}
    ]


def test_last_file_of_an_archive_may_be_sparse(tmp_path):
    with tarfile.open(tmp_path / "data.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("a.bin")
        member.pax_headers = {
            "GNU.sparse.major": "1",
            "GNU.sparse.minor": "0",
            "GNU.sparse.name": "a.bin",
            "GNU.sparse.realsize": "9000",
        }
        content = b"1\n8990\n10\n".ljust(512, b"\0") + b"0123456789"
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    (sample,) = Stream(tar(tmp_path / "data.tar", cache_dir=tmp_path))
    assert sample["bin"] == bytes(8990) + b"0123456789"


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


def test_files_match_a_pattern_in_the_order_of_their_names(tmp_path, monkeypatch):
    monkeypatch.setattr(module.time, "sleep", lambda seconds: pytest.fail("it waits"))
    for name in ("b2", "a", "b1", "c"):
        (tmp_path / name).write_text(name)
    paths = [tmp_path / "c", str(tmp_path / "b?"), tmp_path / "c"]
    assert list(Stream(text(paths, cache_dir=tmp_path / "cache"))) == ["c", "b1", "b2", "c"]
    with pytest.raises(ValueError, match=r"b\?' and '.*\*1' both match .*b1, which .* twice"):
        text([*paths, tmp_path / "*1"])
    with pytest.raises(FileNotFoundError, match=r"none\.txt"):
        text(tmp_path / "none.txt")


def test_path_that_exists_is_no_pattern_and_hidden_files_match_none(tmp_path):
    folder, hidden = tmp_path / "run[1]", ".ipynb_checkpoints/c.txt"
    (folder / hidden).parent.mkdir(parents=True)
    for name in ("a?.txt", "ab.txt", "._ab.txt", hidden):
        (folder / name).write_text(name)
    expected = {"a?.txt": ["a?.txt"], "**/*.txt": ["a?.txt", "ab.txt"], ".*/*.txt": [hidden]}
    for pattern, names in expected.items():
        assert list(Stream(text(folder / pattern, cache_dir=tmp_path / "cache"))) == names


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_file_of_the_size_and_date_of_another_gets_its_own_index(tmp_path, compress):
    name = f"data{'.gz' if compress is gzip.compress else ''}"
    for lines in (["aaaa", "bb"], ["x", "yyyyy"]):
        content = "".join(f"{line}\n" for line in lines).encode()
        content = compress(content, 0, mtime=0) if compress is gzip.compress else content
        (tmp_path / name).write_bytes(content)
        os.utime(tmp_path / name, (0, 0))
        assert list(Stream(text(tmp_path / name, cache_dir=tmp_path / "cache"))) == lines


# ---- the cache


@pytest.mark.parametrize("content", [b"", b"no index", b"\x93NUMPY\x01"])
def test_damaged_index_is_built_again(tmp_path, content):
    (tmp_path / "data").write_text("1\n2\n")
    for _ in range(2):
        assert list(Stream(text(tmp_path / "data", cache_dir=tmp_path / "cache"))) == ["1", "2"]
        (index,) = (tmp_path / "cache").iterdir()
        index.write_bytes(content)


def test_copy_of_a_private_file_is_private_and_made_once(tmp_path, monkeypatch):
    (tmp_path / "data.gz").write_bytes(gzip.compress(b"1\n"))
    (tmp_path / "data.gz").chmod(0o600)
    made, decompress = [], text._decompress
    monkeypatch.setattr(text, "_decompress", lambda *args: made.append(1) or decompress(*args))

    def read(_=None):
        return list(Stream(text(tmp_path / "data.gz", cache_dir=tmp_path / "cache")))

    with ThreadPoolExecutor(4, initializer=threading.Barrier(4).wait) as pool:
        assert list(pool.map(read, range(4))) == [["1"]] * 4
    assert made == [1]
    (copy,) = (tmp_path / "cache").glob("*.raw")
    assert copy.stat().st_mode & 0o777 == 0o600
    copy.write_bytes(b"2\n")
    assert read() == ["1"]
    monkeypatch.setattr(module, "lock_of_node", pytest.fail)  # an intact copy needs no lock
    assert read() == ["1"]


@pytest.mark.parametrize("name", ["data", "data.gz"])
def test_error_of_the_cache_names_the_file_and_the_argument(tmp_path, monkeypatch, name):
    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    content = b"1\n"
    (tmp_path / name).write_bytes(gzip.compress(content) if name == "data.gz" else content)
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match=f"{name}: raysgd cannot use.*/file.*cache_dir="):
        text(tmp_path / name, cache_dir=tmp_path / "file")
    monkeypatch.setattr(module, "atomic_write", full)
    with pytest.raises(RuntimeError, match=f"{name}: raysgd cannot use.*No space.*cache_dir="):
        text(tmp_path / name, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("value", ["", "relative", "{}/home/.cache"])
def test_cache_of_the_user_is_below_home_or_in_the_folder_of_the_environment(
    tmp_path, monkeypatch, value
):
    monkeypatch.setenv("XDG_CACHE_HOME", value.format(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / ("elsewhere" if "{}" in value else "home")))
    (tmp_path / "data").write_text("1\n")
    text(tmp_path / "data")
    assert [path.suffix for path in (tmp_path / "home/.cache/raysgd").iterdir()] == [".npy"]


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


def cut(data):
    return data[: len(data) * 2 // 3]


def archive_of(names, kind=tarfile.REGTYPE):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.type = kind
            archive.addfile(member)
    return file.getvalue()


ARCHIVE = archive_of(["a.cls", "b.cls", "c.cls"])  # a header of 512 bytes each
COMPRESS = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda data: pytest.importorskip("zstandard").compress(data),
    "lz4": lambda data: pytest.importorskip("lz4.frame").compress(data),
}


@pytest.mark.parametrize("ending", COMPRESS)
def test_all_parts_of_a_compressed_file_are_read_or_an_error_names_it(
    tmp_path, monkeypatch, ending
):
    monkeypatch.setattr(module.time, "sleep", lambda seconds: pytest.fail("it tries again"))
    first, second = (COMPRESS[ending](os.urandom(5000)) for _ in range(2))
    path = tmp_path / f"data.{ending}"
    path.write_bytes(COMPRESS[ending](b"1\n") + COMPRESS[ending](b"2\n"))
    assert list(Stream(text(path, cache_dir=tmp_path / "cache"))) == ["1", "2"]
    for content in (first[:3000], first + second[:3000], first + b"no archive"):
        path.write_bytes(content)
        with pytest.raises(RecordError, match=f"data.{ending}: "):
            text(path, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data.gz", cut(gzip.compress(os.urandom(5000))), "Compressed file ended"),
        ("data.tar", b"no archive" * 100, "invalid header"),
        ("data.tar", ARCHIVE[:512] + b"\1" + ARCHIVE[513:], "cut or damaged at byte 512"),
        ("data.tar", ARCHIVE[:1024], "cut or damaged at byte 1024"),
        ("data.tar", ARCHIVE[:1200], "cut or damaged at byte 1024"),
        ("data.tar", ARCHIVE + ARCHIVE, "more data follows the end at 1536"),
        ("data.tar", ARCHIVE[:1024] + bytes(2**19), "more data follows the end at 1024"),
        ("data.tar", archive_of(["a.cls", "a.cls"]), "a sample has two files 'a.cls'"),
        ("data.tar", archive_of(["a.cls"], tarfile.LNKTYPE), "'a.cls' is only a link"),
        ("data.txt", b"1\n" * 5000 + bytes(512), "has zero bytes"),
        ("data.txt", ARCHIVE, "has zero bytes, so it is not UTF-8 text"),
        ("data.zip", b"", "cannot read .zip files"),
        ("data.parquet", b"no archive" * 100, "Parquet magic bytes not found"),
        ("data.jsonl.zst", b"", "to read .zst files, install zstandard"),
    ],
)
def test_file_that_cannot_be_read_is_named_and_leaves_nothing_in_the_cache(
    tmp_path, monkeypatch, name, content, message
):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: pytest.fail("it tries again"))
    (tmp_path / name).write_bytes(content)
    kinds = {"tar": tar, "tgz": tar, "parquet": parquet}
    open_records = kinds.get(name.rpartition(".")[2], text)
    with pytest.raises(RecordError, match=f"{name}: {message}"):
        open_records(tmp_path / name, cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").iterdir())


# ---- open files


def test_few_files_stay_open(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MAX_OPEN", 2)
    for name in "abc":
        (tmp_path / name).write_text(name)
    records = text(str(tmp_path / "?"), cache_dir=tmp_path / "cache")
    records.close()
    files = []
    for number in (0, 1, 0, 2):  # the file of record 1 is the one that was not used for longest
        records.read([number])
        files = [*dict.fromkeys([*files, *records._files.values()])]
    assert [file.closed for file in files] == [False, True, False]
    records._files[9] = None  # it cannot be closed
    records.close()
    assert records.read([1]) == ["b"]


class Counting(MemoryFileSystem):
    """A file system whose reads fail, and which needs a token."""

    protocol = "counting"
    num_failures = opened = 0
    is_short = False  # a failing read has no error, but too few bytes

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
    size = property(lambda self: len(self.getbuffer()))

    def read(self, *size):
        if Counting.num_failures:
            Counting.num_failures -= 1
            if Counting.is_short:
                return b""
            raise ServiceError
        return super().read(*size)


def test_remote_file_is_opened_once_and_again_after_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    fsspec.register_implementation("counting", Counting, clobber=True)
    for name, change in (("a.txt", bytes), ("a.gz", gzip.compress)):
        with Counting("mine").open(f"/{name}", "wb") as file:
            file.write(change(b"0\n1\n2\n"))
        Counting.opened, Counting.num_failures = 0, 1
        records = text(f"counting:///?{name[1:]}", cache_dir=tmp_path, token="mine")
        assert records.paths == [f"counting:///{name}"]
        assert [records.read([number]) for number in range(3)] == [["0"], ["1"], ["2"]]
        assert Counting.opened == 2  # and once after the error
    records = text("counting:///a.txt", cache_dir=tmp_path, token="mine")
    assert records.read([0]) == ["0"]
    Counting.opened, Counting.num_failures, Counting.is_short = 0, 2, True
    assert records.read([1]) == ["1"]
    assert Counting.opened == 2
    Counting.num_failures, Counting.is_short = 4, False
    with pytest.raises(ServiceError):
        records.read([2])


@pytest.fixture
def server():
    """A web server that first gives the answers in its list `status`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            content, status = gzip.compress(b"1\n2\n", mtime=0), self.server.status
            self.send_response(status.pop(0) if status else 200)
            self.send_header("Content-Length", len(content))
            self.send_header("ETag", "1")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_GET = do_HEAD  # noqa: N815

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        made.status, made.url = [], f"http://127.0.0.1:{made.server_port}/data.gz"
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def test_request_is_tried_again_and_a_new_signature_makes_no_other_file(
    tmp_path, monkeypatch, server
):
    waits = []
    monkeypatch.setattr(module.time, "sleep", waits.append)
    server.status = [503, 503]
    records = [text(f"{server.url}?s={n}*", cache_dir=tmp_path) for n in range(2)]
    assert [list(Stream(each)) for each in records] == [["1", "2"]] * 2
    assert records[0].stamps() == records[1].stamps()
    assert len(list(tmp_path.glob("*.raw"))) == len(waits) == 1


@pytest.mark.parametrize(
    ("status", "error", "num_waits"),
    [(503, ConnectionError, 3), (403, ConnectionError, 0), (404, FileNotFoundError, 0)],
)
def test_error_of_a_server_is_named(tmp_path, monkeypatch, server, status, error, num_waits):
    waits = []
    monkeypatch.setattr(module.time, "sleep", waits.append)
    server.status = [status] * 20
    with pytest.raises(error, match=rf"data\.gz(.*{status})?") as raised:
        text(server.url, cache_dir=tmp_path)
    assert waits == pytest.approx([0.4, 1.6, 6.4][:num_waits])
    assert str(status) in f"{raised.value} {raised.value.__cause__!r}"


def test_error_of_a_remote_file_has_no_signature(tmp_path, server):
    with pytest.raises(RecordError, match=r"data\.gz\?\*\*\*: ") as raised:
        tar(f"{server.url}?sig=secret", cache_dir=tmp_path)
    assert "secret" not in str(raised.value)


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
