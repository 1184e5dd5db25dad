"""Validation of checkpoints in tasks."""

import threading

import cloudpickle
import pytest

from raysgd.cluster import function_calls as tasks
from raysgd.train import (
    CheckpointStrategy,
    ReportedCheckpointStatus,
    ValidationConfig,
    ValidationTaskConfig,
    validation,
)
from raysgd.train.report_queue import Turn
from raysgd.train.run_checkpoints import RunCheckpoints


def measured(checkpoint, scale=1, plus=0, fails=()):
    loss = checkpoint.to_dict()["loss"]
    if loss in fails:
        raise ArithmeticError(f"loss {loss}")
    return {"val_loss": scale * loss + plus, "text": "is no number"}


def blob(loss):
    return cloudpickle.dumps({"loss": loss})


@pytest.mark.parametrize("timeout_s", [None, 60])
def test_a_task_calls_the_function_with_the_checkpoint_and_keywords(timeout_s):
    found = validation._validate(measured, blob(2.0), {"scale": 3}, timeout_s)
    assert found["val_loss"] == 6.0
    with pytest.raises(ArithmeticError, match="loss 2"):
        validation._validate(measured, blob(2.0), {"fails": [2.0]}, timeout_s)
    with pytest.raises(TypeError, match="must return a dict of metrics, not 5"):
        validation._validate(lambda checkpoint: 5, blob(2.0), {}, timeout_s)


def test_a_task_has_no_result_after_its_timeout():
    ended = threading.Event()
    assert validation._validate(lambda checkpoint: ended.wait(), blob(1.0), {}, 0.01) is None
    ended.set()


@pytest.fixture
def started(monkeypatch):
    """Replace tasks; return a function that runs those that were started."""
    begun, done = {}, {}

    def start(function, arguments, options):
        reference = object()
        begun[reference] = function, arguments
        assert options == {"num_cpus": 2}
        return reference

    def end():
        for reference, (function, arguments) in begun.items():
            try:
                done[reference] = function(*arguments)
            except Exception as error:
                done[reference] = error

    def finished(references, timeout_s):
        if timeout_s is None:
            end()
        return {each: done[each] for each in references if each in done}

    monkeypatch.setattr(tasks, "start_task", start)
    monkeypatch.setattr(tasks, "finished", finished)
    return end


def test_the_best_checkpoint_by_its_validation_stays(tmp_path, started, caplog):
    strategy = CheckpointStrategy(1, "val_loss", "min")
    config = ValidationConfig(
        measured,
        ValidationTaskConfig({"plus": 1, "fails": [3.0]}),
        ray_remote_kwargs={"num_cpus": 2},
    )
    checkpoints = RunCheckpoints(tmp_path, strategy, validation=config)
    for number, loss in enumerate((2.0, 0.5, 1.0, 3.0), 1):
        requested = ValidationTaskConfig({"scale": 5}) if number == 2 else True
        turn = Turn("report", numbers={"n": number}, validation=requested)
        checkpoints.keep(turn, blob(loss), world_size=2)
    seen_on_a_worker = checkpoints.reported()
    statuses = [each.status for each in seen_on_a_worker]
    assert statuses == [ReportedCheckpointStatus.PENDING_VALIDATION] * 4
    started()
    found = [each.as_checkpoint() for each in seen_on_a_worker]
    assert [each.metrics.get("val_loss") for each in found] == [3.0, 3.5, 2.0, None]
    assert found[0].metrics == {"n": 1, "val_loss": 3.0}
    assert found[3].status is ReportedCheckpointStatus.VALIDATION_FAILED
    checkpoints.await_validations()
    (best,) = checkpoints.best_checkpoints()
    assert best[1] == {"n": 3, "val_loss": 2.0}
    assert "The validation of checkpoint_000004 failed: loss 3.0" in caplog.text
    checkpoints.keep(Turn("report"), blob(1.0), world_size=2)
    assert "checkpoint_score_attribute='val_loss'" in caplog.text


def test_a_timeout_must_be_positive():
    with pytest.raises(ValueError, match="must be a positive number of seconds"):
        ValidationTaskConfig(timeout_s=0)
