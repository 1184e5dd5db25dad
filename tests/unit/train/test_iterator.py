"""The iterator over the reports of a run, with a fake executor."""

from unittest.mock import MagicMock

import pytest

from raysgd.train.trainer import TrainingIterator


def executor_of(*reports, final=("done",)):
    """Return an executor with the given reports and results. It raises those that are errors."""
    given = {"fetch_next_result": [*reports, None], "finish_training": [final]}
    return MagicMock(**{f"{name}.side_effect": values for name, values in given.items()})


@pytest.mark.parametrize("error", [ValueError("bad batch"), KeyboardInterrupt()])
@pytest.mark.parametrize("at_end", [False, True])
def test_an_error_ends_the_run(error, at_end):
    reports = [[{"n": 0}]] if at_end else [[{"n": 0}], error, [{"n": 1}]]
    iterator = TrainingIterator(executor_of(*reports, final=error))
    next(iterator)
    with pytest.raises(type(error)):
        next(iterator)
    assert iterator.is_finished()
    assert list(iterator) == []
    assert iterator.get_final_results(force=True) is None


def test_a_function_that_raises_stop_iteration_does_not_look_finished():
    iterator = TrainingIterator(executor_of([{"n": 0}], StopIteration(), [{"n": 1}]))
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(iterator)


def test_an_iterator_that_another_run_has_ended_raises_an_error():
    executor = executor_of([{"n": 0}], [{"n": 1}])
    iterator = TrainingIterator(executor)
    next(iterator)
    executor.checkpoints = "of another run"
    assert iterator.is_finished()
    with pytest.raises(RuntimeError, match=r"get_final_results\(force=True\)"):
        next(iterator)
