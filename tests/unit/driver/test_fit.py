"""``trainer.fit()``."""

import html
import json
import logging
import math
import queue
import random
import re
import signal
import threading
from collections import ChainMap, UserDict

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd.callbacks import Callback, CheckpointCallback, EarlyStopping, History, TensorBoardLogger
from raysgd.errors import CallbackError
from raysgd.metrics import AverageMeter, Sums
from tests.operators import parameters
from tests.unit.callbacks.spy import Scripted, Spy
from tests.unit.recorder import Recorder, failure, idle


class Stopping(Callback):
    """Asks to stop at the end of an epoch."""

    def __init__(self, epoch):
        self._epoch = epoch

    def on_epoch_end(self, trainer, metrics):
        if metrics["epoch"] == self._epoch:
            trainer.request_stop("enough")
            trainer.request_stop("a second reason")


class TrainOnly(Recorder):
    def make_loaders(self, config):
        loaders = super().make_loaders(config)
        del loaders["validation_loader"]
        return loaders


def test_history_is_a_short_table():
    rows = [{"epoch": n, "num_samples": 9, "train_loss": 1 / n} for n in range(1, 101)]
    history = History({**row, "last_train_loss": 0, "val": {"acc": 0.5}} for row in rows)
    history.stop_reason = "num_epochs=100 is reached"
    lines = repr(history).splitlines()
    assert lines[0].split() == ["epoch", "train_loss", "val/acc"]
    assert lines[3].split() == ["3", "0.3333", "0.5"]
    assert (len(lines), lines[6].split(), lines[-1]) == (13, ["…"] * 3, history.stop_reason)
    assert repr(History([{"epoch": 1}, {"train_loss": 2.0}])).splitlines()[1:] == [
        "    1            ",
        "    2           2",
    ]
    assert repr(History()) == "epoch"


def test_fit_trains_validates_and_returns_the_metrics(make_trainer):
    trainer = make_trainer(callbacks=[spy := Spy()])
    history = trainer.fit(2)
    assert isinstance(history, History)
    assert [entry["epoch"] for entry in history] == [1, 2]
    assert {"train_loss", "val_loss", "val_accuracy"} <= set(history[0])
    assert history[1]["val_loss"] == trainer.latest_metrics["val_loss"]
    assert history.stop_reason.startswith("num_epochs=")
    assert [call[1:] for call in spy.calls] == [
        ("on_train_start", 0),
        ("on_event", "started"),
        ("on_epoch_end", 1),
        ("on_validation_end", 40),
        ("on_epoch_end", 2),
        ("on_validation_end", 40),
        ("on_train_end", 2),
    ]


@pytest.mark.parametrize("name", ["val_los", "val.loss", "eval_loss"])
def test_a_metric_that_validation_lacks_is_an_error_before_any_training(make_trainer, name):
    trainer = make_trainer()
    with pytest.raises(ValueError, match=rf"'{name}'\): there is no such metric.*val_loss"):
        trainer.fit(2, callbacks=[EarlyStopping(monitor=name)])
    assert trainer.global_step == 0
    trainer.fit(1, callbacks=[EarlyStopping(monitor="val_loss")])
    trainer.fit(2, callbacks=[Scripted([1.0, 1.0], "val_added"), EarlyStopping("val_added")])
    make_trainer(Logging).fit(1, callbacks=[EarlyStopping("value")])


class Measuring(Recorder):
    def validate_batch(self, batch, batch_info):
        measured = super().validate_batch(batch, batch_info)
        return {**measured, "val_odd": Sums(self.config["function"], total=1.0)}


def test_a_validation_is_tried_before_the_first_training(make_trainer, monkeypatch):
    trainer = make_trainer(Measuring, {"function": lambda sum: sum})
    with failure(trainer.get_local_operator(), when="validate") as caught:
        trainer.fit(2)
    assert any("before any training" in n for n in caught.value.__notes__)
    with pytest.raises(TypeError, match="unexpected keyword argument 'total'") as caught:
        trainer.fit(2)
    assert caught.value.__notes__[0] == "The metric 'val_odd', a Sums, raised this error."
    assert trainer.global_step == 0
    trainer = make_trainer(Measuring, {"function": lambda total: math.exp(1000 * total)})
    with pytest.raises(OverflowError) as caught:
        trainer.fit(1)
    assert caught.value.__notes__[0] == "The metric 'val_odd', a Sums, raised this error."
    assert trainer.global_step == 5, "all data may suffice if a few batches do not"
    calls = []
    monkeypatch.setattr(Recorder, "validate", lambda *_: calls.append({}) or {})
    _ = (trainer := make_trainer(Recorder)).fit(1), trainer.fit(2)
    assert len(calls) == 3, "it is tried once, also if it has no metrics"


@pytest.mark.parametrize(
    ("operator_cls", "given", "why"),
    [
        (TrainOnly, {}, r" There is no validation loader\. Call self\.register_data"),
        (Recorder, {"validate_every": None}, "$"),
    ],
)
def test_a_metric_of_validation_is_an_error_if_fit_does_not_validate(
    make_trainer, operator_cls, given, why
):
    trainer = make_trainer(operator_cls)
    with pytest.raises(ValueError, match=rf"because fit.. does not validate\.{why}"):
        trainer.fit(2, callbacks=[EarlyStopping()], **given)
    assert trainer.global_step == 0


@pytest.mark.parametrize("kind", [CheckpointCallback, EarlyStopping])
def test_error_about_a_monitored_metric_names_a_similar_one(make_trainer, tmp_path, kind):
    with pytest.raises(CallbackError, match=kind.__name__) as caught:
        make_trainer(logdir=tmp_path).fit(1, callbacks=[kind(monitor="accuracy")])
    assert "val_accuracy" in str(caught.value.__cause__)


@pytest.mark.parametrize(("monitor", "every"), [("val_loss", 3), ("f1", None)])
def test_a_monitored_metric_is_warned_of_only_if_no_epoch_will_have_it(
    make_trainer, tmp_path, caplog, monitor, every
):
    saving = CheckpointCallback(tmp_path, monitor=monitor)
    make_trainer().fit(4, validate_every=every, callbacks=[saving])
    assert caplog.text.count("no such metric") == (every is None)


class Drawing(Recorder):
    """Draws random numbers in validation, and leaves the models in evaluation mode."""

    def validate_batch(self, batch, batch_info):
        self.count = getattr(self, "count", 0) + 1
        return {**super().validate_batch(batch, batch_info), "val_draw": torch.rand(1).item()}

    def train_mode(self, training):
        if not training or not self.infos:
            super().train_mode(training)


def test_the_validation_before_training_changes_nothing(make_trainer):
    runs = []
    for is_tried in (False, True):
        torch.manual_seed(1)
        trainer = make_trainer(Drawing, {"shuffle": True, "dropout": 0.5, "batch_norm": True})
        trainer._reporter.validation_names = None if is_tried else {"val_loss"}
        history = trainer.fit(2, callbacks=[spy := Spy()])
        operator = trainer.get_local_operator()
        kept = (operator.trained, operator.validated, operator.count, len(operator.infos))
        runs.append((history, spy.hooks, kept, parameters(operator).tolist()))
    assert runs[0] == runs[1]


class Total:
    """A total of user code, as in TorchMetrics."""

    def __init__(self):
        self.count, self.parts = 0, [[]]

    def add(self, number):
        self.count += number
        self.parts[0].append(number)


def make_generators():
    of_numpy = np.random.default_rng(1), np.random.RandomState(1)
    return [random.Random(1), torch.Generator().manual_seed(1), *of_numpy]


def draw(own, of_torch, of_numpy, older):
    spawned = of_numpy.spawn(1)[0].random() if np.__version__ >= "2" else 0.0
    numbers = torch.randint(2**31, (1,), generator=of_torch).item(), of_numpy.integers(2**31)
    return own.randrange(2**31), *numbers, spawned, older.randint(2**31)


class Slots:
    __slots__ = "count"

    def __init__(self):
        self.count = [0]


class MoreSlots(Slots):
    __slots__ = ("total",)

    def __init__(self):
        super().__init__()
        self.total = 0


class Metric(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, number):
        self.count += number


class Totals(Recorder):
    def setup(self, config):
        super().setup(config)
        self.tensor, self.array, self.meter = torch.zeros(()), np.zeros(1), AverageMeter()
        self.nested, self.total, self.metrics = {"a": [[], 0]}, Total(), {"b": (Metric(),)}
        self.frozen = torch.nn.Linear(1, 1).requires_grad_(False)
        self.kept = [torch.zeros(1).expand(3), np.broadcast_to(np.zeros(1), 3), queue.Queue()]
        self.kept += [torch.eye(2).to_sparse(), np.float64(1), threading.Lock(), torch.Tensor]
        self.slots, self.model[0].counts = MoreSlots(), [0]
        self.model.number = 0
        self.generators = make_generators()
        self.more = [UserDict(total=0), ChainMap({"total": 0})]
        self.seen = seen = []  # a closure writes to the same list
        self.model.register_forward_hook(lambda *_: seen.append(1))

    def validate_batch(self, batch, batch_info):
        number, before = len(batch[0]), len(self.seen)
        self.tensor += number
        self.array[0] += number
        self.meter.update(1.0, number)
        self.nested["a"][0].append(number)
        self.nested["a"][1] += number
        self.total.add(number)
        self.metrics["b"][0](number)
        draw(*self.generators)
        for each in self.more:
            each["total"] += number
        self.slots.total += number
        self.slots.count[0] += number
        self.model.number += number
        self.model[0].counts.append(number)
        result = super().validate_batch(batch, batch_info)
        assert len(self.seen) == before + 1
        return result


def test_the_validation_before_training_leaves_no_trace_in_totals(make_trainer):
    trainer = make_trainer(Totals)
    trainer.fit(1, verbose=False)
    operator = trainer.get_local_operator()
    (nested, added), parts = operator.nested["a"], operator.total.parts[0]
    found = [operator.tensor, operator.array[0], operator.meter.count, sum(nested), added]
    found += [operator.total.count, sum(parts), operator.metrics["b"][0].count]
    found += [operator.slots.total, operator.slots.count[0]]
    found += [operator.model.number, sum(operator.model[0].counts)]
    found += [each["total"] for each in operator.more]
    assert [int(each) for each in found] == [40] * 14
    fresh = make_generators()
    for _ in nested:
        draw(*fresh)
    assert draw(*operator.generators) == draw(*fresh)


class OwnLoop(Recorder):
    """A loop without ``train_mode``, in which one module stays in eval mode."""

    def setup(self, config):
        super().setup(config)
        self.model[2].eval()
        self.modes = []

    def train_epoch(self, iterator, info, **given):
        self.modes.append([module.training for module in self.model])
        self.model[1].eval()
        for batch in iterator:
            assert self.validate(iter([batch]))["batch_count"] == 1
            self.modes.append([module.training for module in self.model])
            self.train_batch(batch, {"batch_idx": 0, "global_step": 0})
        self.model[1].train()
        return {"num_samples": 1}


def test_evaluation_in_and_after_an_epoch_restores_the_modes_of_an_own_loop(make_trainer):
    trainer = make_trainer(OwnLoop)
    trainer.fit(2, verbose=False)
    trainer.predict(DataLoader(TensorDataset(torch.zeros(3, 1), torch.zeros(3, 1))))
    trainer.get_model()
    trainer.train()
    modes = [[True, True, False], *[[True, False, False]] * 5]
    assert trainer.get_local_operator().modes == modes * 3


def test_a_callback_may_ask_to_stop(make_trainer):
    trainer = make_trainer(callbacks=[Stopping(2)])
    history = trainer.fit(5)
    assert len(history) == 2
    assert "val_loss" in history[1], "the epoch is completed"
    assert history.stop_reason == trainer.stop_reason == "enough"
    assert (len(trainer.fit(4)), trainer.stop_reason) == (2, None)
    trainer = make_trainer(callbacks=[Stopping(1)])
    trainer.train()
    assert trainer.stop_reason == "enough"
    assert trainer.train()["epoch"] == 2, "train() does not stop"


def test_callbacks_of_fit_are_called_in_that_fit_only(make_trainer):
    calls = []
    always, own = Spy("always", calls), Spy("own", calls)
    trainer = make_trainer(callbacks=[always])
    trainer.train()
    trainer.fit(2, validate_every=None, callbacks=[own])
    trainer.train()
    assert calls == [
        ("always", "on_train_start", 0),
        ("always", "on_event", "started"),
        ("always", "on_epoch_end", 1),
        ("own", "on_train_start", 1),
        ("always", "on_epoch_end", 2),
        ("own", "on_epoch_end", 2),
        ("own", "on_train_end", 2),
        ("always", "on_epoch_end", 3),
    ]


@pytest.fixture(params=["a callback", "the last step", "the validation"])
def broken_off(request, make_trainer):
    """Return a trainer whose `fit` failed before the validation of epoch 2, and its spy."""
    trainer = make_trainer(Recorder, callbacks=[spy := Spy()])
    trainer.fit(1)
    if request.param == "a callback":
        spy.fail_in = ["on_epoch_end"]
        with pytest.raises(CallbackError):
            trainer.fit(3)
    elif request.param == "the last step":
        trainer.get_local_operator().fail = lambda info, when: (
            (info["global_step"], when) == (9, "before") and signal.raise_signal(signal.SIGINT)
        )
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(3)
    else:
        with failure(trainer.get_local_operator(), when="validate"):
            trainer.fit(3)
    assert (trainer.epoch, spy.hooks.count("on_validation_end")) == (2, 1)
    spy.fail_in = ()
    spy.calls.clear()
    return trainer, spy


def told(spy):
    """Return the names of the epoch and validation hooks that were called."""
    return [hook for hook in spy.hooks if hook in ("on_epoch_end", "on_validation_end")]


def test_missing_validation_runs_first_also_on_resume(broken_off, make_trainer, tmp_path, caplog):
    trainer, spy = broken_off
    path = trainer.save(tmp_path / "state.pt")
    assert [entry["epoch"] for entry in trainer.fit(3)] == [3]
    resumed_by = Spy()
    resumed = make_trainer(Recorder, callbacks=[resumed_by, EarlyStopping("train_loss")])
    resumed.load(path)
    resumed.fit(3)
    for each in (spy, resumed_by):
        assert told(each) == ["on_validation_end", "on_epoch_end", "on_validation_end"]
    trainer.fit(3)
    assert len(told(spy)) == 3, "once"
    complete = make_trainer(Recorder, callbacks=[last := Spy()])
    complete.load(path)
    assert (complete.fit(2), told(last)) == ([], ["on_validation_end"])
    assert caplog.text.count("trains nothing, because the run has already completed epoch") == 2


def test_fit_completes_an_epoch_that_failed_after_its_last_update(make_trainer):
    trainer = make_trainer(Recorder, callbacks=[spy := Spy()])
    with failure(trainer.get_local_operator(), 9, when="after"):
        trainer.fit(2)
    assert [entry["epoch"] for entry in trainer.fit(3)] == [3]
    assert (trainer.global_step, told(spy)[2:4]) == (15, ["on_validation_end", "on_epoch_end"])


def test_an_epoch_without_metrics_or_steps_is_an_epoch(make_trainer):
    class Silent(Recorder):
        def train_epoch(self, iterator, info):
            return {"own": 1} if "own" in info else super().train_epoch(iterator, info) and {}

    trainer = make_trainer(Silent, callbacks=[spy := Spy()])
    trainer.train(num_steps=2)
    assert [each["epoch"] for each in trainer.fit(1, info={"own": 1}) + trainer.fit(3)] == [1, 2, 3]
    assert told(spy) == ["on_epoch_end", "on_validation_end"] * 3


@pytest.mark.parametrize(("num_steps", "every", "number"), [(None, 1, 1), (1, 1, 2), (1, 3, 1)])
def test_validate_or_fit_makes_up_for_a_missing_validation(broken_off, num_steps, every, number):
    trainer, spy = broken_off
    trainer.validate(num_steps)
    assert ("validation_due" in trainer.state_dict()) == (num_steps == 1)
    trainer.fit(3, validate_every=every)
    assert told(spy)[number:] == ["on_epoch_end", "on_validation_end"]


def test_an_epoch_after_a_load_lacks_its_validation_again(make_trainer):
    due, trainer = [], make_trainer(callbacks=[spy := Spy()])
    start = trainer.state_dict()

    def load(*_):
        due.append("validation_due" in trainer.state_dict())
        if len(due) == 3:
            trainer.load_state_dict(start)

    spy.on_epoch_end = load
    spy.on_validation_end = lambda *_: due.append("validation_due" in trainer.state_dict())
    trainer.fit(3)
    assert due == [True] * 9


@pytest.mark.parametrize("num_steps", [2, None])
def test_a_missing_validation_is_skipped_after_further_training(broken_off, num_steps):
    trainer, spy = broken_off
    states = []
    spy.pause_every, spy.on_pause = 1, lambda trainer: states.append(trainer.state_dict())
    if num_steps is None:
        with failure(trainer.get_local_operator(), trainer.global_step + 2):
            trainer.train()
    else:
        trainer.train(num_steps=num_steps)
    states.append(trainer.state_dict())
    assert len(states) > 1
    assert not any("validation_due" in state for state in states)
    trainer.fit(3)
    assert told(spy) == ["on_epoch_end", "on_validation_end"]


@pytest.mark.parametrize(
    ("error", "where", "step"),
    [
        (ValueError, "training", 7),
        (KeyboardInterrupt, "training", 8),  # delivered when the step has ended
        (KeyboardInterrupt, "a callback", 10),
    ],
)
def test_trainer_works_after_an_error_callbacks_see_once(make_trainer, error, where, step, capsys):
    class Interrupting(Callback):
        def on_epoch_end(self, trainer, metrics):
            if where == "a callback" and trainer.epoch == 2:
                signal.raise_signal(signal.SIGINT)

    spy, own = Spy(), Spy("own")
    trainer = make_trainer(Recorder, callbacks=[Interrupting(), spy])

    def fail(batch_info, when):
        if where == "training" and (batch_info["global_step"], when) == (7, "before"):
            if error is ValueError:
                raise ValueError
            signal.raise_signal(signal.SIGINT)

    trainer.get_local_operator().fail = fail
    with pytest.raises(error):
        trainer.fit(3, callbacks=[own], validate_every=None)
    for each in (spy, own):
        ends = [("on_exception", error.__name__), ("on_train_end", 2)]
        assert [call[1:] for call in each.calls[-2:]] == ends
        assert each.hooks.count("on_exception") == 1
    assert trainer.global_step == step
    assert ("epoch 2/3" in capsys.readouterr().err) == (where == "a callback")
    trainer.get_local_operator().fail = idle
    assert [entry["epoch"] for entry in trainer.fit(3)] == ([2, 3] if step < 10 else [3])
    assert own.hooks[-1] == "on_train_end"
    assert trainer.get_local_operator().trained == [*range(40)] * 3


def test_fit_validates_all_data_after_a_partial_validation(make_trainer):
    trainer = make_trainer(Recorder)
    whole = trainer.validate()["num_samples"]
    trainer.validate(num_steps=2)
    assert trainer.fit(1)[0]["val_loss"] == pytest.approx(trainer.latest_metrics["val_loss"])
    spy = Spy()
    trainer.validate(num_steps=2)
    trainer.fit(2, callbacks=[spy])
    assert trainer.latest_metrics["num_samples"] == whole
    assert spy.hooks.count("on_validation_end") == 1
    trainer.validate(num_steps=2)
    with failure(trainer.get_local_operator(), when="validate"):
        trainer.fit(3)
    assert trainer.validate()["num_samples"] == whole
    assert trainer.last_call.is_complete
    state = trainer.state_dict()
    trainer.validate(num_steps=2)
    with failure(trainer.get_local_operator(), when="validate"):
        trainer.validate()
    trainer.load_state_dict(state)
    trainer.validate()
    assert trainer.last_call.is_complete


@pytest.mark.parametrize(
    ("run", "validates", "expected"),
    [
        (lambda trainer: trainer.fit(2), False, ["both", "both"]),
        (lambda trainer: trainer.fit(3, validate_every=2), False, ["train", "both", "both"]),
        (lambda trainer: trainer.fit(2, validate_every=9), False, ["train", "both"]),
        (lambda trainer: trainer.fit(2, validate_every=None), False, ["train", "train"]),
        (lambda trainer: trainer.fit(max_steps=3), False, []),
        (lambda trainer: (trainer.train(), trainer.validate()), False, ["train", "both"]),
        (lambda trainer: (trainer.train(), trainer.validate(num_steps=1)), False, ["train"]),
        (lambda trainer: (trainer.train(num_steps=2), trainer.validate()), False, ["both"]),
        (lambda trainer: trainer.validate(), False, []),
        (lambda trainer: trainer.fit(2), True, ["both", "both"]),
        (lambda trainer: trainer.fit(2, None), True, ["both", "both"]),
        (lambda trainer: (trainer.train(), trainer.validate()), True, ["both"]),
        (lambda trainer: (trainer.train(), trainer.fit(2)), "after a load", ["both"]),
    ],
)
def test_an_epoch_has_one_result_with_its_validation(make_trainer, run, validates, expected):
    class Validating(Callback):
        def on_epoch_end(self, trainer, metrics):
            if validates == "after a load":  # no result of an epoch that another state replaces
                trainer.load_state_dict(trainer.state_dict())
            elif validates:
                trainer.validate()

    class Results(Callback):
        def on_epoch_result(self, trainer, call, metrics):
            assert "train_loss" in metrics
            assert call.kind == ("validate" if "val_loss" in metrics else "train")
            results.append("both" if "val_loss" in metrics else "train")

    results = []
    run(make_trainer(callbacks=[Validating(), Results()]))
    assert results == expected


def test_a_metric_of_both_is_that_of_validation_in_each_result(make_trainer):
    class Scoring(Recorder):
        def train_batch(self, batch, batch_info):
            return {**super().train_batch(batch, batch_info), "score": 9.0}

        def validate_batch(self, batch, batch_info):
            return {**super().validate_batch(batch, batch_info), "score": 1.0}

    class Results(Callback):
        def on_epoch_result(self, trainer, call, metrics):
            scores.append(metrics.get("score"))

    scores, stopping = [], EarlyStopping("score", "min")
    history = make_trainer(Scoring, callbacks=[Results(), stopping]).fit(3, validate_every=2)
    assert (scores, stopping.best_value) == ([None, 1.0, 1.0], 1.0)
    assert [row["score"] for row in history] == [9.0] * 3


class Logging(Recorder):
    def train_batch(self, batch, batch_info):
        step = batch_info["global_step"]
        found = {"twice": 2.0 * step, "value": Sums(lambda n: 1 / n, n=step % 5 == 4)}
        return {**found, **super().train_batch(batch, batch_info)}


def test_log_every_starts_anew_after_an_earlier_state_is_loaded(make_trainer):
    class Points(Callback):
        def on_log(self, trainer, call, metrics):
            seen.append(trainer.global_step)

    seen = []
    trainer = make_trainer(Logging, callbacks=[Points()])
    state = trainer.state_dict()
    for _ in range(2):
        trainer.fit(1, log_every=2)
        trainer.load_state_dict(state)
    assert seen == [2, 4, 2, 4]


def test_an_epoch_with_points_is_completed_at_its_end(make_trainer):
    class Points(Callback):
        def on_log(self, trainer, call, metrics):
            seen.append((trainer.global_step, trainer.epoch, trainer.num_completed_epochs))

    seen = []
    make_trainer(Logging, callbacks=[Points()]).fit(2, log_every=2)
    assert seen == [(2, 1, 0), (4, 1, 0), (6, 2, 1), (8, 2, 1), (10, 2, 2)]


def test_log_every_writes_metrics_during_the_epoch(make_trainer, tmp_path, board):
    def points():
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == "step"]

    class Watching(Callback):
        def on_epoch_end(self, trainer, metrics):
            assert len(points()) == {5: 2, 10: 5, 15: 5}[trainer.global_step]

    callbacks = [TensorBoardLogger(), Watching()]
    trainer = make_trainer(Logging, logdir=tmp_path, callbacks=callbacks)
    history = trainer.fit(2, log_every=2)
    assert [entry["twice"] for entry in history] == [4.0, 14.0]
    assert "grad_norm" not in history[0]
    trainer.fit(3)
    assert [point["global_step"] for point in points()] == [2, 4, 6, 8, 10]
    # a point covers the steps since the previous one in its epoch; none covers step 5
    assert [point["metrics"]["twice"] for point in points()] == [1.0, 5.0, 10.0, 13.0, 17.0]
    assert [point["metrics"]["value"] for point in points()] == ["nan"] * 4 + [1.0]
    for point in points():
        measured = {"twice", "value", "train_loss", "lr", "grad_norm", "num_samples", "batch_count"}
        assert point["metrics"].keys() == measured
        assert point["metrics"]["lr"] == 0.01
        assert point["metrics"]["grad_norm"] > 0
        assert point["seconds"] > 0
    trainer.shutdown()
    report = (tmp_path / "report.html").read_text()
    charts = map(json.loads, map(html.unescape, re.findall('data-chart="(.*?)"', report)))
    (lines,) = (lines for each in charts if "train_loss" in (lines := dict(each["lines"])))
    told = [[point["global_step"], point["metrics"]["train_loss"]] for point in points()]
    assert lines["train_loss, by step"] == [pytest.approx(point, rel=1e-5) for point in told]
    read = board(tmp_path / "tensorboard")
    assert [event.step for event in read.Scalars("step/twice")] == [2, 4, 6, 8, 10]
    assert len(read.Scalars("train/twice")) == 3


def test_fit_continues_within_an_epoch_after_max_steps(make_trainer, caplog):
    trainer = make_trainer(Recorder, callbacks=[spy := Spy()])
    history = trainer.fit(9, max_steps=7)
    assert history.stop_reason == "max_steps=7 is reached"
    assert [entry["num_samples"] for entry in history] == [40, 16]
    assert ["val_loss" in entry for entry in history] == [True, False]
    assert spy.hooks[2:-1] == ["on_epoch_end", "on_validation_end", "on_partial_epoch_end"]
    with caplog.at_level(logging.WARNING):
        assert trainer.fit(max_steps=7) == []
    assert caplog.messages == ["fit() ends at step 7: max_steps=7 is reached"]
    assert [entry["num_samples"] for entry in trainer.fit(2)] == [24]
    assert trainer.get_local_operator().trained == [*range(40), *range(40)]
    assert len(trainer.fit(max_steps=20)) == 2
    assert trainer.epoch == 4
