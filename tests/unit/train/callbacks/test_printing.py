"""Results that are printed."""

import json

from raysgd.train.callbacks import PrintCallback
from raysgd.train.constants import PYTORCH_PROFILER_KEY


def test_each_report_is_indented_json(capsys):
    results = [{"loss": 0.5, "epoch": 1}, {"loss": 0.25}, {}]
    PrintCallback().process_results([*results, {"odd": {1}}])
    printed = capsys.readouterr().out
    assert json.loads(printed) == [*results, {"odd": "{1}"}]
    assert '\n        "loss": 0.25\n' in printed


def test_nothing_is_printed_before_there_is_a_report(capsys, tmp_path):
    callback = PrintCallback()
    callback.start_training(logdir=tmp_path, config={"lr": 1})
    callback.finish_training(error=True)
    assert capsys.readouterr() == ("", "")


def test_traces_of_the_profiler_are_not_printed(capsys):
    PrintCallback().process_results([{"loss": 1.0, PYTORCH_PROFILER_KEY: [("trace.json", "{}")]}])
    assert json.loads(capsys.readouterr().out) == [{"loss": 1.0}]
