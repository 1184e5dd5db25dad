"""When callbacks are called, in which order, and what follows if one of them raises."""

import gc
import threading
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raysgd.callbacks import Callback
from raysgd.errors import CallbackError, CheckpointError
from tests.operators import Classifier, local
from tests.unit.callbacks.spy import Late, Spy, Unloadable
from tests.unit.recorder import Recorder, Streaming, failure

# ---- plain calls


def test_a_call_returns_the_metrics_that_callbacks_see_and_change(make_trainer):
    class Adding(Callback):
        def on_epoch_end(self, trainer, metrics):
            metrics["added"] = trainer.latest_metrics["num_samples"]

    class Reading(Callback):
        def on_epoch_end(self, trainer, metrics):
            self.seen = metrics

    trainer = make_trainer(callbacks=[Adding(), reading := Reading()])
    assert (result := trainer.train()) is reading.seen
    trainer.latest_metrics.clear()  # a copy
    assert result["added"] == trainer.latest_metrics["added"] == 40
    (by_worker,) = trainer.train(reduce_results=False)
    assert set(by_worker) == set(result) - {"added"}
    assert reading.seen["epoch"] == 2
    (validated,) = trainer.validate(reduce_results=False)
    assert (validated["num_samples"], type(validated["val_loss"])) == (40, float)
    reading.on_epoch_end = lambda trainer, metrics: metrics.clear()
    assert (trainer.train(reduce_results=False)[0]["epoch"], len(trainer.fit(4))) == (3, 1)


# ---- order


def test_callbacks_are_called_in_order_and_later_stages_start_first(make_trainer):
    calls = []
    given_order = [Late("last", calls), Spy("first", calls), Spy("second", calls)]
    trainer = make_trainer(callbacks=given_order)
    trainer.train()
    trainer.shutdown()
    by_hook = {}
    for name, hook, _ in calls:
        by_hook.setdefault(hook, []).append(name)
    assert by_hook["on_train_start"] == ["last", "first", "second"]
    assert by_hook["on_epoch_end"] == by_hook["on_train_end"] == ["first", "second", "last"]
    hooks = [hook for _, hook, _ in calls]
    assert hooks.index("on_event") > 2, "all callbacks start before the first event"


OPERATIONS = st.lists(
    st.sampled_from(["epoch", "steps", "validate", "fit", "fail", "save"]), max_size=6
)


@given(operations=OPERATIONS, pause_every=st.sampled_from([None, 2, 5, 7]))
def test_hooks_follow_the_documented_order_for_random_calls(make_trainer, operations, pause_every):
    """Starts and ends alternate. Between them, each call runs its hooks once."""
    calls = []
    spies = [Spy("one", calls, pause_every=pause_every), Spy("two", calls)]
    trainer = make_trainer(Recorder, callbacks=spies)
    expected = {
        "on_epoch_end": 0,
        "on_partial_epoch_end": 0,
        "on_validation_end": 0,
        "on_exception": 0,
    }
    for operation in operations:
        done = trainer.num_completed_epochs
        if operation == "epoch":
            trainer.train()
            expected["on_epoch_end"] += 1
        elif operation == "steps":
            trainer.train(num_steps=3)
            completed = trainer.num_completed_epochs > done
            expected["on_epoch_end" if completed else "on_partial_epoch_end"] += 1
        elif operation == "validate":
            trainer.validate()
            expected["on_validation_end"] += 1
        elif operation == "fit":
            trainer.fit(done + 1)
            expected["on_epoch_end"] += 1
            expected["on_validation_end"] += 1
        elif operation == "fail":
            with failure(trainer.get_local_operator()):
                trainer.train()
            expected["on_exception"] += 1
        else:
            trainer.state_dict()
    trainer.shutdown()

    for spy in spies:
        hooks = spy.hooks
        for hook, count in expected.items():
            assert hooks.count(hook) == count, hook
        running = False
        for hook in hooks:
            assert running == (hook != "on_train_start"), hooks
            running = hook != "on_train_end"
        assert not running
        told = [detail for name, hook, detail in calls if (name, hook) == (spy.name, "on_event")]
        assert told == ([event.kind for event in trainer.events] if hooks else [])
    others = ("on_pause", "on_event", "on_train_start", "on_train_end")
    pairs = [call for call in calls if call[1] not in others]
    assert [name for name, _, _ in pairs] == ["one", "two"] * (len(pairs) // 2)
    paused = [detail for _, hook, detail in calls if hook == "on_pause"]
    steps = range(1, trainer.global_step + 1)
    assert paused == [step for step in steps if pause_every and step % pause_every == 0]


# ---- pauses


@pytest.mark.parametrize("operator_cls", [Recorder, Streaming])
@pytest.mark.parametrize("every", [1, 3, 5])
def test_a_pause_changes_nothing_but_the_time(make_trainer, operator_cls, every):
    """The results are equal, even if a loader without a length ends at a pause."""
    plain = make_trainer(operator_cls)
    spy = Spy(pause_every=every)
    paused = make_trainer(operator_cls, callbacks=[spy])
    for _ in range(3):
        assert paused.train() == plain.train()
        assert (paused.epoch, paused.global_step) == (plain.epoch, plain.global_step)
    assert paused.train(num_steps=7) == plain.train(num_steps=7)
    seen = [trainer.get_local_operator().trained for trainer in (paused, plain)]
    assert seen[0] == seen[1]
    steps = [detail for _, hook, detail in spy.calls if hook == "on_pause"]
    assert steps == list(range(every, 23, every))


@pytest.mark.parametrize(
    ("hook", "method", "said"),
    [
        *(("on_pause", each, "cannot") for each in ("train", "validate", "load_state_dict", "fit")),
        ("on_epoch_end", "fit", "cannot call fit() in on_epoch_end"),
        ("on_event", "save", "on_epoch_end"),
        ("on_log", "save", "on_epoch_end"),
    ],
)
def test_calls_that_a_hook_cannot_make_raise(make_trainer, tmp_path, hook, method, said):
    def call(self, trainer, *_):
        given = {"load_state_dict": [{}], "fit": [1], "save": [tmp_path / "state.pt"]}
        getattr(trainer, method)(*given.get(method, []))

    trainer = make_trainer(callbacks=[type("Calling", (Spy,), {hook: call})(pause_every=2)])
    with pytest.raises(CallbackError, match=hook) as caught:
        trainer.fit(1, log_every=5) if hook == "on_log" else trainer.train()
    assert said in str(caught.value.__cause__)
    assert trainer.global_step == (0 if hook == "on_event" else 5)
    assert hook in ("on_pause", "on_epoch_end") or trainer.train()["epoch"] == trainer.epoch


def test_next_pause_must_be_above_the_current_step(make_trainer):
    class Stuck(Callback):
        def next_pause(self, global_step):
            return global_step

    trainer = make_trainer(callbacks=[Stuck()])
    with pytest.raises(CallbackError, match=r"next_pause.*not above the current step, 0"):
        trainer.train()
    assert trainer.global_step == 5


# ---- events


def test_events_come_as_they_happen_and_before_the_call_raises(make_trainer):
    trainer = make_trainer(Recorder, callbacks=[spy := Spy()])
    with failure(trainer.get_local_operator(), 2):
        trainer.train()
    assert (trainer.epoch, trainer.global_step) == (1, 2)
    assert spy.calls[1:] == [
        ("spy", "on_event", "started"),
        ("spy", "on_event", "user_error"),
        ("spy", "on_exception", "ValueError"),
    ]
    trainer.train()
    assert spy.calls[4:] == [("spy", "on_event", "regrouped"), ("spy", "on_epoch_end", 1)]
    started, error, resumed = trainer.events
    assert (error.step, "bad batch" in error.cause) == (2, True)
    assert resumed.generation > started.generation
    trainer.events.clear()
    assert trainer.events


def test_events_between_two_runs_arrive_at_the_next_start(make_trainer, tmp_path):
    trainer = make_trainer(callbacks=[spy := Spy()], logdir=tmp_path)
    trainer.fit(1)
    with pytest.raises(ZeroDivisionError):
        trainer.apply_all_workers(lambda: 1 / 0)
    assert spy.hooks[-1] == "on_train_end"
    trainer.fit(2)
    told = [detail for _, hook, detail in spy.calls if hook == "on_event"]
    assert told == [event.kind for event in trainer.events]
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == len(told)


# ---- callbacks that raise


@pytest.mark.parametrize("hook", ["on_epoch_end", "on_event", "on_pause"])
def test_error_names_the_callback_and_no_step_is_lost(make_trainer, caplog, hook):
    calls = []
    spies = [
        Spy("bad", calls, fail_in=[hook], pause_every=3),
        Spy("good", calls, pause_every=3),
    ]
    trainer = make_trainer(Recorder, callbacks=spies)
    with pytest.raises(CallbackError, match=rf"Spy failed in {hook}: KeyError") as caught:
        trainer.train()
    assert isinstance(caught.value.__cause__, KeyError)
    assert hook in spies[1].hooks, "the other callback was called"
    assert spies[1].hooks[-1] == "on_exception"
    assert f"Spy failed in {hook}: KeyError('bad fails')" in caplog.text, "logged immediately"
    done = 0 if hook == "on_event" else 5  # the first event comes before the first step
    assert trainer.global_step == done
    assert trainer.latest_metrics.get("num_samples") == (40 if done else None)

    spies[0].fail_in = ()
    trainer.train()
    plain = make_trainer(Recorder)
    for _ in range(trainer.epoch):
        plain.train()
    assert trainer.global_step == plain.global_step == done + 5
    assert trainer.get_local_operator().trained == plain.get_local_operator().trained


def test_training_does_not_begin_if_a_callback_cannot_start(make_trainer):
    calls = []
    spies = [Spy("bad", calls, fail_in=["on_train_start"]), Spy("good", calls)]
    trainer = make_trainer(callbacks=spies)
    with pytest.raises(CallbackError, match="on_train_start"):
        trainer.train()
    assert trainer.global_step == 0
    spies[0].fail_in = ()
    trainer.train()
    assert [each.hooks.count("on_train_start") for each in spies] == [2, 1]


def test_the_first_callback_error_is_raised_unless_training_fails(make_trainer, caplog):
    spies = [Spy("one", fail_in=["on_event", "on_epoch_end", "on_exception"])]
    spies.append(Spy("two", fail_in=["on_epoch_end"]))
    trainer = make_trainer(Recorder, callbacks=spies)
    with pytest.raises(CallbackError, match=r"on_event.*one fails"):
        trainer.train()  # sends the event "started"
    with pytest.raises(CallbackError, match=r"on_epoch_end.*one fails"):
        trainer.train()
    assert "two fails" in caplog.text
    with failure(trainer.get_local_operator(), 5):
        trainer.train()
    assert caplog.text.count("on_exception") == 3
    spies[0].fail_in = spies[1].fail_in = ()
    assert trainer.train()["epoch"] == 2


def test_an_error_in_on_train_end_is_raised_after_the_workers_are_gone(make_trainer):
    trainer = make_trainer(callbacks=[Spy(fail_in=["on_train_end"])])
    trainer.train()
    with pytest.raises(CallbackError, match="on_train_end"):
        trainer.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        trainer.train()
    trainer.shutdown()


def test_ctrl_c_in_on_train_end_does_not_skip_the_other_callbacks(make_trainer):
    class Interrupted(Callback):
        def on_train_end(self, trainer):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_trainer().fit(1, callbacks=[Interrupted(), spy := Spy()])
    assert spy.hooks[-1] == "on_train_end"


def test_passwords_in_errors_of_services_are_hidden(make_trainer, caplog):
    class Failing(Callback):
        def on_epoch_end(self, trainer, metrics):
            raise OSError(5, "403", "https://me:secret@host/x?sig=secret")

    trainer = make_trainer(callbacks=[Failing()])
    with pytest.raises(CallbackError, match=r"403: 'https://me:\*\*\*@host/x\?\*\*\*'") as caught:
        trainer.train()
    assert "403" in caplog.text
    assert "secret" not in str(caught.value) + caplog.text


def test_only_on_log_and_on_progress_of_a_local_worker_run_in_another_thread_during_its_call():
    seen, logged, measured = set(), threading.Event(), threading.Event()

    class Slow(Classifier):
        def train_batch(self, batch, batch_info):
            assert batch_info["batch_idx"] != 3 or (logged.wait(60) and measured.wait(60))
            return super().train_batch(batch, batch_info)

    class Threads(Spy):
        def note(self, hook, detail=None):
            thread = threading.current_thread()
            seen.add((hook, thread is threading.main_thread() or thread.name))

        def on_log(self, trainer, call, metrics):
            self.note("on_log")
            logged.set()

        def on_progress(self, trainer, kind, progress):
            self.note("on_progress")
            if any(each.num_batches == 1 for each in progress) and trainer.speed().workers:
                measured.set()

    spy = Threads(pause_every=4)
    local(Slow, callbacks=[spy]).fit(1, log_every=2)
    elsewhere = {("on_log", "raysgd-progress"), ("on_progress", "raysgd-progress")}
    assert elsewhere <= seen
    assert {hook for hook, _ in seen - elsewhere} > {"on_pause", "on_epoch_end", "on_log"}
    assert {thread for _, thread in seen - elsewhere} == {True}
    assert "raysgd-progress" not in {thread.name for thread in threading.enumerate()}


def test_a_failing_on_progress_runs_once_per_call(make_trainer):
    class Failing(Callback):
        num_calls = 0

        def on_progress(self, trainer, kind, progress):
            self.num_calls += 1
            raise ValueError("no terminal")

    callback = Failing()
    trainer = make_trainer(callbacks=[callback])
    with pytest.raises(CallbackError, match="on_progress"):
        trainer.train()
    assert callback.num_calls == 1


# ---- invalid arguments


@pytest.mark.parametrize("callbacks", [[3], [Spy], Spy(), 7, "spy"])
def test_what_is_no_callback_is_refused(make_trainer, callbacks):
    with pytest.raises(TypeError, match="takes a list of instances"):
        make_trainer(callbacks=callbacks)
    with pytest.raises(TypeError, match="takes a list of instances"):
        make_trainer().fit(1, callbacks=callbacks)


def test_a_callback_is_attached_once(make_trainer):
    spy = Spy()
    with pytest.raises(ValueError, match="Spy is in the callbacks twice"):
        make_trainer(callbacks=[spy, spy])
    trainer, other = make_trainer(callbacks=[spy]), Spy()
    with pytest.raises(ValueError, match="Spy is in the callbacks twice"):
        trainer.fit(1, callbacks=[other, spy])
    trainer.fit(1)
    assert spy.hooks.count("on_epoch_end") == 1
    assert other.hooks == [], "a refused list attaches no callback"


# ---- state


def test_the_state_of_callbacks_survives_a_file(make_trainer, tmp_path):
    spies = [Spy(state={"best": 0.5}), Spy(state={"best": 0.25}), Late(), Spy()]
    path = make_trainer(callbacks=spies).save(tmp_path / "state.pt")
    others = [Spy(), Spy(), Late(), Spy()]
    make_trainer(callbacks=others).load(path)
    assert [spy.loaded for spy in others] == [[{"best": 0.5}], [{"best": 0.25}], [], []]


def test_state_of_a_missing_callback_waits_for_a_later_fit(make_trainer):
    state = make_trainer(callbacks=[Spy(state={"best": 0.5})]).state_dict()
    trainer = make_trainer()
    trainer.load_state_dict(state)
    assert trainer.state_dict()["callbacks"] == {"Spy": {"best": 0.5}}
    trainer.fit(1, callbacks=[Late()])
    spy = Spy(state={"best": 0.1})
    trainer.fit(1, callbacks=[spy])
    assert spy.loaded == [{"best": 0.5}]
    assert trainer.state_dict()["callbacks"] == {"Spy": {"best": 0.1}}
    fresh = Spy()
    trainer.fit(2, callbacks=[fresh])
    assert fresh.loaded == []
    trainer.fit(3, callbacks=[spy])
    trainer.load_state_dict({**state, "callbacks": {}})
    assert "callbacks" not in trainer.state_dict()


def test_a_state_is_a_copy(make_trainer):
    spy = Spy(state={"seen": [1], "mean": torch.ones(1)})
    state = make_trainer(callbacks=[spy]).state_dict()
    spy.state["seen"].append(2)
    spy.state["mean"] += 1
    assert state["callbacks"] == {"Spy": {"seen": [1], "mean": torch.ones(1)}}


def test_no_callback_changes_if_one_or_the_workers_cannot_load_a_state(make_trainer):
    good, bad = Spy(state={"best": 9}), Unloadable()
    saved = {"Spy": {"best": 2}, "Unloadable": {"best": 1}}
    trainer = make_trainer(callbacks=[good, bad])
    state = trainer.state_dict()
    trainer.train()
    with pytest.raises(CheckpointError, match=r"callbacks\['Unloadable'\] cannot be loaded"):
        trainer.load_state_dict({**state, "callbacks": {**saved, "Other": {"best": 4}}})
    with pytest.raises(CheckpointError, match="state has 0 models"):
        trainer.load_state_dict({**state, "models": [], "callbacks": {"Spy": {"best": 2}}})
    assert good.loaded == [{"best": 2}, {"best": 9}] * 2, "it has its old state again"
    assert trainer.state_dict()["callbacks"] == {"Spy": {"best": 9}}
    assert trainer.train()["epoch"] == 2


def test_states_continue_to_wait_if_one_cannot_load(make_trainer):
    """They wait for the same callbacks or for new ones."""
    saved = {"Unloadable": {"best": 1}, "Spy": {"best": 2}}
    trainer = make_trainer()
    trainer.load_state_dict({**trainer.state_dict(), "callbacks": saved})
    bad, good = Unloadable(state={"best": 9}), Spy(state={"best": 9})
    for _ in range(2):
        with pytest.raises(CallbackError, match="Unloadable failed in load_state_dict"):
            trainer.fit(1, callbacks=[bad, good])
        assert trainer.epoch == 0
        assert trainer.state_dict()["callbacks"] == saved
    bad.mended, other = True, Spy(state={"best": 9})
    trainer.fit(1, callbacks=[bad, other])
    assert (bad.loaded, other.loaded) == ([{"best": 1}], [{"best": 2}])


def test_a_dropped_trainer_stops_its_workers_despite_callbacks():
    trainer = local(Recorder, {"num_samples": 40, "batch_size": 8}, callbacks=[Spy()])
    trainer.train()
    controller, operator = trainer._controller, weakref.ref(trainer.get_local_operator())
    ref = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert (ref(), operator()) == (None, None)
    assert controller.is_shut_down


def test_callbacks_that_save_pause_at_the_next_step_before_a_preemption(make_trainer):
    saving, other = Spy("saving", pause_every=30), Spy("other", pause_every=30)
    saving.saves_state = True
    trainer = make_trainer(callbacks=[saving, other])
    trainer._controller._preemption.must_save = True
    trainer.train()
    assert next(detail for _, hook, detail in saving.calls if hook == "on_pause") == 1
    assert 1 not in [detail for _, hook, detail in other.calls if hook == "on_pause"]
