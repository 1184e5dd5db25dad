"""Streams of files: numbers, formats, orders, mixes, and errors."""

import datetime
import io
import itertools
import json
import multiprocessing
import os
import pickle
import random
import tarfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.data import Stream, jsonl, mix, parquet, tar, text
from raysgd.data.records import RecordError
from raysgd.data.stream import SampleKeys, check_files, file_stamps
from raysgd.errors import CheckpointError

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
from pyarrow import parquet as pq  # noqa: E402


def write_jsonl(path, numbers, end="\n"):
    lines = [json.dumps({"n": n, "text": "x" * (n % 7)}) for n in numbers]
    path.write_text("\n".join(lines) + end if lines else "")


def write_text(path, numbers):
    path.write_text("".join(f"{n}\n" for n in numbers))


def write_parquet(path, numbers):
    pq.write_table(pa.table({"n": list(numbers), "other": ["y"] * len(numbers)}), path, 7)


def write_tar(path, numbers):
    with tarfile.open(path, "w") as archive:
        folder = tarfile.TarInfo("images")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for n in numbers:
            for name, data in (("cls", b"%d" % n), ("seg.png", b"p" * (n % 600))):
                member = tarfile.TarInfo(f"images/{n:05}.{name}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


FORMATS = {
    "jsonl": (write_jsonl, jsonl, lambda record: record["n"]),
    "text": (write_text, text, int),
    "parquet": (write_parquet, lambda *a, **k: parquet(*a, columns=["n"], **k), lambda r: r["n"]),
    "tar": (write_tar, tar, lambda record: int(record["cls"])),
}
each_format = pytest.mark.parametrize("name", FORMATS)


@pytest.fixture
def make(tmp_path):
    """Return a function that writes 100 numbers to files, one of them empty."""

    def make(name, sizes=(31, 0, 54, 15)):
        write, open_records, number = FORMATS[name]
        start = 0
        for file, size in enumerate(sizes):
            write(tmp_path / f"{file}.{name}", range(start, start + size))
            start += size
        records = open_records(str(tmp_path / f"*.{name}"), cache_dir=tmp_path / "cache")
        return records, number

    return make


@each_format
def test_any_record_is_read_by_its_number(make, name):
    records, number = make(name)
    assert len(records) == 100
    assert [number(each) for each in records.read(range(100))] == list(range(100))
    generator = random.Random(3)
    for _ in range(20):
        numbers = [generator.randrange(100) for _ in range(generator.randrange(1, 9))]
        assert [number(each) for each in records.read(numbers)] == numbers
    assert [number(each) for each in records.read([35, 35, 37])] == [35, 35, 37]
    copy = pickle.loads(pickle.dumps(records))
    assert number(copy.read([57])[0]) == 57


@each_format
def test_index_is_built_once(make, name, monkeypatch):
    make(name)
    for kind in (text, tar, parquet):
        monkeypatch.setattr(kind, "_build_index", None)
    records, _ = make(name, sizes=())
    assert len(records) == 100


@each_format
@pytest.mark.parametrize("shuffle", [0, 1, 8, 40, 1000])
def test_each_epoch_has_each_record_once_in_its_own_order(make, name, shuffle):
    records, number = make(name)
    stream = Stream(records, transform=number, shuffle=shuffle, seed=4)
    orders = []
    for epoch in range(2):
        stream.set_epoch(epoch)
        orders.append(list(stream))
        assert sorted(orders[-1]) == list(range(100))
        keys = SampleKeys(stream, epoch)[10:90]
        assert stream.__getitems__(keys) == orders[-1][10:90]
        assert stream[(epoch, 37)] == orders[-1][37]
    if shuffle > 1:
        assert orders[0] != orders[1]
    else:
        assert orders == [list(range(100))] * 2
    other = Stream(records, transform=number, shuffle=shuffle, seed=5)
    assert (list(other) != orders[0]) == (shuffle > 1)


@each_format
def test_parts_of_the_data_take_turns(make, name):
    records, number = make(name)
    stream = Stream(records, transform=number, interleave=3)
    turns = [n for turn in zip(range(33), range(33, 66), range(66, 99), strict=True) for n in turn]
    assert list(stream) == [*turns, 99]
    stream = Stream(records, transform=number, interleave=3, shuffle=20)
    assert sorted(stream) == list(range(100))
    assert list(Stream(records, transform=number, interleave=101)) == list(range(100))


def test_long_stream_is_read_in_order_and_by_index(make):
    records, number = make("text", sizes=(600,))
    stream = Stream(records, transform=number)
    assert list(stream) == list(range(600))
    assert (stream[-1], stream[599], stream[0]) == (599, 599, 0)
    stream.set_epoch(3)
    assert stream.__getitems__([5, 2]) == [5, 2]
    for index in (600, -601):
        with pytest.raises(IndexError):
            stream[index]


def test_shuffle_keeps_few_row_groups_in_memory(make):
    records, _ = make("parquet", sizes=(350,))
    stream = Stream(records, shuffle=14, seed=1)
    Stream(records)  # which also reads them, for validation
    most = 0
    for _ in stream:
        most = max(most, sum(map(len, records._tables.values())))
    assert most == 2 * (14 + 7) + 7  # less would decode a group more often


def test_random_changes_depend_on_the_number_of_the_sample(make):
    records, number = make("text")
    stream = Stream(
        records, transform=number, augment=lambda n, generator: (n, generator.random()), shuffle=9
    )
    whole = list(stream)
    assert stream.__getitems__(SampleKeys(stream, 0)[20:25]) == whole[20:25]
    assert len({value for _, value in whole}) == 100
    stream.set_epoch(1)
    assert not {value for _, value in stream} & {value for _, value in whole}


# ---- wrong files and records


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"No file matches '.*none-\*.txt'"):
        text(str(tmp_path / "none-*.txt"))
    with pytest.raises(FileNotFoundError, match=r"text\(\[\]\): needs at least one path"):
        text([])
    with pytest.raises(IsADirectoryError, match=r"text\('.*'\): .* is a folder. Pass its files"):
        text(tmp_path)


def test_unknown_arguments_of_local_files_are_refused(tmp_path):
    write_text(tmp_path / "data.txt", range(3))
    with pytest.raises(TypeError, match=r"argument 'cach_dir'\. Did you mean 'cache_dir'\?"):
        text(tmp_path / "data.txt", cach_dir=tmp_path)


def test_broken_line_is_an_error_with_its_place_or_is_skipped(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"n": 0}\n\n{"n": 1\n{"n": 2}\n')
    records = jsonl(path, cache_dir=tmp_path)
    with pytest.raises(RecordError, match=r"data\.jsonl, non-blank line 2: "):
        list(Stream(records))
    stream = Stream(records, skip_broken=True)
    assert [each["n"] for each in stream] == [0, 2]
    assert stream.num_skipped == 1


def test_broken_record_that_was_skipped_is_not_counted_again_after_a_resume(tmp_path):
    (tmp_path / "data.jsonl").write_text("1\nx\n")
    stream = Stream(jsonl(tmp_path / "data.jsonl", cache_dir=tmp_path), skip_broken=True)
    assert list(stream) == [1]
    stream.load_state_dict(stream.state_dict())
    assert list(stream) == []
    assert stream.num_skipped == 1


def test_file_that_changes_is_an_error(tmp_path):
    path = tmp_path / "data.txt"
    write_text(path, range(9))
    stream = Stream(text(path, cache_dir=tmp_path / "cache"))
    saved = file_stamps(stream)
    check_files(stream, saved)
    write_text(path, range(3))
    with pytest.raises(RuntimeError, match=r"data\.txt changed while it was read"):
        stream[0]
    stream = Stream(text(path, cache_dir=tmp_path / "cache"))
    assert stream[0] == "0"
    path.write_text("3\n4\n5\n")
    os.utime(path, (0, 0))  # as if the disk counted time in seconds, the file would be as old
    with pytest.raises(RuntimeError, match=r"data\.txt changed while it was read"):
        stream[1]
    stream = Stream(text(path, cache_dir=tmp_path / "cache"))
    path.chmod(0o600)
    assert stream[1] == "4"  # the content is the same
    path.write_text("33\n\n5\n")
    os.utime(path, (0, 0))
    with pytest.raises(RuntimeError, match=r"data\.txt changed .* are (.*), and were (?!\1\.)"):
        stream[1]
    with pytest.raises(CheckpointError, match=r"has changed since .*: .*data\.txt"):
        check_files(Stream(text(path, cache_dir=tmp_path / "cache")), saved)
    other = Stream(text([path, path], cache_dir=tmp_path / "cache"))
    with pytest.raises(CheckpointError, match="2 files instead of 1"):
        check_files(other, {"files": file_stamps(other)["files"][:1]})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"interleave": 0}, r"Stream\(interleave=0\): must be"),
        ({"shuffle": -1}, r"Stream\(shuffle=-1\): must be at least 0"),
        ({"group_size": 0}, r"Stream\(group_size=0\): must be at least 1"),
        ({"seed": -2}, r"Stream\(seed=-2\)"),
        ({"seed": "1"}, r"Stream\(seed='1'\): must be an int"),
        ({"skip_broken": 3}, r"Stream\(skip_broken=3\): must be True or False"),
    ],
)
def test_arguments_out_of_range_are_refused(make, arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Stream(make("text")[0], **arguments)


def test_stream_of_something_else_is_refused():
    with pytest.raises(TypeError, match=r"must be the result of jsonl\(\)"):
        Stream([1, 2])


# ---- groups


def pack(numbers):
    """Pack numbers into lists with a sum of at least 40."""
    packed = []
    for number in map(int, numbers):
        packed.append(number)
        if sum(packed) >= 40:
            yield packed
            packed = []


@pytest.mark.parametrize("shuffle", [0, 16])
def test_groups_are_the_same_from_any_position(make, shuffle):
    records, _ = make("text")
    stream = Stream(records, transform=pack, group_size=16, shuffle=shuffle)
    with pytest.raises(TypeError):
        len(stream)
    whole = list(stream)
    assert 10 < len(whole) < 100
    for number in range(len(whole)):
        iterator = iter(stream)
        assert list(itertools.islice(iterator, number)) == whole[:number]
        resumed = pickle.loads(pickle.dumps(stream))
        resumed.load_state_dict(stream.state_dict() if number else None)
        assert list(resumed) == whole[number:]
    assert list(resumed) == whole


@pytest.mark.parametrize("shuffle", [0, 16])
@pytest.mark.parametrize("size", [1, 7, 100])
def test_groups_have_each_record_once_and_random_numbers_of_their_own(make, shuffle, size):
    records, _ = make("text")

    def change(record, generator):
        return int(record), generator.random()

    stream = Stream(records, group_size=size, augment=change, shuffle=shuffle)
    whole, again = list(stream), list(stream)
    assert whole == again
    assert sorted(number for number, _ in whole) == list(range(100))
    assert len({value for _, value in whole}) == 100
    assert ([number for number, _ in whole] == list(range(100))) == (shuffle == 0)
    stream.set_epoch(1)
    assert not {value for _, value in stream} & {value for _, value in whole}


def test_groups_end_at_a_broken_record_unless_it_is_skipped(tmp_path):
    (tmp_path / "data").write_text("1\n2\nx\n4\n")
    records = jsonl(tmp_path / "data", cache_dir=tmp_path / "cache")
    with pytest.raises(RecordError, match="non-blank line 3"):
        list(Stream(records, transform=lambda group: [sum(group)], group_size=4))
    skipping = Stream(records, transform=lambda group: [sum(group)], group_size=4, skip_broken=True)
    assert list(skipping) == [7]
    assert skipping.num_skipped == 1
    single = Stream(records, transform=lambda number: -number, skip_broken=True)
    assert list(single) == [-1, -2, -4]


# ---- mixes


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.1, 5), min_size=4, max_size=4),
)
def test_mix_has_each_sample_once(tmp_path_factory, sizes, weights):
    folder = tmp_path_factory.mktemp("mix")
    streams = []
    for which, size in enumerate(sizes):
        write_text(folder / f"{which}.txt", range(which * 100, which * 100 + size))
        records = text(folder / f"{which}.txt", cache_dir=folder)
        streams.append(Stream(records, transform=int, shuffle=5, seed=which))
    mixed = mix(streams, weights[: len(sizes)])
    expected = [which * 100 + n for which, size in enumerate(sizes) for n in range(size)]
    assert sorted(mixed) == expected
    for which, size in enumerate(sizes):
        places = [mixed.locate_in_stream(number) for number in range(len(mixed))]
        assert [place for other, place in places if other == which] == list(range(size))


def test_mix_keeps_the_weights_until_a_stream_ends(tmp_path):
    for name in "ab":
        write_text(tmp_path / f"{name}.txt", range(3000))
    streams = [Stream(text(tmp_path / f"{name}.txt", cache_dir=tmp_path)) for name in "ab"]
    mixed = mix(streams, [3, 1])
    which = np.array([mixed.locate_in_stream(number)[0] for number in range(len(mixed))])
    assert np.bincount(which[:2000]).tolist() == [1500, 500]
    assert np.bincount(which[4000:], minlength=2).tolist() == [0, 2000]


@pytest.mark.parametrize(
    "weights", [[1], [1, 2, 3], [1, 0], [1, -1], [], [1, "2"], [1, float("nan")], [1, float("inf")]]
)
def test_wrong_weights_are_refused(make, weights):
    stream = Stream(make("text")[0])
    with pytest.raises(ValueError, match=r"mix\(weights=.*\): must be 2 positive numbers"):
        mix([stream, stream], weights)


def test_seed_of_a_mix_is_an_int(make):
    with pytest.raises(TypeError, match=r"mix\(seed='1'\): must be an int"):
        mix([Stream(make("text")[0])], [1], seed="1")


def test_mix_is_of_streams_whose_length_is_known(make):
    records, _ = make("text")
    for other in (Stream(records, group_size=2), Stream(records, skip_broken=True), range(3)):
        with pytest.raises(TypeError, match=r"must be a Stream without group_size and skip_broken"):
            mix([Stream(records), other], [1, 1])
    own = type("Own", (Stream,), {})
    for arguments in ({"group_size": 2}, {"skip_broken": True}):
        with pytest.raises(TypeError, match=r"Own\(.*a subclass of Stream has neither"):
            own(records, **arguments)


def test_order_of_a_mix_depends_on_seed_and_epoch(tmp_path):
    streams = []
    for name, shuffle in (("a", 0), ("b", 5)):
        write_text(tmp_path / name, range(20))
        records = text(tmp_path / name, cache_dir=tmp_path / "cache")
        streams.append(Stream(records, transform=lambda n, name=name: name + n, shuffle=shuffle))
    mixed = mix(streams, [2, 1])
    orders = [[mixed[(epoch, number)] for number in range(40)] for epoch in range(2)]
    for epoch, order in enumerate(orders):
        mixed.set_epoch(epoch)
        assert list(mixed) == order
        assert [each for each in order if each[0] == "a"] == [f"a{n}" for n in range(20)]
    assert orders[0] != orders[1]
    assert [mixed.shuffles, mix(streams[:1], [1]).shuffles] == [True, False]
    assert list(mix(streams, [2, 1])) == orders[0] != list(mix(streams, [2, 1], seed=1))
    saved = file_stamps(mixed)
    check_files(mixed, saved)
    write_text(tmp_path / "b", range(21))
    later = [
        Stream(text(tmp_path / name, cache_dir=tmp_path / "cache"), shuffle=shuffle)
        for name, shuffle in (("a", 0), ("b", 5))
    ]
    with pytest.raises(CheckpointError, match=rf"within an epoch: {tmp_path / 'b'}\."):
        check_files(mix(later, [2, 1]), saved)


def test_forked_process_opens_files_again(make):
    """Forked processes would share the position in a file."""
    records, _ = make("text", sizes=(20_000,))  # more than a buffer
    records.read([50])
    (file,) = records._files.values()
    before = os.lseek(file.fileno(), 0, os.SEEK_CUR)
    process = multiprocessing.get_context("fork").Process(target=records.read, args=([19_000],))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == before


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_in_archives_of_any_kind(tmp_path, kind):
    names = ["a/" + "b" * 90 + "/" + "c" * 20, "short", "gr\u00fc\u00dfe" * 9]
    with tarfile.open(tmp_path / "data.tar", "w", format=kind) as archive:
        for name in names:
            for ending in ("x", "y"):
                member = tarfile.TarInfo(f"{name}.{ending}")
                member.size = 700
                archive.addfile(member, io.BytesIO(ending.encode() * 700))
    records = tar(tmp_path / "data.tar", cache_dir=tmp_path)
    expected = [{"__key__": name, "x": b"x" * 700, "y": b"y" * 700} for name in names]
    assert records.read([0, 1, 2]) == expected
    assert records.read([2]) == expected[2:]


@pytest.mark.parametrize(
    "changed",
    [{"shuffle": 20}, {"seed": 2}, {"group_size": 5}, {"skip_broken": True}, {"interleave": 2}],
)
def test_other_arguments_within_an_epoch_are_an_error(tmp_path, changed):
    path = tmp_path / "data.txt"
    path.write_text("a\nb\n")
    records = text(path, cache_dir=tmp_path / "cache")
    saved = file_stamps(Stream(records, shuffle=10, seed=1))
    check_files(Stream(records, shuffle=10, seed=1), saved)
    with pytest.raises(CheckpointError, match=r"shuffle=10, seed=1.* and now"):
        check_files(Stream(records, **{"shuffle": 10, "seed": 1, **changed}), saved)


def test_other_weights_of_a_mix_within_an_epoch_are_an_error(tmp_path):
    path = tmp_path / "data.txt"
    path.write_text("a\nb\n")
    streams = [Stream(text(path, cache_dir=tmp_path / "cache")) for _ in range(2)]
    with pytest.raises(CheckpointError, match=r"weights=\[2, 1\].* and now weights=\[1, 2\]"):
        check_files(mix(streams, [1, 2]), file_stamps(mix(streams, [2, 1])))


def test_columns_that_a_file_lacks_or_has_twice_are_an_error(tmp_path):
    pq.write_table(pa.table([[1], [2], [3]], ["x", "y", "x"]), tmp_path / "data.parquet")
    errors = {"z": r"no \['z'\]. The columns are \['x', 'y', 'x'\]", "x": "have the name 'x'"}
    for name, error in errors.items():
        with pytest.raises(ValueError, match=f"data.parquet: .* {error}"):
            list(Stream(parquet(tmp_path / "data.parquet", columns=["y", name])))
    assert list(Stream(parquet(tmp_path / "data.parquet", columns=["y"]))) == [{"y": 2}]


def test_parquet_times_of_spark_after_2262_keep_their_year(tmp_path):
    times = [datetime.datetime(2026, 1, 2, 3, 4, 5, 678901), datetime.datetime(9999, 12, 31)]
    table = pa.table({"end": pa.array(times, pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "data.parquet", use_deprecated_int96_timestamps=True)
    assert [row["end"] for row in Stream(parquet(tmp_path / "data.parquet"))] == times
