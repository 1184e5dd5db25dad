"""The hooks of features: which a call, a step, and a failure run, and in which order."""

import contextlib
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from raysgd.loop.feature import UpdateFeature
from raysgd.loop.requests import CallbackPause, TrainRequest
from raysgd.loop.update import Update
from tests.unit.recorder import Recorder, Streaming, failure


class Spy(UpdateFeature):
    def __init__(self):
        self.called = []

    def evaluating(self):
        @contextlib.contextmanager
        def recorded():
            self.called.append("evaluating")
            yield
            self.called.append("evaluated")

        return recorded()


def recorded(name):
    def hook(self, *arguments, **named):
        shown = [each for each in (*arguments, *named.values()) if isinstance(each, int)]
        if arguments and isinstance(arguments[0], Update):
            update = arguments[0]
            shown = [update.micro_batch_index] if update.is_open else ["closed"]
        self.called.append(" ".join(map(str, [name, *shown])))

    return hook


HOOKS = """
    begin_call begin_update begin_micro_batch before_optimizer_step before_commit commit roll_back
    end_epoch check_parameters end_call sync_buffers
"""
for name in HOOKS.split():
    setattr(Spy, name, recorded(name))

STEP = [
    "begin_update 0",
    "begin_micro_batch 0",
    "before_optimizer_step 0",
    "before_commit 0",
    "commit closed",
]
CALL = ["check_parameters", "begin_call False"]
END = ["check_parameters", "end_call"]


@pytest.fixture
def spied(make_trainer):
    """Return a function that returns a new trainer, and the list of hooks that were called."""

    def spied(operator_cls=Recorder, config=None):
        trainer = make_trainer(operator_cls, config)
        spy = Spy()
        train_state = trainer.get_local_operator()._train_state
        train_state.set_features([*train_state.features, spy])
        return trainer, spy.called

    return spied


def test_hooks_of_an_epoch(spied):
    trainer, called = spied(config={"num_samples": 16})
    epochs = ([*STEP, *STEP, "end_epoch 1"], STEP, [*STEP, "end_epoch 2"])
    for num_steps, steps in zip((None, 1, 1), epochs, strict=True):
        trainer.train(num_steps=num_steps)
        assert called == [*CALL, *steps, *END]
        called.clear()


def test_hooks_of_an_evaluation(spied, monkeypatch):
    trainer, called = spied()
    compare = "raysgd.data.source.BatchSource.compares_samples"
    monkeypatch.setattr(compare, property(lambda _: called.append("compare")))
    trainer.validate()
    assert called == ["evaluating", "evaluated", "compare"]
    trainer.predict(trainer.get_local_operator().validation_loader.loader)
    assert called == ["evaluating", "evaluated", "compare"] * 2


@pytest.mark.parametrize("operator_cls", [Recorder, Streaming])
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_a_failed_step(spied, operator_cls, when):
    """An error after the update does not undo the step."""
    trainer, called = spied(operator_cls)
    with failure(trainer.get_local_operator(), when=when):
        trainer.train()
    end = [*STEP[:2], "roll_back 0"] if when == "before" else [*STEP, "roll_back closed"]
    assert called == [*CALL, *end]
    assert trainer.state_dict()["global_step"] == (when == "after")


def test_call_fails_before_its_first_step_if_a_feature_refuses(spied):
    trainer, called = spied()
    spy = trainer.get_local_operator()._train_state.features[-1]

    def refuse():
        raise ValueError("refused")

    spy.check_parameters = refuse
    with pytest.raises(ValueError, match="refused"):
        trainer.train()
    assert not any(name.startswith("begin") for name in called)
    assert trainer.get_local_operator().trained == []


def test_step_that_a_feature_refuses_does_not_count(spied):
    trainer, called = spied()
    operator = trainer.get_local_operator()
    state, asked = operator._train_state, []

    def refuse(update):
        if operator.trained[8:]:
            asked.append(update)
            if len(asked) == 1:  # it could have forgotten the reason afterwards
                raise ValueError("refused")

    state.features_by_hook["before_commit"].append(SimpleNamespace(before_commit=refuse))
    with pytest.raises(ValueError, match="refused"):
        trainer.train()
    assert state.position.global_step == len(asked) == 1
    ends = ["commit closed", "roll_back 0"]
    assert [name for name in called if name in ends] == ends
    assert not state.update.is_open


@pytest.mark.parametrize("operator_cls", [Recorder, Streaming])
def test_step_that_a_feature_refuses_after_an_error_does_not_count(spied, operator_cls):
    trainer, called = spied(operator_cls, {"num_samples": 24})
    operator, refused = trainer.get_local_operator(), []
    state = operator._train_state
    state.update.optimizer_steps.max_counts[id(operator.optimizer)] = 2  # to undo the step

    def refuse(update):
        refused.append(update)
        raise ValueError("refused")

    def fail(batch_info, when):
        if when == "after" and not refused:
            operator.optimizer.step()
            state.features_by_hook["before_commit"].append(SimpleNamespace(before_commit=refuse))
            raise ValueError("bad batch")

    operator.fail = fail
    with pytest.raises(ValueError, match="bad batch"):
        trainer.train()
    assert (refused != [], called[-1]) == (True, "roll_back 0")
    assert (state.position.global_step, state.update.is_open, operator.trained) == (0, False, [])
    state.features_by_hook["before_commit"].pop()
    trainer.train()
    assert operator.trained == list(range(24))


class Hesitant(Recorder):
    """Makes no update in the second step until that step is repeated."""

    def optimizer_step(self, optimizer):
        self.requests = [*getattr(self, "requests", []), self.global_step]
        return self.requests.count(1) not in (1, 2) and super().optimizer_step(optimizer)


def test_metrics_of_a_refused_step_count_once(spied):
    trainer, _ = spied(Hesitant, {"num_samples": 24})
    operator = trainer.get_local_operator()
    operator._train_state.micro_batching.increase_num_splits(2)
    result = trainer.train()
    assert operator.requests.count(1) == 3, "two parts, then the whole batch"
    assert (result["num_samples"], result["batch_count"]) == (24, 3)


class Passes(Recorder):
    """Trains an epoch in two calls of the default loop. Validates within its last step."""

    def train_epoch(self, iterator, info):
        def rest():
            yield from itertools.islice(iterator, 2)
            self.validate(self.validation_loader)

        parts = (itertools.islice(iterator, 3), rest())
        self.passes = [super(Passes, self).train_epoch(part, info) for part in parts]
        return {}


@pytest.mark.parametrize("accumulation_steps", [1, 2, 4])
def test_calls_of_the_default_loop_share_a_segment(make_trainer, accumulation_steps):
    trainer = make_trainer(Passes)
    operator = trainer.get_local_operator()
    operator._train_state.accumulation_steps = accumulation_steps
    trainer.train()
    counts = [(each["batch_count"], each["num_samples"]) for each in operator.passes]
    assert counts == [(3, 24), (2, 16)]  # the first also of the step that is still open
    assert trainer.global_step == 5


# ---- metrics of a call that has not ended


def test_metrics_of_a_call_so_far(make_trainer):
    trainer = make_trainer(Recorder)
    loop = trainer._controller.members[0].worker.runner._loop
    assert loop.leaving_metrics(0) is None
    request = TrainRequest(call_number=0, until_step=6, log_every=4)
    assert isinstance(loop.train(replace(request, callback_pause_step=5)), CallbackPause)
    assert (loop.leaving_metrics(1), len(loop.recorder.unacknowledged_log_points(-1))) == (None, 1)
    # all workers have these, so a leaving worker omits them
    loop.train_state.call.merged_metrics = [(5, loop.recorder.own_metrics[0][1])]
    whole = loop.leaving_metrics(0)
    assert (whole["num_samples"], "lr" in whole) == (40, False)
    point, rest = loop.recorder.unacknowledged_log_points(-1)
    assert (point.global_step, rest.global_step) == (4, 5)
    assert (point.reaches_log_step, rest.reaches_log_step) == (True, False)
    assert (point.metrics["num_samples"], rest.metrics["num_samples"]) == (32, 8)
    assert ("grad_norm" in point.metrics, point.metrics["lr"]) == (True, 0.01)
    assert loop.train(request)["num_samples"] == 48 + 32


@pytest.mark.parametrize(
    ("restart", "points"), [(0, [3, 3, 3]), (2, [1, 3, 3]), (4, [2, 3]), (6, [3])]
)
def test_a_restart_yields_the_points_of_its_steps_again(make_trainer, restart, points):
    """Their numbers are the same, also after a restart at the first step of the call."""
    request = TrainRequest(call_number=0, until_step=10, log_every=3)
    first, second = (
        make_trainer(Recorder, {"num_samples": 100})._controller.members[0].worker.runner
        for _ in range(2)
    )
    first.handle(replace(request, callback_pause_step=restart))
    second.load_state_dict(first.restart_state())
    assert second.handle(request)["batch_count"] == 10 - restart
    found = second.status().measured.log_points
    assert [point.global_step for point in found] == [3, 6, 9][-len(points) :]
    assert [point.metrics["batch_count"] for point in found] == points
    assert [point.global_step for point in second.status(6).measured.log_points] == [9]
    second.handle(TrainRequest(call_number=1, until_step=11))
    assert second.status().measured.log_points == ()
