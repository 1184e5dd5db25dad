"""Results that are printed."""

import json

from raysgd.train.callbacks import PrintCallback
from raysgd.train.constants import PYTORCH_PROFILER_KEY


def test_each_report_is_a_line_of_json(capsys):
    results = [{"loss": 0.5, "epoch": 1}, {"loss": 0.25}, {}]
    PrintCallback().process_results([*results, {"odd": {1}}])
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == [*results, {"odd": "{1}"}]


def test_nothing_is_printed_before_there_is_a_report(capsys, tmp_path):
    callback = PrintCallback()
    callback.start_training(logdir=tmp_path, config={"lr": 1})
    callback.finish_training(error=True)
    assert capsys.readouterr() == ("", "")


def test_traces_of_the_profiler_are_not_printed(capsys):
    PrintCallback().process_results([{"loss": 1.0, PYTORCH_PROFILER_KEY: [("trace.json", "{}")]}])
    assert capsys.readouterr().out == '[{"loss": 1.0}]\n'
