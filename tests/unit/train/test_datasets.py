"""Ray Datasets, split across the workers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.train import DataParallelTrainer, RunConfig
from raysgd.train.datasets import Datasets


class LazyDataset:
    """A fake Ray Dataset whose rows differ at each read."""

    def __init__(self, num_rows):
        self.num_rows = num_rows
        self.num_reads = 0

    def materialize(self):
        self.num_reads += 1
        return MaterializedDataset(self.num_rows, self.num_reads)

    def split(self, n, equal, locality_hints):
        raise AssertionError("the rows would differ after a restart")


class MaterializedDataset:
    """A fake of the Ray class ``MaterializedDataset``."""

    def __init__(self, num_rows, read=0):
        self.num_rows, self.read = num_rows, read
        self.hints = None

    def count(self):
        return self.num_rows

    def materialize(self):
        return self

    def split(self, n, equal, locality_hints):
        assert equal
        self.hints = locality_hints
        end = self.num_rows - self.num_rows % n
        return [(self.read, *range(rank, end, n)) for rank in range(n)]


@given(st.integers(1, 5), st.integers(0, 20))
def test_shards_have_equal_sizes_and_share_no_row(workers, num_rows):
    actors = [f"actor {rank}" for rank in range(workers)]
    data = MaterializedDataset(num_rows)
    shares = [share[1:] for share in Datasets(data).split(actors)]
    assert len({len(share) for share in shares}) == 1
    assert len(set().union(*shares)) == num_rows - num_rows % workers
    assert data.hints == actors


def test_a_restart_gets_the_same_rows_and_only_selected_data_sets_are_read_and_split(caplog):
    data, whole = LazyDataset(6), LazyDataset(6)
    given = {"train": data, "val": whole, "no": None}
    datasets = Datasets(given, lambda name: name != "val")
    given.clear()  # the dict of the caller
    datasets.materialize()
    (warning,) = caplog.messages
    assert "'train' is read once" in warning
    parts = [{"train": (1, rank, rank + 2, rank + 4), "val": whole, "no": None} for rank in (0, 1)]
    assert datasets.split(["a", "b"]) == datasets.split(["c", "d"]) == parts
    datasets.split(["e"])
    assert (data.num_reads, whole.num_reads) == (1, 0)


def test_fit_reads_data_sets_before_it_starts_workers(monkeypatch, tmp_path):
    data = LazyDataset(6)

    class Executor:
        def start(self):
            raise InterruptedError(data.num_reads)

    config = RunConfig(storage_path=str(tmp_path))
    trainer = DataParallelTrainer(print, datasets={"train": data}, run_config=config)
    monkeypatch.setattr(DataParallelTrainer, "create_executor", lambda self: Executor())
    with pytest.raises(InterruptedError, match="1"):
        trainer.fit()


def test_unused_rows_are_warned_about(caplog):
    Datasets(MaterializedDataset(7)).split(["a", "b"])
    (warning,) = caplog.messages
    assert warning.startswith("1 of 7 rows of data set 'dataset'")


@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize(
    ("dataset", "free", "warns"),
    [(LazyDataset, 1, False), (LazyDataset, 0, True), (MaterializedDataset, 0, False)],
)
def test_data_that_need_a_cpu_that_is_not_free_are_warned_about(
    monkeypatch, caplog, is_split, dataset, free, warns
):
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.available_resources", lambda: {"CPU": free})
    Datasets(dataset(2), lambda name: is_split).split(["a", "b"])
    assert ("waits for a free CPU" in caplog.text) == warns


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ([1, 2], r"^dataset=\[1, 2\]: must be a Ray Dataset"),
        ("abc", "^dataset='abc': must be a Ray Dataset"),
        ({"val": MaterializedDataset(1), "train": [1]}, "^dataset 'train': must be a Ray Dataset"),
    ],
)
def test_what_is_no_data_set_is_refused(wrong, match):
    with pytest.raises(TypeError, match=match):
        Datasets(wrong)
