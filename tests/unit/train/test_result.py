"""What `fit()` returns, and the file of reports behind it."""

import itertools
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.train.result import REPORTS, Result, read_reports


def test_a_report_that_was_cut_off_is_left_out(tmp_path):
    path = Path(tmp_path) / "result.json"
    assert read_reports(path) == []
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert read_reports(path) == [{"a": 1}, {"a": 2}]


@given(st.lists(st.dictionaries(st.text(), st.text()), max_size=4), st.data())
def test_whole_reports_are_read_wherever_the_file_was_cut_off(tmp_path, reports, data):
    """Texts with line breaks of any kind among them."""
    lines = [json.dumps(report) + "\n" for report in reports]
    written = "".join(lines)
    length = data.draw(st.integers(0, len(written)))
    path = tmp_path / REPORTS
    path.write_text(written[:length], encoding="utf-8")
    ends = itertools.accumulate(map(len, lines))
    whole = sum(end - 1 <= length for end in ends)  # the line break at its end may be missing
    assert read_reports(path) == reports[:whole]


def test_the_history_is_what_is_in_the_folder_of_the_run(tmp_path):
    result = Result({"n": 1}, None, path=str(tmp_path))
    assert result.history == []
    (tmp_path / REPORTS).write_text('{"n": 0}\n{"n": 1}\n')
    assert result.history == [{"n": 0}, {"n": 1}]
    assert list(result.metrics_dataframe["n"]) == [0, 1]
    assert result.log_dir == str(tmp_path)
    assert result.error is None


def test_without_pandas_the_error_names_the_extra_and_the_other_way(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r'"raysgd\[data\]"\. The same is in `history`'):
        _ = Result(None, None, path=str(tmp_path)).metrics_dataframe
