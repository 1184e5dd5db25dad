"""The progress of calls in terminals, notebooks, and files."""

import io
import logging
import re
import sys
from types import SimpleNamespace

import pytest
import tqdm.auto

from raysgd._internal.step_timing import PHASES
from raysgd._internal.worker_status import BatchProgress
from raysgd.callbacks import EarlyStopping, EpochPrinter, ProgressBar
from raysgd.callbacks import progress as module
from raysgd.callbacks.base import CallInfo
from raysgd.elastic.events import Event
from raysgd.elastic.speed import SpeedReport, WorkerSpeed


class Terminal(io.StringIO):
    def isatty(self):
        return True


class FakeTrainer:
    """The attributes of a trainer that a progress bar reads."""

    epoch = num_completed_epochs = 1
    num_workers = 2
    max_workers = 3
    global_step = 100
    num_epochs = None
    is_fitting = False
    last_call = stop_reason = None
    events = ()
    speed = SpeedReport


@pytest.fixture
def terminal(monkeypatch):
    """A fake terminal that replaces standard error."""
    stream = Terminal()
    # replace `sys` in the module, because pytest replaces sys.stderr before the test
    own = SimpleNamespace(stderr=stream, modules=sys.modules)
    monkeypatch.setattr(module, "sys", own)
    return stream


def progress(num_batches, *, loss=None, total=5, step=None, num_samples=32):
    return BatchProgress(
        num_batches=num_batches,
        num_total_batches=total,
        num_samples=num_samples,
        global_step=100 + num_batches if step is None else step,
        latest_metrics={} if loss is None else {"train_loss": loss},
    )


def test_a_bar_shows_the_longest_phase_unless_it_is_computing(terminal):
    bar, trainer = ProgressBar(), FakeTrainer()

    def train(**seconds):
        row = {**dict.fromkeys(PHASES, 0.0), **seconds}
        worker = WorkerSpeed(rank=0, host="", num_steps=2, samples_per_s=1.0, phase_s=row)
        trainer.speed = lambda: SpeedReport(workers=[worker] * 2)
        bar.on_progress(trainer, "train", [progress(1)] * 2)

    train(data=3.0, forward=1.0)
    assert "data=75%" in terminal.getvalue()
    train(data=3.0, forward=2.0, backward=1.5)
    assert "%" not in terminal.getvalue().rpartition("samples/s")[2]


def test_a_bar_shows_batches_loss_rate_and_live_workers(terminal):
    bar, trainer = ProgressBar(), FakeTrainer()
    bar.on_progress(trainer, "train", [])
    bar.on_progress(trainer, "train", [progress(2, loss=0.5), progress(2, loss=1.5)])
    text = terminal.getvalue()
    assert "2/5" in text
    assert "loss=1" in text
    assert "workers=2/3" in text
    assert "samples/s" in text
    bar.on_epoch_end(trainer, {"batch_count": 5, "num_samples": 99, "train_loss": 0.25})
    assert "train 1: 100%" in terminal.getvalue()
    assert "5/5" in terminal.getvalue()
    assert "loss=0.25" in terminal.getvalue()
    assert terminal.getvalue().count("\n") == 1, "one line for the whole call"


def test_bar_shows_shares_and_the_mean_of_unlike_numbers_of_batches(terminal):
    bar, trainer = ProgressBar(), FakeTrainer()
    trainer.events = [SimpleNamespace(shares=shares) for shares in [(1.5, 0.5), ()]]
    bar.on_progress(trainer, "validate", [progress(30, total=20), progress(9, total=20)])
    assert "20/20" in terminal.getvalue()
    assert "shares=1.5/0.5" in terminal.getvalue()


def test_what_is_logged_comes_above_a_bar(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal)
    bar, trainer = ProgressBar(), FakeTrainer()
    bar.on_progress(trainer, "train", [progress(2)])
    logging.getLogger("raysgd").warning("Lost worker 1.")
    bar.on_progress(trainer, "train", [progress(3)])
    bar.on_train_end(trainer)
    assert re.search("\r *\rLost worker 1.\n\r", terminal.getvalue())
    logging.getLogger("raysgd").warning("Lost worker 2.")
    assert "Lost worker 2." not in terminal.getvalue()  # the bar no longer handles logs


def test_bar_continues_to_count_after_a_pause_or_failure(terminal):
    bar, trainer = ProgressBar(), FakeTrainer()
    bar.on_progress(trainer, "train", [])
    bar.on_progress(trainer, "train", [progress(3)])
    trainer.global_step = 103
    bar.on_progress(trainer, "train", [])
    bar.on_progress(trainer, "train", [progress(1, total=2, step=104)])
    assert "4/5" in terminal.getvalue()


@pytest.fixture
def notebook(monkeypatch):
    """Replace tqdm by its notebook version, with fake widgets that store their values."""
    from tqdm import notebook

    def widget(**given):
        return SimpleNamespace(layout=SimpleNamespace(), style=SimpleNamespace(), **given)

    for name in ("IProgress", "HTML", "TqdmHBox"):
        monkeypatch.setattr(notebook, name, widget, raising=False)
    monkeypatch.setattr(notebook, "display", lambda container: None, raising=False)
    monkeypatch.setattr(tqdm.auto, "tqdm", notebook.tqdm)
    monkeypatch.setattr(module, "is_interactive", lambda: True)


def test_notebook_bar_shows_the_progress_of_the_call(notebook):
    bar, trainer = ProgressBar(), FakeTrainer()
    bar.on_progress(trainer, "train", [])
    bar.on_progress(trainer, "train", [progress(2, loss=0.5)])
    _, drawn, right = bar._bar.container.children
    assert (drawn.value, drawn.max) == (2, 5)
    assert "loss=0.5" in right.value
    bar.on_epoch_end(trainer, {"batch_count": 5, "num_samples": 99, "train_loss": 0.25})
    assert (drawn.value, drawn.max, drawn.bar_style) == (5, 5, "success")


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests advance through ``now``."""

    class Clock:
        now = 0.0

    monkeypatch.setattr(module.time, "monotonic", lambda: Clock.now)
    return Clock


def test_without_a_terminal_lines_are_printed_at_intervals(capsys, clock):
    bar, trainer = ProgressBar(), FakeTrainer()
    bar.on_progress(trainer, "train", [])
    for number in range(25):
        clock.now = 3 * number
        bar.on_progress(trainer, "train", [progress(number + 1, total=50, loss=0.5)])
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "train: 11/50 batches",
        "train: 21/50 batches",
    ]
    assert "loss=0.5" in lines[0]
    assert lines[0].endswith("workers=2/3")
    bar.on_epoch_end(trainer, {"batch_count": 50.0, "num_samples": 99, "train_loss": 0.25})
    assert capsys.readouterr().err.startswith("train 1: 50/50 batches, loss=0.25, samples/s=")


def test_use_tqdm_shows_each_call_and_no_more_than_one_bar(make_trainer, capsys):
    trainer = make_trainer(use_tqdm=True, callbacks=[ProgressBar()])
    trainer.train(num_steps=3)
    trainer.train()
    trainer.validate()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "train 1: 3/3 batches",
        "train 1: 2/2 batches",
        "validate: 5/5 batches",
    ]


@pytest.mark.parametrize("interactive", [True, False])
def test_loop_without_a_batch_count_does_not_show_zero_batches(terminal, monkeypatch, interactive):
    monkeypatch.setattr(module, "is_interactive", lambda: interactive)
    bar, trainer = ProgressBar(), FakeTrainer()
    bar.on_progress(trainer, "validate", [])
    bar.on_validation_end(trainer, {"val_loss": 0.5})
    text = terminal.getvalue()
    assert "loss=0.5, workers=2/3" in text
    assert "0/0" not in text
    assert "samples/s" not in text.splitlines()[-1].rpartition("\r")[2]


def test_fit_prints_a_line_for_each_epoch_unless_verbose_is_off(make_trainer, capsys):
    trainer = make_trainer(callbacks=[EarlyStopping(min_delta=9, patience=2)])
    history = trainer.fit(9, validate_every=2)
    lines = capsys.readouterr().err.splitlines()
    shown = [f"train_loss {history[epoch]['train_loss']:.4g}" for epoch in range(4)]
    assert [line.split("  ")[:2] for line in lines[:4]] == [
        [f"epoch {epoch}/9", shown[epoch - 1]] for epoch in (1, 2, 3, 4)
    ]
    assert f"val_accuracy {history[1]['val_accuracy']:.4g}" in lines[1]
    assert "val_" not in lines[2]
    assert lines[-1].startswith(f"stopped in epoch {len(history)}: val_loss has not improved")
    trainer.train()
    trainer.fit(12, verbose=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (200, ["train_loss", "val_loss", "train_accuracy", "val_accuracy", "0.0"]),
        (60, ["train_loss", "val_loss", "0.0"]),
        (10, ["0.0"]),
    ],
)
def test_line_of_an_epoch_fits_into_the_terminal(terminal, monkeypatch, columns, shown):
    monkeypatch.setenv("COLUMNS", str(columns))
    bar, trainer = EpochPrinter(), FakeTrainer()
    trainer.num_epochs, trainer.is_fitting = 8, True
    names = ["train_loss", "train_accuracy", "val_loss", "val_accuracy"]
    bar.on_epoch_result(trainer, CallInfo("validate", 10.0, 0.01), dict.fromkeys(names, 0.123456))
    (line,) = terminal.getvalue().splitlines()
    assert [part.split()[0] for part in line.split("  ")[1:]] == shown
    assert len(line) <= max(columns, 20)


@pytest.mark.parametrize(
    ("lost_at", "said"), [(99, ""), (105, " (380 of 600 samples measured, all trained)")]
)
def test_line_of_an_epoch_says_what_lost_workers_did_not_measure(terminal, lost_at, said):
    lines, trainer = EpochPrinter(), FakeTrainer()
    trainer.num_epochs, trainer.is_fitting = 8, True
    trainer.events = [Event(kind="lost", generation=0, ranks=(1,), time=lost_at)]
    trainer.last_call = CallInfo("train", 110.0, 10.0, epoch_samples=600)
    lines.on_epoch_end(trainer, {"train_loss": 1.289, "num_samples": 380})
    lines.on_epoch_result(trainer, trainer.last_call, {"train_loss": 1.289, "num_samples": 9})
    assert terminal.getvalue() == f"epoch 1/8  train_loss 1.289{said}  10.0 s\n"


def test_line_of_the_epoch_replaces_the_bar_in_fit(make_trainer, terminal):
    trainer = make_trainer()
    trainer.train(num_steps=3)  # of 5: the rest of the first epoch follows
    trainer.fit(2)
    text = terminal.getvalue()
    assert "epoch 2/2, validation" in text
    assert "epoch 2/2" not in text.partition("epoch 1/2, validation")[0]
    lines = [line.rpartition("\r")[2] for line in text.split("\n")]
    assert [line.split("  ")[0] for line in lines if line] == ["epoch 1/2", "epoch 2/2"]
    module.sys.stderr = None  # as in a service
    assert trainer.fit(3)


def test_a_bar_of_fit_names_epoch_and_metrics_of_any_name(terminal):
    bar, trainer = ProgressBar(), FakeTrainer()
    trainer.num_epochs, trainer.is_fitting = 8, True
    bar.on_progress(trainer, "train", [])
    losses = {"loss_g": 0.5, "loss_d": 1.5}
    bar.on_progress(trainer, "train", [BatchProgress(num_batches=2, latest_metrics=losses)])
    text = terminal.getvalue()
    assert "epoch 2/8" in text
    assert "loss_g=0.5, loss_d=1.5" in text
