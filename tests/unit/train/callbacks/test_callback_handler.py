"""Callbacks are told about a run, its end included."""

from pathlib import Path

import pytest

from raysgd.train.callbacks import TrainingCallback
from raysgd.train.callbacks.callback_handler import CallbackHandler
from raysgd.train.constants import PYTORCH_PROFILER_KEY


class Told(TrainingCallback):
    def __init__(self, fails=False):
        self.error, self.fails = None, fails

    def finish_training(self, error=False, **info):
        self.error = error
        if self.fails:
            raise KeyError("disk full")


def test_all_are_told_the_truth_about_the_end():
    good, bad, last = Told(), Told(fails=True), Told()
    callback_handler = CallbackHandler([good, bad, last])
    with pytest.raises(KeyError, match="disk full"), callback_handler.run(Path(), {}):
        pass
    assert [c.error for c in (good, bad, last)] == [False, False, False]
    with pytest.raises(ValueError, match="first"), callback_handler.run(Path(), {}):
        raise ValueError("what went wrong first")
    assert [c.error for c in (good, bad, last)] == [True, True, True]


def test_each_gets_results_of_its_own():
    class Changes(TrainingCallback):
        def handle_result(self, results, **info):
            results[0]["a"] += 1
            assert results == [{"a": 2}]

    CallbackHandler([Changes(), Changes()]).handle([{"a": 1}])


def test_they_are_told_where_the_run_is_and_what_the_function_is_given(tmp_path):
    class Begins(TrainingCallback):
        def start_training(self, logdir, config, **info):
            self.told = logdir, config

    callback = Begins()
    with CallbackHandler([callback]).run(tmp_path, {"lr": 1}):
        assert callback.told == (str(tmp_path), {"lr": 1})


def test_one_that_cannot_begin_is_ended_with_those_before_it():
    class Fails(Told):
        def start_training(self, logdir, config, **info):
            raise OSError("disk full")

    first, fails, never = Told(), Fails(), Told()
    with (
        pytest.raises(OSError, match="disk full"),
        CallbackHandler([first, fails, never]).run(Path(), {}),
    ):
        pytest.fail("the run must not begin")
    assert [c.error for c in (first, fails, never)] == [True, True, None]


def test_of_several_that_fail_in_the_end_the_first_is_raised_and_the_others_are_logged(caplog):
    class Fails(TrainingCallback):
        def finish_training(self, error=False, **info):
            raise KeyError(type(self).__name__)

    callback_handler = CallbackHandler([Told(fails=True), Fails()])
    with pytest.raises(KeyError, match="disk full"), callback_handler.run(Path(), {}):
        pass
    assert [record.getMessage() for record in caplog.records] == ["Fails failed as it ended."]


def test_one_that_is_no_relative_of_ours_is_told_the_same(tmp_path):
    class Seen:
        told = ()

        def start_training(self, logdir, config, **info):
            self.told += ((logdir, config),)

        def handle_result(self, results, **info):
            self.told += (results,)

        def finish_training(self, error=False, **info):
            self.told += (error,)

    class Processes(Seen):
        process_results = Seen.handle_result

    seen, processes = Seen(), Processes()
    callback_handler = CallbackHandler([seen, processes])
    with callback_handler.run(tmp_path, {"lr": 1}):
        callback_handler.handle([{"a": 1, PYTORCH_PROFILER_KEY: []}])
    assert seen.told == ((str(tmp_path), {"lr": 1}), [{"a": 1}], False)
    assert processes.told[1] == [{"a": 1, PYTORCH_PROFILER_KEY: []}]


@pytest.mark.parametrize("keys", [(), {PYTORCH_PROFILER_KEY}])
def test_a_callback_gets_the_reserved_metrics_that_it_names(keys):
    class Seen(TrainingCallback):
        RESERVED_KEYS = keys

        def handle_result(self, results, **info):
            self.results = results

    seen = Seen()
    CallbackHandler([seen]).handle([{"a": 1, PYTORCH_PROFILER_KEY: []}])
    assert seen.results == [{"a": 1, **{key: [] for key in keys}}]


def test_what_is_no_callback_is_refused():
    with pytest.raises(TypeError, match="or have its start_training, finish_training, and"):
        CallbackHandler([object()])
    with pytest.raises(TypeError, match=r"callbacks=\[<class.*Told.*>\]: each must be a Training"):
        CallbackHandler([Told(), Told])


@pytest.mark.parametrize("run_fails", [False, True])
def test_ctrl_c_in_the_end_of_one_reaches_the_caller_when_all_have_ended(run_fails):
    class Interrupted(Told):
        def finish_training(self, error=False, **info):
            super().finish_training(error)
            raise KeyboardInterrupt

    def run():
        with CallbackHandler(told).run(Path(), {}):
            if run_fails:
                raise ValueError("bad batch")

    told = [Told(), Interrupted(), Told()]
    with pytest.raises(KeyboardInterrupt):
        run()
    assert [callback.error for callback in told] == [run_fails] * 3
