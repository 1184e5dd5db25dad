"""A run on the driver, with a fake controller."""

from types import SimpleNamespace

import cloudpickle
import pytest

from raysgd.elastic.call import Call
from raysgd.train.datasets import Datasets
from raysgd.train.function_run import FunctionRun
from raysgd.train.report_queue import Turn
from raysgd.train.run_checkpoints import RunCheckpoints
from raysgd.train.session import Plan


class Controller:
    """Answers each request with the next turns of all workers."""

    def __init__(self, *rounds):
        self.rounds = list(rounds)
        self.requests, self.states = [], []
        self.snapshots = SimpleNamespace(keep=self.states.append)

    def run(self, call):
        self.requests.append(call.request)
        return [SimpleNamespace(value=lambda turn=turn: turn) for turn in self.rounds.pop(0)]

    def grow(self):
        return False


def run_on(controller, folder=None):
    plan, checkpoints = Plan("one", b""), RunCheckpoints(folder)
    return FunctionRun(controller, plan, checkpoints, Datasets(None), Call())


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (Turn("report", has_checkpoint=True), "Worker 1 reported a checkpoint, but worker 0 did"),
        (Turn("end"), "out of step: worker 0 reported; worker 1 returned from the function"),
    ],
)
def test_workers_whose_turns_do_not_fit_are_named(other, match):
    with pytest.raises(RuntimeError, match=match):
        run_on(Controller([Turn("report"), other])).next_result(dict)


def test_a_restart_begins_from_the_kept_checkpoint(tmp_path):
    blob = cloudpickle.dumps({"epoch": 1})
    saved = Turn("checkpoint", None, blob, True, {"_timestamp": 1}, iteration=3)
    controller = Controller([saved], [Turn("checkpoint")], [Turn("end")])
    assert run_on(controller, tmp_path).next_result(dict) is None
    (plan,) = [read()["plan"] for read in controller.states]
    assert (plan.checkpoint, plan.iteration) == (blob, 3)


def test_an_aborted_run_is_stopped_on_its_workers():
    controller = Controller()
    controller.stop = controller.requests.append
    run_on(controller).abort()
    assert [request.name for request in controller.requests] == ["end_run"]
