"""Results that are printed."""

from raysgd.train.callbacks import PrintCallback
from raysgd.train.callbacks.profiler import PROFILE_TRACES


def test_each_worker_has_a_line(capsys):
    PrintCallback().process_results([{"loss": 0.5, "epoch": 1}, {"loss": 0.25}, {}])
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["worker 0: loss=0.5, epoch=1", "worker 1: loss=0.25", "worker 2: "]


def test_nothing_is_printed_before_there_is_a_report(capsys, tmp_path):
    callback = PrintCallback()
    callback.start_training(logdir=tmp_path, config={"lr": 1})
    callback.finish_training(error=True)
    assert capsys.readouterr() == ("", "")


def test_traces_of_the_profiler_are_not_printed(capsys):
    PrintCallback().process_results([{"loss": 1.0, PROFILE_TRACES: [("trace.json", "{}")]}])
    assert capsys.readouterr().out == "worker 0: loss=1.0\n"
