"""The iterator over the reports of a run, with a fake executor."""

import pytest

from raysgd.train.trainer import TrainingIterator


class Executor:
    """Returns the given reports and results. Raises those that are exceptions."""

    checkpoints = None

    def __init__(self, *reports, final=("done",)):
        self._reports = list(reports)
        self._final = final

    def fetch_next_result(self):
        return self._given(self._reports.pop(0) if self._reports else None)

    def finish_training(self):
        self._reports.clear()
        return self._given(self._final)

    def _given(self, value):
        if isinstance(value, BaseException):
            raise value
        return value


@pytest.mark.parametrize("error", [ValueError("bad batch"), KeyboardInterrupt()])
@pytest.mark.parametrize("at_end", [False, True])
def test_an_error_ends_the_run(error, at_end):
    reports = [[{"n": 0}]] if at_end else [[{"n": 0}], error, [{"n": 1}]]
    iterator = TrainingIterator(Executor(*reports, final=error))
    next(iterator)
    with pytest.raises(type(error)):
        next(iterator)
    assert iterator.is_finished()
    assert list(iterator) == []
    assert iterator.get_final_results(force=True) is None


def test_a_function_that_raises_stop_iteration_does_not_look_finished():
    iterator = TrainingIterator(Executor([{"n": 0}], StopIteration(), [{"n": 1}]))
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(iterator)


def test_an_iterator_that_another_run_has_ended_raises_an_error():
    executor = Executor([{"n": 0}], [{"n": 1}])
    iterator = TrainingIterator(executor)
    next(iterator)
    executor.checkpoints = "of another run"
    assert iterator.is_finished()
    with pytest.raises(RuntimeError, match=r"get_final_results\(force=True\)"):
        next(iterator)
