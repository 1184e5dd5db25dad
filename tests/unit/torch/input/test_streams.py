"""Streams that every worker reads: parts of the workers, positions, and errors."""

import copy
import gc
import io
import itertools
import math
import os
import pathlib
import random
import sys
import tarfile
import types
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from raysgd._internal.collectives import Collectives
from raysgd._internal.versions import is_at_least
from raysgd.data import Stream, jsonl, mix, parquet, text
from raysgd.data.partition import StepLayout
from raysgd.errors import CheckpointError
from raysgd.loop.sources import GeneratorFunction
from raysgd.torch.input.iterable_reading import sample_digest
from raysgd.torch.input.iterable_source import IterableSource
from raysgd.torch.input.sources import MapStyleSource
from tests.conftest import examples, run_python
from tests.operators import Classifier
from tests.unit.torch.input.test_sources import wrap


class Numbers(IterableDataset):
    """Numbers, split across the loader processes."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, self.size, step):
            yield torch.tensor(number), float(number)


def numbers_of(batch):
    return batch[0].tolist()


def read(source, offset, num_steps, group):
    """Return batches with their roles, as the loop reads them, and the next offset."""
    found, batches = [], source.batches(0, offset)
    for _ in range(0, num_steps, group):
        if (batch := next(batches, None)) is None:
            break
        plan = source.plan(offset, group)
        for index, micro_batch in enumerate(plan.micro_batches):
            if index:
                batch = next(batches)
            found.append((numbers_of(batch), micro_batch, plan))
        offset = source.offset_after(offset, plan.num_steps)
    return found, offset


@given(
    size=st.integers(1, 40),
    batch_size=st.integers(1, 5),
    world_size=st.integers(1, 4),
    full_size=st.none() | st.integers(1, 4),
    group=st.integers(1, 3),
    may_split=st.booleans(),
    drop_last=st.booleans(),
    offset=st.integers(0, 3),
    shares=st.booleans(),
)
def test_steps_are_those_of_a_data_set_that_can_be_indexed(
    size, batch_size, world_size, full_size, group, may_split, drop_last, offset, shares
):
    settings = {"batch_size": batch_size, "drop_last": drop_last}
    full_size = full_size and max(full_size, world_size)
    mapped = TensorDataset(torch.arange(size), torch.arange(size).double())
    for rank in range(world_size):
        arguments = {"world_size": world_size, "rank": rank, "layout": StepLayout(full_size)}
        stream = wrap(DataLoader(Numbers(size), **settings), **arguments)
        known = wrap(DataLoader(mapped, **settings), **arguments)
        assert (type(stream), type(known)) == (IterableSource, MapStyleSource)
        for source in (stream, known):
            source.change_partition(may_split=may_split)
            if shares:
                source.change_partition(shares=tuple(float(n + 1) for n in range(world_size)))
        start = min(size, offset * stream.global_batch_size)
        found, end = read(stream, start, 100, group)
        expected = []
        batches, at = known.batches(0, start), start
        while left := known.steps_left(at):
            plan = known.plan(at, min(group, left))
            expected += [(numbers_of(next(batches)), each, plan) for each in plan.micro_batches]
            at = known.offset_after(at, min(group, left))
        assert found == expected
        assert end == at or drop_last


@given(
    size=st.integers(0, 30),
    batch_size=st.integers(1, 4),
    world_size=st.integers(1, 4),
    full_size=st.integers(4, 6),
)
def test_validation_reads_each_sample_once(size, batch_size, world_size, full_size):
    parts, of_steps = [], []
    for rank in range(world_size):
        loader = DataLoader(Numbers(size), batch_size=batch_size)
        arguments = {"world_size": world_size, "rank": rank, "layout": StepLayout(full_size)}
        source = wrap(loader, training=False, **arguments)
        keys = itertools.count(rank, world_size)
        parts += [(next(keys), numbers_of(batch)) for batch in source.batches(0, 0)]
        num_steps, at = source.steps_read, 0
        assert num_steps == math.ceil(size / (batch_size * full_size))
        for _ in range(num_steps):
            of_steps += [n for batch in source.batches(0, at, 1) for n in numbers_of(batch)]
            at = source.offset_after(at, 1)
    assert [n for _, batch in sorted(parts) for n in batch] == list(range(size))
    assert sorted(of_steps) == list(range(size))


# ---- any source, in any schedule of lost and new workers


class Stateful(Numbers):
    """Numbers that continue from a state."""

    is_resumable = True
    _next = 0

    def __iter__(self):
        info = get_worker_info()
        step = 1 if info is None else info.num_workers
        if self._next == 0:
            self._next = 0 if info is None else info.id
        while self._next < self.size:
            self._next += step
            yield torch.tensor(self._next - step), 0.0

    def state_dict(self):
        return {"next": self._next}

    def load_state_dict(self, state):
        self._next = 0 if state is None else state["next"]


class Augmented(Numbers):
    """A stream with random transforms and a random order, from all global generators."""

    def __iter__(self):
        order = list(range(self.size))
        random.shuffle(order)
        for number in order:
            yield torch.tensor(number), random.random() + np.random.rand() + torch.rand(()).item()


def batches_of(size):
    for start in range(0, size, 2):
        yield [torch.arange(start, min(start + 2, size))]


class Batches:
    """An iterable of batches without a length."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return batches_of(self.size)


class Resetting(Numbers):
    """Begins again in `__iter__`, and is its own iterator."""

    def __iter__(self):
        self.next = 0
        return self

    def __next__(self):
        if self.next == self.size:
            raise StopIteration
        self.next += 1
        return torch.tensor(self.next - 1), 0.0


class ResettingLoader(Resetting):
    def __next__(self):
        return [super().__next__()[0].reshape(1)]


KINDS = {
    "resetting": lambda size: DataLoader(Resetting(size), batch_size=3),
    "resetting loader": ResettingLoader,
    "loader": lambda size, **settings: DataLoader(Numbers(size), batch_size=3, **settings),
    "state": lambda size, **settings: DataLoader(Stateful(size), batch_size=3, **settings),
    "random": lambda size, **settings: DataLoader(Augmented(size), batch_size=3, **settings),
    "batches": lambda size: Batches(size),
    "list": lambda size: list(batches_of(size)),
}


class Group:
    """Simulated workers, each with its own source, that train together in one process."""

    def __init__(self, make, full_size=None):
        self.make, self.layout = make, StepLayout(full_size)
        self.sources, self.offset, self.resume_info = [], 0, {}
        self.steps = []

    def resize(self, keep, size):
        """Form a group of the workers `keep` and new ones. The last step may be discarded."""
        survivors = [self.sources[rank] for rank in keep if rank < len(self.sources)]
        if survivors:
            self.resume_info = copy.deepcopy(survivors[0].resume_info(0, self.offset))
        survivors = survivors[:size]
        num_new = size - len(survivors)
        self.sources = survivors + [
            wrap(self.make(), world_size=1, layout=self.layout) for _ in range(num_new)
        ]
        for rank, source in enumerate(self.sources):
            source.repartition(size, rank, None)
            source.load_resume_info(self.resume_info)
        self.batches = [source.batches(0, self.offset) for source in self.sources]

    def step(self, commit=True):
        """Train a step on all workers. Return whether there was one."""
        batches = [next(each, None) for each in self.batches]
        assert len({source.step_digest for source in self.sources}) == 1
        if any(batch is None for batch in batches):
            assert all(batch is None for batch in batches)
            return False
        plans = [source.plan(self.offset, 1) for source in self.sources]
        if not commit:
            return True
        self.steps.append(
            sorted(
                (number, value)
                for batch, plan in zip(batches, plans, strict=True)
                for number, value in zip(batch[0].tolist(), batch[-1].tolist(), strict=True)
                if plan.num_samples
            )
        )
        (self.offset,) = {source.offset_after(self.offset, 1) for source in self.sources}
        return True

    def finish(self):
        self.resize([], 1)
        while self.step():
            pass
        return self.steps


events = st.lists(
    st.tuples(
        st.integers(0, 4),  # steps before the event
        st.booleans(),  # whether the next step is lost
        st.sets(st.integers(0, 2)),  # survivors
        st.integers(1, 3),  # size of the next group
    ),
    max_size=6,
)


@pytest.mark.parametrize("kind", KINDS)
def test_each_sample_is_trained_once_in_any_schedule(kind):
    check_any_schedule(KINDS[kind], keeps_steps=kind in ("loader", "state", "random"))


# WebDataset does not close a file that it has not read to the end.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_samples_of_web_dataset_are_trained_once_in_any_schedule(tmp_path, monkeypatch):
    wds = pytest.importorskip("webdataset", reason="WebDataset is not installed")
    with tarfile.open(tmp_path / "data.tar", "w") as archive:
        for number in range(70):
            member = tarfile.TarInfo(f"{number}.cls")
            member.size = 2
            archive.addfile(member, io.BytesIO(b"%02d" % number))

    def make(size):
        data = wds.WebDataset(str(tmp_path / "data.tar"), shardshuffle=False)
        data = data.slice(size).shuffle(9, seed=0).decode().to_tuple("cls")
        return DataLoader(data, batch_size=3)

    # WebDataset selects the samples of a rank, or refuses several ranks, by these variables.
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    check_any_schedule(make, keeps_steps=True)
    assert os.environ["WORLD_SIZE"] == "2"
    gc.collect()


def with_noise(lines):
    for line in [lines] if isinstance(lines, str) else lines:
        yield int(line), random.random()


OF_FILES = {
    "in turn": {"transform": lambda line: (int(line), 0.0), "interleave": 3},
    "lists": {"transform": lambda lines: [*with_noise(lines)], "group_size": 5},
    "generators": {"transform": with_noise, "group_size": 5},
    "records": {"transform": lambda line: next(with_noise(line)), "skip_broken": True},
}


@pytest.mark.parametrize("kind", OF_FILES)
@pytest.mark.parametrize("shuffle", [0, 9])
def test_samples_of_files_are_trained_once_in_any_schedule(tmp_path, kind, shuffle):
    def make(size):
        if not (file := tmp_path / f"{size}.txt").exists():
            file.write_text("".join(f"{number}\n" for number in range(size)))
        stream = Stream(text(file, cache_dir=tmp_path), shuffle=shuffle, **OF_FILES[kind])
        return DataLoader(stream, batch_size=3)

    check_any_schedule(make, keeps_steps=True)


@pytest.mark.parametrize(
    ("interleave", "world_size", "each"), [(1, 2, 12), (2, 2, 6), (4, 2, 6), (4, 1, 12)]
)
def test_worker_decodes_only_row_groups_of_its_parts(
    tmp_path, monkeypatch, interleave, world_size, each
):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet as pq

    pq.write_table(pa.table({"n": range(84)}), tmp_path / "data.parquet", 7)
    decode, decoded = parquet._row_group, []
    monkeypatch.setattr(
        parquet, "_row_group", lambda *args: decoded.append(args[-1]) or decode(*args)
    )
    by_rank = []
    for rank in range(world_size):
        stream = Stream(
            parquet(tmp_path / "data.parquet", cache_dir=tmp_path),
            transform=lambda row: (row["n"], 0.0),
            interleave=interleave,
        )
        source = wrap(DataLoader(stream, 8 // world_size), world_size=world_size, rank=rank)
        by_rank.append([numbers_of(batch) for batch in source.batches(0, 0)])
        assert len(decoded) == each
        decoded.clear()
    order, ids = [number for number, _ in stream], source.sample_ids(0, 0, 84)
    steps = [list(itertools.chain(*parts)) for parts in zip(*by_rank, strict=True)]
    assert [number for _, number in ids] == [*itertools.chain(*steps)]
    assert [*map(sorted, steps)] == [sorted(order[start : start + 8]) for start in range(0, 84, 8)]


def test_random_changes_differ_between_epochs_with_a_sampler(tmp_path):
    (tmp_path / "data.txt").write_text("1\n2\n")
    records = text(tmp_path / "data.txt", cache_dir=tmp_path)
    stream = Stream(records, augment=lambda _, generator: generator.random())
    source = wrap(DataLoader(stream, 2, shuffle=True, num_workers=1, persistent_workers=True))
    epochs = [set(next(source.batches(epoch, 0)).tolist()) for epoch in (0, 1, 0)]
    assert epochs[0] == epochs[2]
    assert len(epochs[0] | epochs[1]) == 4


def check_any_schedule(make, keeps_steps):
    @examples(20)
    @given(size=st.integers(1, 70), schedule=events)
    def run(size, schedule):
        group = Group(lambda: make(size), full_size=3)
        group.resize([], 3)
        for num_steps, loses, survivors, next_size in schedule:
            for _ in range(num_steps):
                group.step()
            if loses:
                group.step(commit=False)
            group.resize(survivors, next_size)
        while group.step():
            pass
        trained = [number for step in group.steps for number, _ in step]
        assert sorted(trained) == list(range(size))
        if keeps_steps:
            assert group.steps == Group(lambda: make(size), full_size=3).finish()

    run()


def test_loader_processes_continue_where_a_checkpoint_ends():
    def make():
        return DataLoader(Stateful(50), batch_size=3, num_workers=2)

    whole = Group(make).finish()
    source = wrap(make())
    list(itertools.islice(source.batches(0, 0), 9))
    source.plan(27, 1)
    resumed = Group(make)
    resumed.offset, resumed.resume_info = 27, source.resume_info(0, 27)
    assert resumed.resume_info["mark"]["offset"] == 27
    assert resumed.finish() == whole[9:]


# ---- Hugging Face


def hugging_face(size, num_shards=3):
    datasets = pytest.importorskip("datasets", reason="Hugging Face datasets is not installed")
    data = datasets.Dataset.from_dict({"n": list(range(size))})
    return data.to_iterable_dataset(num_shards)


HUGGING_FACE = {
    "plain": lambda data: data,
    "mapped": lambda data: data.map(lambda row: {"n": row["n"]}, batched=True, batch_size=7),
    "filtered": lambda data: data.filter(lambda row: row["n"] % 3 != 0),
    "shuffled": lambda data: data.shuffle(seed=1, buffer_size=8),
}


@pytest.mark.parametrize("kind", [*HUGGING_FACE, "interleaved"])
@pytest.mark.parametrize("num_workers", [0, 2])
# Before PyTorch 2.10, datasets calls `torch.tensor` with a tensor.
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_hugging_face_stream_continues_at_any_position(kind, num_workers):
    datasets = pytest.importorskip("datasets", reason="Hugging Face datasets is not installed")
    if kind == "interleaved":
        parts = [hugging_face(20), hugging_face(30)]
        data = datasets.interleave_datasets(parts, [0.7, 0.3], seed=1)
    else:
        data = HUGGING_FACE[kind](hugging_face(45))
    loader = DataLoader(data.with_format("torch"), batch_size=4, num_workers=num_workers)
    source = wrap(loader, world_size=2)
    complete = wrap(loader, world_size=2)
    whole = [batch["n"].tolist() for batch in complete.batches(0, 0)]
    batches = source.batches(0, 0)
    assert [next(batches)["n"].tolist() for _ in range(3)] == whole[:3]
    source.plan(24, 1)
    saved = source.resume_info(0, 24)
    is_exact = is_at_least(datasets.__version__, "5.0.1")
    assert ("mark" in saved) == (is_exact and kind != "shuffled")
    resumed = wrap(loader, world_size=2)
    resumed.load_resume_info(saved)
    assert [batch["n"].tolist() for batch in resumed.batches(0, 24)] == whole[3:]
    assert resumed.step_digest == complete.step_digest


def test_hugging_face_stream_that_has_changed_since_the_checkpoint_is_an_error():
    data = hugging_face(45).map(lambda row: row)
    loader, changed = (DataLoader(each, batch_size=4) for each in (data, data.map(dict)))
    source, resumed = wrap(loader), wrap(changed)
    next(source.batches(0, 0))
    source.plan(4, 1)
    saved = source.resume_info(0, 4)
    if "mark" not in saved:
        pytest.skip("this version of datasets saves no exact state")
    resumed.load_resume_info(saved)
    with pytest.raises(CheckpointError, match=r"cannot continue from its state .* another map\(\)"):
        next(resumed.batches(0, 4))


def test_package_of_the_user_may_be_named_datasets(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", types.ModuleType("datasets"))
    own = type("Own", (Numbers,), {"__module__": "datasets.own"})
    batches = wrap(DataLoader(own(6), batch_size=3)).batches(0, 0)
    assert [numbers_of(batch) for batch in batches] == [[0, 1, 2], [3, 4, 5]]


def test_hugging_face_stream_that_is_split_by_node_is_left_to_the_user():
    split = pytest.importorskip("datasets.distributed").split_dataset_by_node
    loader = DataLoader(split(hugging_face(24), 0, 2), batch_size=4)
    assert "your code" in wrap(loader, world_size=2).who_reads


# ---- streams that give other samples


class Unseeded(Numbers):
    def __iter__(self):
        return iter(torch.from_numpy(np.random.default_rng().permutation(self.size)))


class Rotating(Numbers):
    """Numbers whose first one differs between iterations. An error comes once at `fails_at`."""

    fails_at, error, num_begun = None, FileNotFoundError, 0

    def fail(self, *place):
        if place == self.fails_at:
            self.fails_at = None
            raise self.error

    def __iter__(self):
        self.num_begun += 1
        for number in range(self.size):
            self.fail("read", number)
            yield torch.tensor((number + self.num_begun) % self.size), number

    def collate(self, samples):
        self.fail("collate", samples[0][1])
        return default_collate(samples)


def fail_in_epoch(source):
    """Read steps until one fails. Return their number of samples."""
    offset = 0
    try:
        for _ in source.batches(0, 0):
            source.plan(offset, 1)
            offset = source.offset_after(offset, 1)
    except (FileNotFoundError, KeyboardInterrupt):
        return offset
    raise AssertionError("no step has failed")


@pytest.mark.parametrize("error", [FileNotFoundError, KeyboardInterrupt])
@pytest.mark.parametrize("fails_at", [("read", 2), ("read", 7), ("read", 12), ("collate", 12)])
def test_stream_that_gives_other_samples_after_an_error_is_refused(fails_at, error):
    data = Rotating(20)
    data.fails_at, data.error = fails_at, error
    source = wrap(DataLoader(data, batch_size=2, collate_fn=data.collate))
    new = wrap(DataLoader(Rotating(20), batch_size=2))
    offset = fail_in_epoch(source)
    source.end_processes()  # as `Segment` does after each error
    assert offset == fails_at[1] // 2 * 2
    saved = source.resume_info(0, offset)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Rotating, now gives other samples"):
            next(source.batches(0, offset))
        source.end_processes()
        assert source.resume_info(0, offset) == saved
    new.load_resume_info(saved)  # its first iteration is that of the checkpoint
    assert numbers_of(next(new.batches(0, offset)))[0] == offset + 1


def test_reading_error_before_a_loaded_position_keeps_its_digest():
    source, data = wrap(DataLoader(Rotating(20), batch_size=2)), Rotating(20)
    next(source.batches(0, 0))
    source.plan(0, 5)
    resumed, data.fails_at = wrap(DataLoader(data, batch_size=2)), ("read", 5)
    resumed.load_resume_info(source.resume_info(0, 8))
    with pytest.raises(FileNotFoundError):
        next(resumed.batches(0, 8))
    said = r"Rotating, now gives other samples.*config\[BATCH"
    with pytest.raises(RuntimeError, match=said):
        next(resumed.batches(0, 8))


def test_workers_notice_that_they_read_other_samples():
    loader = DataLoader(Unseeded(1000), batch_size=3)
    ranks = [wrap(loader, world_size=2, rank=rank) for rank in range(2)]
    for source in ranks:
        next(source.batches(0, 0))
    group = types.SimpleNamespace(all_ranks_equal=ranks[0].step_digest.__eq__)
    ranks[0].check_same_samples(group)
    with pytest.raises(RuntimeError, match="read different samples from a stream, Unseeded"):
        ranks[1].check_same_samples(group)


def test_stream_that_is_shorter_than_the_position_is_an_error():
    source = wrap(DataLoader(Numbers(5), batch_size=3))
    with pytest.raises(RuntimeError, match="in epoch 0 after 6 samples"):
        next(source.batches(0, 6))


@pytest.mark.parametrize(
    "make",
    [
        lambda n: n,
        lambda n: f"{n}",
        lambda n: [n, 2],
        lambda n: {"a": torch.tensor([n]), "b": "text"},
        lambda n: (np.full(3, n), None, np.array([f"text {n}"], dtype=object)),
        lambda n: torch.full((2,), n, dtype=torch.bfloat16),
        lambda n: [torch.tensor(n), {"x": b"%d" % n}, torch.eye(2).to_sparse()],
    ],
)
def test_digest_depends_on_the_content_only(make):
    assert sample_digest(make(1)) == sample_digest(copy.deepcopy(make(1))) != sample_digest(make(2))


def test_digest_of_an_object_has_its_class_and_attributes():
    assert sample_digest([object()]) == sample_digest([object()]) != sample_digest([Numbers(1)])
    assert sample_digest(Numbers(1)) == sample_digest(Numbers(1)) != sample_digest(Numbers(2))
    outer, inner = Numbers(1), Numbers(1)
    outer.inner, inner.outer = inner, outer
    assert sample_digest(outer) == sample_digest(outer) != sample_digest(inner)


def test_loop_over_the_source_releases_samples():
    alive = weakref.WeakSet()

    class Tracked(Numbers):
        def __iter__(self):
            for number in range(self.size):
                alive.add(sample := torch.tensor(number))
                yield sample

    source, most = wrap(DataLoader(Tracked(300), batch_size=3), world_size=2), 0
    for _ in source:
        most = max(most, len(alive))
    assert 0 < most < 20


@pytest.mark.parametrize("kind", ["plain", "group", "mix"])
def test_files_are_closed_with_the_source(tmp_path, kind):
    (tmp_path / "data.txt").write_text("1\n2\n3\n")
    group_size = 2 if kind == "group" else None
    stream = Stream(text(tmp_path / "data.txt", cache_dir=tmp_path), group_size=group_size)
    source = wrap(DataLoader(mix([stream], [1]) if kind == "mix" else stream, batch_size=2))
    folder = pathlib.Path("/proc/self/fd")

    def is_open():
        return str(tmp_path / "data.txt") in map(os.path.realpath, folder.iterdir())

    next(source.batches(0, 0))
    assert is_open()
    source.end_processes()  # otherwise, a collected cycle of objects warns of open files
    assert not is_open()


def test_groups_are_a_stream_also_if_they_are_older_than_pytorch(tmp_path):
    (tmp_path / "data.txt").write_text("1")
    program = f"""if True:
        from raysgd.data import Stream, text
        stream = Stream(text({str(tmp_path / "data.txt")!r}), group_size=2)
        from raysgd.torch import TrainingOperator
        from torch.utils.data import IterableDataset
        assert isinstance(stream, IterableDataset)"""
    run_python("-c", program)


def test_order_of_loader_processes_does_not_depend_on_the_number_of_workers():
    """With ``config[BATCH_SIZE]``, the batch size of a loader depends on it."""
    whole = None
    for world_size in (1, 2, 4):
        loader = DataLoader(Numbers(50), batch_size=8 // world_size, num_workers=2)
        arguments = {"worker_batch_size": 8 // world_size, "requested_global_batch_size": 8}
        ranks = [
            wrap(loader, world_size=world_size, rank=rank, **arguments).batches(0, 0)
            for rank in range(world_size)
        ]
        steps = [
            [n for batch in step for n in numbers_of(batch)] for step in zip(*ranks, strict=True)
        ]
        whole = whole or steps
        assert steps[:6] == whole[:6]


class OwnLoader(DataLoader):
    """A loader whose batches raysgd does not collate."""

    def __iter__(self):
        yield from super().__iter__()


def test_generator_of_a_loader_stays_as_it_was_and_does_not_decide_the_samples():
    def read(seed):
        generator = torch.Generator().manual_seed(seed)
        loader = OwnLoader(Augmented(12), batch_size=3, num_workers=2, generator=generator)
        state = generator.get_state()
        batches = [[values.tolist() for values in batch] for batch in wrap(loader).batches(0, 0)]
        assert loader.generator is generator
        assert torch.equal(generator.get_state(), state)
        return batches

    assert read(1) == read(2)


def batches():
    yield from batches_of(4)


@pytest.mark.parametrize("shuffle", [0, 4])
def test_groups_of_a_shuffled_stream_have_no_order_for_predict(tmp_path, shuffle):
    path = tmp_path / "data.txt"
    path.write_text("a\nb\n")
    records = Stream(text(path, cache_dir=tmp_path / "cache"), group_size=2, shuffle=shuffle)
    loader = DataLoader(records, batch_size=1)
    source = wrap(loader, training=False)
    assert source.shuffles == bool(shuffle)
    assert source.describe() == (
        "a stream, Stream of 1 files with 2 records, with 1 samples per worker and step"
    )


def test_description_of_a_generator_function_has_its_name():
    described = wrap(GeneratorFunction(batches)).describe()
    assert described.startswith("a stream, the generator function batches, with one batch")


def test_records_without_a_stream_are_an_error(tmp_path):
    (tmp_path / "data").write_text("1\n")
    records = jsonl(tmp_path / "data", cache_dir=tmp_path / "cache")
    for loader in (records, DataLoader(records, batch_size=1)):
        with pytest.raises(TypeError, match=r"1 files with 1 records .* DataLoader\(Stream\("):
            wrap(loader)


def test_samples_of_workers_are_compared_in_one_exchange():
    class Ranks(Collectives):
        calls, broadcast = 0, None

        def all_reduce_min(self, *values):
            self.calls += 1
            return values

    source, ranks = wrap(DataLoader(Numbers(9), batch_size=3)), Ranks()
    next(source.batches(0, 0))
    source.check_same_samples(ranks)
    assert ranks.calls == 1


@pytest.mark.parametrize("persistent", [True, False])
def test_stream_in_processes_that_persist_is_told_to_define_set_epoch(
    make_trainer, caplog, persistent
):
    class Op(Classifier):
        def setup(self, config):
            super().setup(config)
            loader = DataLoader(Numbers(4), num_workers=1, persistent_workers=persistent)
            self.register_data(train_loader=loader)

    make_trainer(Op).get_local_operator()
    assert ("Numbers is a stream, so persistent_workers=True" in caplog.text) == persistent
