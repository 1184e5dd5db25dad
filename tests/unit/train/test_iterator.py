"""What `run_iterator` returns, over an executor that only says what workers would."""

import pytest

from raysgd.train.iterator import TrainingIterator


class Executor:
    """Has reports, and what the function returned; raises what is among them."""

    def __init__(self, *reports, final=("done",)):
        self._reports = list(reports)
        self._final = final
        self.finished = 0
        self.aborted = 0

    def abort(self):
        self.aborted += 1

    def fetch_next_result(self):
        return self._given(self._reports.pop(0) if self._reports else None)

    def finish_training(self):
        self.finished += 1
        self._reports.clear()
        return self._given(self._final)

    def _given(self, value):
        if isinstance(value, BaseException):
            raise value
        return value


def test_reports_come_one_after_the_other_and_then_what_was_returned():
    executor = Executor([{"n": 0}], [{"n": 1}], final=[7])
    iterator = TrainingIterator(executor)
    found = []
    for reports in iterator:
        assert not iterator.is_finished()
        assert iterator.get_final_results() is None
        found.append(reports)
    assert found == [[{"n": 0}], [{"n": 1}]]
    assert iterator.is_finished()
    assert iterator.get_final_results() == [7]
    assert list(iterator) == []
    assert executor.finished == 1


def test_a_run_can_be_finished_before_its_reports_are_read():
    executor = Executor([{"n": 0}], [{"n": 1}], final=[7])
    iterator = TrainingIterator(executor)
    next(iterator)
    assert iterator.get_final_results(force=True) == [7]
    assert list(iterator) == []
    assert iterator.get_final_results(force=True) == [7]
    assert executor.finished == 1


def test_a_function_that_returns_nothing_is_finished_as_well():
    iterator = TrainingIterator(Executor(final=[]))
    assert list(iterator) == []
    assert iterator.is_finished()
    assert iterator.get_final_results() == []


@pytest.mark.parametrize("error", [ValueError("bad batch"), KeyboardInterrupt()])
def test_what_a_function_raised_ends_the_run(error):
    executor = Executor([{"n": 0}], error, [{"n": 1}])
    iterator = TrainingIterator(executor)
    next(iterator)
    with pytest.raises(type(error)):
        next(iterator)
    assert iterator.is_finished()
    assert list(iterator) == []
    assert iterator.get_final_results(force=True) is None
    assert executor.finished == 0


def test_what_is_raised_in_the_end_ends_it_too():
    iterator = TrainingIterator(Executor([{"n": 0}], final=ValueError("at the end")))
    next(iterator)
    with pytest.raises(ValueError, match="at the end"):
        next(iterator)
    assert iterator.is_finished()


def test_a_function_that_raised_stop_iteration_does_not_look_finished():
    iterator = TrainingIterator(Executor([{"n": 0}], StopIteration(), [{"n": 1}]))
    with pytest.raises(RuntimeError, match="raised StopIteration") as raised:
        list(iterator)
    assert isinstance(raised.value.__cause__, StopIteration)
    assert iterator.is_finished()


def test_a_run_that_nobody_goes_through_any_more_can_be_ended():
    executor = Executor([{"n": 0}], [{"n": 1}])
    iterator = TrainingIterator(executor)
    next(iterator)
    assert iterator.abandon()
    assert executor.aborted == 1
    assert iterator.is_finished()
    with pytest.raises(RuntimeError, match=r"get_final_results\(force=True\)"):
        next(iterator)


def test_a_finished_run_has_nothing_to_be_ended():
    executor = Executor()
    iterator = TrainingIterator(executor)
    assert list(iterator) == []
    assert iterator.abandon()
    assert executor.aborted == 0
    assert list(iterator) == []
