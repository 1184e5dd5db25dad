"""Where callbacks of training functions write, and whose results they see."""

import os

import pytest

from raysgd.train.callbacks.callback import FileCallback


class Seen(FileCallback):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.results = None

    def handle_result(self, results, **info):
        self.results = results


def test_there_is_no_folder_before_a_run():
    with pytest.raises(RuntimeError, match="Seen has no folder before a run has begun"):
        _ = Seen("given", None).logdir


def test_a_folder_of_ones_own_comes_before_that_of_the_run(tmp_path, monkeypatch):
    for given, expected in ((None, "run"), (tmp_path / "a" / "own", "a/own")):
        callback = Seen(given, None)
        callback.start_training(logdir=tmp_path / "run", config={})
        assert callback.logdir == tmp_path / expected
        assert callback.logdir.is_dir()


def test_a_folder_may_be_named_from_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    callback = Seen("~/logs", None)
    callback.start_training(logdir="run", config={})
    assert callback.logdir == tmp_path / "logs"
    assert os.listdir(tmp_path) == ["logs"]


@pytest.mark.parametrize(
    ("workers", "ranks"), [(None, [0, 1, 2]), (1, [1]), ([2, 0], [2, 0]), ([1, 7], [1])]
)
def test_it_sees_the_results_of_its_workers(workers, ranks):
    callback = Seen(None, workers)
    callback.process_results([{"rank": rank} for rank in range(3)])
    assert [result["rank"] for result in callback.results] == ranks
