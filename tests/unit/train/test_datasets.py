"""Data sets, shared out over workers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.train import DataParallelTrainer, RunConfig
from raysgd.train.datasets import Datasets


class Rows:
    """As much of a Ray Dataset as is needed: its rows, which come anew with each look."""

    def __init__(self, num_rows):
        self.num_rows = num_rows
        self.looks = 0
        self.hints = None

    def count(self):
        return self.num_rows

    def materialize(self):
        self.looks += 1
        fixed = Rows(self.num_rows)
        fixed.drawn = self.looks
        fixed.split = lambda *given, **named: self._split(fixed, *given, **named)
        return fixed

    def split(self, n, equal, locality_hints):
        raise AssertionError("rows that are not fixed differ after a restart")

    def _split(self, fixed, n, equal, locality_hints):
        assert equal
        self.hints = locality_hints
        end = self.num_rows - self.num_rows % n
        return [(fixed.drawn, *range(rank, end, n)) for rank in range(n)]


@given(st.integers(1, 5), st.integers(0, 20))
def test_shares_are_equally_large_and_no_row_is_in_two(workers, num_rows):
    actors = [f"actor {rank}" for rank in range(workers)]
    data = Rows(num_rows)
    shares = [share[1:] for share in Datasets(data).shared_out(actors)]
    assert len({len(share) for share in shares}) == 1
    assert len(set().union(*shares)) == num_rows - num_rows % workers
    assert data.hints == actors


def test_a_restart_gets_the_same_rows():
    data = Rows(6)
    datasets = Datasets(data)
    assert datasets.shared_out(["a", "b"]) == datasets.shared_out(["c", "d"])
    datasets.shared_out(["e"])
    assert data.looks == 1


def test_a_data_set_can_be_read_before_the_workers_start(caplog):
    data, whole = Rows(6), Rows(6)
    datasets = Datasets({"train": data, "val": whole, "no": None}, lambda name: name != "val")
    datasets.materialize()
    assert (data.looks, whole.looks) == (1, 0)
    (warning,) = caplog.messages
    assert "'train' is read once" in warning
    datasets.shared_out(["a", "b"])
    assert (data.looks, whole.looks) == (1, 0)


def test_fit_reads_data_sets_before_it_starts_workers(monkeypatch, tmp_path):
    data = Rows(6)

    class Executor:
        def start(self):
            raise InterruptedError(data.looks)

    config = RunConfig(storage_path=str(tmp_path))
    trainer = DataParallelTrainer(print, datasets={"train": data}, run_config=config)
    monkeypatch.setattr(DataParallelTrainer, "executor", lambda self: Executor())
    with pytest.raises(InterruptedError, match="1"):
        trainer.fit()


class MaterializedDataset(Rows):
    """Named like the one of Ray."""


@pytest.mark.parametrize(("num_rows", "share"), [(1, 0), (7, 3)])
def test_rows_that_are_left_over_are_warned_about_once(caplog, num_rows, share):
    datasets = Datasets(MaterializedDataset(num_rows))
    for _ in range(2):
        datasets.shared_out(["a", "b"])
    (warning,) = caplog.messages
    assert f"has {num_rows} rows, and 2 workers get equally many: {share} each" in warning


@pytest.mark.parametrize("is_split", [True, False])
def test_data_that_need_a_cpu_which_no_worker_leaves_are_warned_about(
    monkeypatch, caplog, is_split
):
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    for free in ({"CPU": 1.0}, {}):
        caplog.clear()
        monkeypatch.setattr("ray.available_resources", lambda free=free: free)
        Datasets(Rows(2), lambda name: is_split).shared_out(["a", "b"])
        assert ("no CPU of the cluster is free" in caplog.text) == (not free)
        caplog.clear()
        Datasets(MaterializedDataset(2), lambda name: is_split).shared_out(["a", "b"])
        assert caplog.messages == []


def test_only_those_that_shall_be_are_shared_out():
    train, whole = Rows(4), [1, 2, 3]
    given = {"train": train, "val": whole, "test": None}
    datasets = Datasets(given, lambda name: name != "val")
    given.clear()  # the caller's own
    assert datasets.shared_out(["a", "b"]) == [
        {"train": (1, 0, 2), "val": whole, "test": None},
        {"train": (1, 1, 3), "val": whole, "test": None},
    ]


def test_what_cannot_be_shared_out_is_named():
    with pytest.raises(TypeError, match=r"^dataset=\[1, 2\]: must be a Ray Dataset"):
        Datasets([1, 2])
    with pytest.raises(TypeError, match=r"^dataset 'train': must be a Ray Dataset"):
        Datasets({"val": Rows(1), "train": [1, 2]})


@pytest.mark.parametrize("given", [None, {}])
def test_there_may_be_none(given):
    assert Datasets(given).shared_out(["a", "b"]) == [None, None]


def test_a_text_is_no_data_set_though_it_can_be_split():
    with pytest.raises(TypeError, match="dataset='abc': must be a Ray Dataset"):
        Datasets("abc")
