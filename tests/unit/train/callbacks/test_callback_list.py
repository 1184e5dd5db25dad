"""Callbacks see the start, the reports, and the end of a run."""

from pathlib import Path

import pytest

from raysgd.train.callbacks import TrainingCallback
from raysgd.train.callbacks.callback import TrainingCallbackList
from raysgd.train.constants import PYTORCH_PROFILER_KEY


class Recorder(TrainingCallback):
    """Records its calls, and raises errors on request."""

    def __init__(self, start_error=None, finish_error=None, reserved=()):
        self.start_error, self.finish_error = start_error, finish_error
        self.RESERVED_KEYS = reserved
        self.started = self.results = self.failed = None

    def start_training(self, logdir, config=None, **info):
        self.started = logdir, config
        if self.start_error is not None:
            raise self.start_error

    def handle_result(self, results, **info):
        self.results = results

    def finish_training(self, error=False, **info):
        self.failed = error
        if self.finish_error is not None:
            raise self.finish_error


@pytest.mark.parametrize("error", [ValueError("bad batch"), KeyboardInterrupt()])
def test_all_callbacks_finish_a_failed_run_and_its_error_is_raised(error, caplog):
    callbacks = [Recorder(), Recorder(finish_error=KeyError("disk full")), Recorder()]
    with pytest.raises(type(error)), TrainingCallbackList(callbacks).run(Path(), {}):
        raise error
    assert [callback.failed for callback in callbacks] == [True, True, True]
    assert caplog.messages == ["Recorder.finish_training failed."]


@pytest.mark.parametrize("error", [KeyError("disk full"), KeyboardInterrupt()])
@pytest.mark.parametrize(
    ("when", "failed"),
    [("finish_error", [True, False, False]), ("start_error", [True, True, None])],
)
def test_an_error_of_a_callback_fails_the_run_and_finishes_all_that_began(error, when, failed):
    callbacks = [Recorder(), Recorder(**{when: error}), Recorder()]
    with pytest.raises(type(error)), TrainingCallbackList(callbacks).run(Path(), {}):
        assert when == "finish_error"
    assert [callback.failed for callback in callbacks] == failed


def test_each_callback_gets_its_own_copy_of_the_results():
    class Changes(Recorder):
        def process_results(self, results, **info):
            results[0]["a"] += 1
            super().process_results(results)

    callbacks, results = [Changes(), Changes()], [{"a": 1}]
    TrainingCallbackList(callbacks).handle(results)
    assert [callback.results for callback in callbacks] == [[{"a": 2}], [{"a": 2}]]
    assert results == [{"a": 1}]


@pytest.mark.parametrize("keys", [(), {PYTORCH_PROFILER_KEY}])
def test_a_callback_gets_the_reserved_metrics_that_it_names(keys):
    callback = Recorder(reserved=keys)
    TrainingCallbackList([callback]).handle([{"a": 1, PYTORCH_PROFILER_KEY: []}])
    assert callback.results == [{"a": 1, **{key: [] for key in keys}}]


@pytest.mark.parametrize("callbacks", [[object()], [Recorder(), Recorder], Recorder()])
def test_anything_but_a_list_of_callbacks_is_refused(callbacks):
    with pytest.raises(TypeError, match=r"must be a list.*TuneReportCallback, write"):
        TrainingCallbackList(callbacks)


class Oldest(TrainingCallback):
    def start_training(self, logdir):
        self.logdir = logdir


class Newer(TrainingCallback):
    def start_training(self, logdir, config, **info):
        self.config = config


def test_callbacks_without_an_argument_config_start():
    callbacks = [Oldest(), Newer()]
    with TrainingCallbackList(callbacks).run(Path("run"), {"lr": 1}):
        pass
    assert (callbacks[0].logdir, callbacks[1].config) == ("run", {"lr": 1})
