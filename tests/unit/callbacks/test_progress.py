"""The progress bar of a call."""

import pytest

from raysgd.context import Progress
from raysgd.progress_bar import ProgressBar


@pytest.fixture
def shown(capsys):
    """A function that returns what a bar shows."""

    def show(*progress):
        bar = ProgressBar("train", max_workers=3)
        bar.update(progress)
        bar.close()
        return capsys.readouterr().err

    return show


def test_it_shows_batches_loss_rate_and_live_workers(shown):
    text = shown(
        Progress(num_batches=2, total_batches=5, num_samples=64, loss=0.5),
        Progress(num_batches=2, num_samples=64, loss=1.5),
    )
    assert "train" in text
    assert "2/5" in text
    assert "loss=1" in text
    assert "workers=2/3" in text
    assert "samples/s" in text


def test_no_loss_yet_is_no_loss_shown(shown):
    assert "loss" not in shown(Progress(num_batches=1, total_batches=5))


def test_an_unknown_length_is_no_error(shown):
    assert "3batch" in shown(Progress(num_batches=3))


def test_no_answer_from_the_workers_leaves_the_bar_as_it_is(shown):
    assert "0batch" in shown()
