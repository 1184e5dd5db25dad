"""A run on the driver, with a fake controller."""

from types import SimpleNamespace

import pytest

from raysgd.elastic.call import Call
from raysgd.train.datasets import Datasets
from raysgd.train.function_run import FunctionRun
from raysgd.train.report_queue import Turn
from raysgd.train.run_checkpoints import RunCheckpoints
from raysgd.train.session import Plan


def run_of(*turns):
    """Return a run whose workers answer every request with these turns."""
    controller = SimpleNamespace(
        run=lambda call: [SimpleNamespace(value=lambda turn=turn: turn) for turn in turns]
    )
    return FunctionRun(controller, Plan("one", b""), RunCheckpoints(), Datasets(None), Call())


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (Turn("report", has_checkpoint=True), "Worker 1 reported a checkpoint, but worker 0 did"),
        (Turn("end"), "out of step: worker 0 reported; worker 1 returned from the function"),
    ],
)
def test_workers_whose_turns_do_not_fit_are_named(other, match):
    with pytest.raises(RuntimeError, match=match):
        run_of(Turn("report"), other).next_result(dict)
