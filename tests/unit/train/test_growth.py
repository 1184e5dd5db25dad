"""When the group of a training function grows."""

from types import SimpleNamespace

import pytest

from raysgd.elastic.call import Call
from raysgd.train.backend import BackendConfig
from raysgd.train.datasets import Datasets
from raysgd.train.executor import BackendExecutor, _Run
from raysgd.train.result_queue import GrowthPolicy, TrainingResult
from raysgd.train.worker_session import RunSpec

TURNS = {
    "S": TrainingResult("checkpoint", checkpoint=b"", has_checkpoint=True),
    "R": TrainingResult("report", iteration=1),
    "B": TrainingResult("report", has_checkpoint=True),
    "N": TrainingResult("checkpoint", has_checkpoint=True, nonfinite_array="weight"),
    "E": TrainingResult("end"),
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
        ("RNSE", [2]),
        ("S|RSRE", [4]),  # after a restart, the order is the same
    ],
)
def test_growth_loses_and_repeats_no_report(turns, grown_at):
    policy, grown = GrowthPolicy(), []
    for number, turn in enumerate(turns):
        if turn == "|":
            policy.forget_checkpoint()
        elif policy.may_grow_after(TURNS[turn]):
            grown.append(number)
    assert grown == grown_at


def test_after_a_loss_between_a_checkpoint_and_its_report_growth_waits_for_the_next_report():
    executor = BackendExecutor(BackendConfig())
    turns, iterations = iter("SSNRE"), []

    def run(call):
        if (turn := next(turns)) == "S":
            executor._prepare_workers()  # a loss before each checkpoint restarts the workers
        return [TURNS[turn]]

    controller = executor._workers = executor._controller = SimpleNamespace(
        check_process=lambda: None,
        restart_with_more_workers=lambda: iterations.append(executor.checkpoints.iteration),
        members=[],
        run=run,
    )
    executor._run = _Run(controller, RunSpec(), executor.checkpoints, Datasets(None), Call())
    executor.finish_training()
    assert iterations == [1]  # the report counts
