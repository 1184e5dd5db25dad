"""The run folder (``logdir``), and the callbacks that a trainer adds."""

from pathlib import Path

import pytest

from raysgd.callbacks import (
    Callback,
    CheckpointCallback,
    CsvLogger,
    JsonlLogger,
    ProgressBar,
    TensorBoardLogger,
    TorchProfiler,
)
from raysgd.callbacks.callback_list import as_logdir, trainer_callbacks
from raysgd.callbacks.report import RunReport


def kinds(callbacks=(), use_tqdm=False, logdir=None):
    return [type(each) for each in trainer_callbacks("T", callbacks, use_tqdm, logdir)]


def test_logdir_becomes_absolute_and_need_not_exist(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert as_logdir(None) is None
    for given in ("~/runs/1", "runs/1", Path("runs") / "1", tmp_path / "runs" / "1"):
        assert as_logdir(given) == tmp_path / "runs" / "1"
    assert list(tmp_path.iterdir()) == []
    assert as_logdir(tmp_path) == tmp_path, "an existing folder is used"


@pytest.mark.parametrize(
    ("logdir", "error", "said"),
    [
        (3, TypeError, "logdir must be a path, but it is 3"),
        ("s3://bucket/run", ValueError, r"must be a local path.*CheckpointCallback\('s3://"),
        (__file__, ValueError, "must be a folder, but .* is a file"),
        (b"runs/1", TypeError, "logdir must be a path, but it is b'runs/1'"),
    ],
)
def test_wrong_logdir_is_an_error(logdir, error, said):
    with pytest.raises(error, match=said):
        as_logdir(logdir)


@pytest.mark.parametrize(
    "callback_cls",
    [CheckpointCallback, CsvLogger, JsonlLogger, TensorBoardLogger, TorchProfiler, RunReport],
)
def test_callback_without_a_folder_needs_a_logdir(tmp_path, callback_cls):
    """The error comes when the trainer is created, before workers start."""
    name = callback_cls.__name__
    with pytest.raises(ValueError, match=rf"{name} needs a folder.*logdir='runs/1'"):
        trainer_callbacks("T", [callback_cls()], False, None)
    assert callback_cls in kinds([callback_cls()], logdir=tmp_path)
    assert kinds([CheckpointCallback(tmp_path)]) == [CheckpointCallback]


@pytest.mark.parametrize(
    ("mine", "use_tqdm", "expected"),
    [
        # the log then contains the metrics that the user's callbacks add
        ([Callback()], False, [Callback, JsonlLogger, RunReport]),
        ([JsonlLogger(), CsvLogger()], False, [JsonlLogger, CsvLogger, RunReport]),
        ([Callback()], True, [ProgressBar, Callback, JsonlLogger, RunReport]),
        ([Callback(), ProgressBar()], True, [Callback, ProgressBar, JsonlLogger, RunReport]),
    ],
)
def test_a_trainer_adds_one_log_one_report_and_one_progress_bar(tmp_path, mine, use_tqdm, expected):
    assert kinds(mine, use_tqdm, tmp_path) == expected
    assert RunReport not in kinds([ProgressBar()])
