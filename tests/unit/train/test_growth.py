"""When the group of a training function grows."""

from types import SimpleNamespace

import pytest

from raysgd.elastic.call import Call
from raysgd.train.backend import _grow, _Run
from raysgd.train.report_queue import Turn
from raysgd.train.worker_session import Plan

TURNS = {
    "S": Turn("checkpoint", has_checkpoint=True),
    "R": Turn("report"),
    "B": Turn("report", has_checkpoint=True),
    "E": Turn("end"),
}


@pytest.mark.parametrize(
    ("turns", "grown_at"),
    [
        ("SRSRE", [1, 3]),  # a restart from the checkpoint would skip the report
        ("RSRSE", [1, 3]),
        ("SSSE", [1, 2]),
        ("BBE", [0, 1]),
        ("SRBE", [1, 2]),
        ("RRE", []),
    ],
)
def test_growth_loses_and_repeats_no_report(turns, grown_at):
    grown = []
    handled = []
    controller = SimpleNamespace(grow=lambda: grown.append(len(handled)))
    run = _Run(controller, Plan(), None, Call())
    for turn in turns:
        _grow(run, TURNS[turn])
        handled.append(turn)
    assert grown == grown_at
