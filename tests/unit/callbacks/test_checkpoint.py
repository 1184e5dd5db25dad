"""``CheckpointCallback``: which checkpoints it keeps, and how a run resumes."""

import os
import signal

import pytest
import torch

from raysgd.callbacks import (
    Callback,
    CheckpointCallback,
    EarlyStopping,
    LearningRateMonitor,
    TorchProfiler,
)
from raysgd.checkpoint import CheckpointStore, read_manifest
from raysgd.errors import CallbackError, CheckpointError, CollectiveError
from tests.conftest import run_python, wait_until
from tests.operators import Classifier
from tests.unit.callbacks.spy import Scripted
from tests.unit.recorder import Recorder, failure


def names(folder):
    return sorted(path.name for path in folder.glob("*.ckpt"))


def steps(folder):
    return [int(name[-13:-5]) for name in names(folder)]


def weights(trainer):
    return trainer.get_local_operator().model.state_dict()


def test_interrupted_run_resumes_with_the_next_sample(make_trainer, tmp_path):
    """It resumes within an epoch, and ends with the same bits as an uninterrupted run."""
    config = {"shuffle": True, "dropout": 0.5}
    whole = make_trainer(Recorder, config)
    expected = whole.fit(3)

    def callbacks():
        return [CheckpointCallback(tmp_path, every=3), EarlyStopping(patience=9)]

    cut = make_trainer(Recorder, config, callbacks=callbacks())
    with failure(cut.get_local_operator(), 8, error=MemoryError):
        cut.fit(3)
    assert steps(tmp_path) == [3, 6, 8]
    (tmp_path / names(tmp_path)[-1]).unlink()  # as if the process had been killed

    resumed_by, stopping = callbacks()
    resumed = make_trainer(Recorder, {**config, "seed": 9}, callbacks=[stopping, resumed_by])
    history = resumed.fit(3)
    assert resumed_by.restored_from.endswith("epoch-00002-step-00000006.ckpt")
    assert [entry["epoch"] for entry in history] == [2, 3]
    assert history[1] == expected[2]
    assert stopping.best_value == min(entry["val_loss"] for entry in expected)
    seen = whole.get_local_operator().trained
    assert resumed.get_local_operator().trained == seen[48:]
    left, right = weights(whole), weights(resumed)
    assert all(torch.equal(left[name], right[name]) for name in left)


class CutOff(Callback):
    """A callback that ends a run after an epoch is saved and before its validation."""

    order = 2

    def __init__(self, epoch):
        self._epoch = epoch

    def on_epoch_end(self, trainer, metrics):
        if metrics["epoch"] == self._epoch:
            raise KeyboardInterrupt


class Reading(Callback):
    """A callback that reads training metrics when a validation ends, as loggers do."""

    def on_validation_end(self, trainer, metrics):
        assert trainer.latest_metrics["lr"] == 0.1
        assert trainer.latest_metrics["val_loss"] == metrics["val_loss"]


@pytest.mark.parametrize("validate_every", [1, None])
@pytest.mark.parametrize("every", ["epoch", 5])
def test_run_that_is_interrupted_repeatedly_misses_no_result(
    make_trainer, tmp_path, every, validate_every
):
    """Early stopping ends it in the same epoch, and a restart does not train further."""
    hook = "on_validation_end" if validate_every else "on_epoch_end"

    def run(*more):
        saving = CheckpointCallback(tmp_path, every)
        scores = Scripted([3, 2, 2.5, 2.5, 2.5, 1], hook=hook)
        others = [LearningRateMonitor(), Reading(), EarlyStopping("score")]
        return make_trainer(callbacks=[scores, *others, saving, *more])

    for epoch in range(1, 6):
        trainer = run(CutOff(epoch))
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(9, validate_every)
        assert trainer.epoch == epoch
    for _ in range(2):
        history = (trainer := run()).fit(9, validate_every)
        assert (history, trainer.epoch) == ([], 5)
        assert "score has not improved for 3 epochs" in history.stop_reason


def test_trainer_that_has_trained_does_not_resume(make_trainer, tmp_path):
    make_trainer(callbacks=[CheckpointCallback(tmp_path)]).fit(3)
    initial = (trainer := make_trainer()).state_dict()
    trainer.train(num_steps=2)
    for _ in range(2):  # the second time from the state before training
        trainer.fit(1, callbacks=[callback := CheckpointCallback(tmp_path)])
        assert (callback.restored_from, trainer.global_step) == (None, 5)
        trainer.load_state_dict(initial)
    kind = type("Training", (Callback,), {"on_train_start": lambda self, trainer: trainer.train()})
    make_trainer(callbacks=[CheckpointCallback(tmp_path / "both"), kind()]).fit(2)
    assert steps(tmp_path / "both") == [5, 10], "also the epoch that the callback has trained"


@pytest.mark.parametrize("ends", [[6], [1, 2, 3, 4, 5, 6]], ids=["in one go", "restarted"])
@pytest.mark.parametrize(("keep", "kept"), [(1, [10, 30]), (2, [10, 20, 30])])
def test_validation_rates_checkpoints_if_training_has_the_same_metric(
    make_trainer, tmp_path, keep, kept, ends
):
    in_training = Scripted([99, 98, 100, 99, 98, 100], hook="on_epoch_end")  # overfitted
    for end in ends:
        saving = CheckpointCallback(tmp_path, keep=keep, monitor="score", mode="max")
        scores = [in_training, Scripted([2, 9, 3, 5, 1, 4])]
        make_trainer(callbacks=[saving, *scores]).fit(end)
    assert steps(tmp_path) == kept
    rated = [read_manifest(tmp_path / name) for name in names(tmp_path)]
    expected = {10: 9, 20: 5, 30: 4}
    assert [manifest.metrics["score"] for manifest in rated] == [expected[step] for step in kept]


@pytest.mark.parametrize("every", [1, 2, None])
def test_a_metric_of_training_rates_checkpoints(make_trainer, tmp_path, every):
    saving = CheckpointCallback(tmp_path, keep=2, monitor="score")
    scores = Scripted([2, 3, 1], hook="on_epoch_end")
    make_trainer(callbacks=[saving, scores]).fit(3, validate_every=every)
    assert steps(tmp_path) == [5, 15]
    assert read_manifest(saving.best).metrics["score"] == 1


def test_checkpoints_with_a_score_are_kept_before_those_without(make_trainer, tmp_path):
    """Checkpoints within an epoch have no validation metrics."""
    saving = CheckpointCallback(tmp_path, every=2, keep=2, monitor="score")
    make_trainer(callbacks=[saving, Scripted([1, 2, 3])]).fit(3)
    assert steps(tmp_path) == [5, 10, 15]


def test_plain_calls_without_the_metric_keep_the_newest(make_trainer, tmp_path):
    saving = CheckpointCallback(tmp_path, keep=1, monitor="val_loss")
    trainer = make_trainer(callbacks=[saving])
    for _ in range(2):
        trainer.train()
        trainer.validate(num_steps=1)
    assert steps(tmp_path) == [10]
    trainer.validate()  # the rest
    trainer.train()
    trainer.validate()
    assert saving.best in [str(tmp_path / name) for name in names(tmp_path)]
    make_trainer(callbacks=[saving]).train()
    assert (bool(saving.best), steps(tmp_path)[-1]) == (True, 20)
    list(map(os.remove, tmp_path.glob("*.ckpt")))
    make_trainer(callbacks=[saving]).train()
    assert saving.restored_from is None


def look_at_batches(trainer, best):
    trainer.train(num_steps=1)
    trainer.validate(num_steps=1)
    trainer.validate()  # the rest


def look_at_best(trainer, best):
    trainer.load(best)
    trainer.validate()


@pytest.mark.parametrize("look", [look_at_batches, look_at_best])
def test_only_a_complete_validation_of_new_training_competes(make_trainer, tmp_path, look):
    """Early stopping ignores other validations, too."""
    scores, stopping = Scripted([3, 2]), EarlyStopping("score", mode="min")
    saving = CheckpointCallback(tmp_path, monitor="score", mode="min", keep=1)
    trainer = make_trainer(callbacks=[scores, saving, stopping])
    for _ in range(2):
        trainer.train()
        trainer.validate()
    best = saving.best
    scores._values = [0, 0, 0]
    look(trainer, best)
    assert (saving.best, read_manifest(best).metrics["score"]) == (best, 2)
    if look is look_at_batches:
        assert stopping.best_value == 2
        trainer.validate()
        assert read_manifest(saving.best).metrics["score"] == 0


def test_a_state_that_cannot_be_read_is_one_error(make_trainer, tmp_path, caplog):
    class Unreadable(Recorder):
        def state_dict(self):
            raise ValueError("it has a lock")

    trainer = make_trainer(Unreadable, callbacks=[CheckpointCallback(tmp_path)])
    with pytest.raises(CallbackError, match="it has a lock"):
        trainer.fit(1)
    assert caplog.text.count("it has a lock") == 1


def test_an_infinite_mask_is_saved_and_a_spoiled_model_is_not(make_trainer, tmp_path, caplog):
    class Masked(Recorder):
        def register(self, *, models, **others):
            models.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
            models.bias = torch.nn.Parameter(torch.tensor(torch.inf), requires_grad=False)
            return super().register(models=models, **others)

    trainer = make_trainer(Masked, callbacks=[CheckpointCallback(tmp_path, every=2)])
    trainer.train(num_steps=4)
    trainer.save(tmp_path / "state.pt")
    before = (tmp_path / "state.pt").read_bytes()
    trainer.save_model(tmp_path / "model.safetensors")
    weights(trainer)["0.weight"].data.fill_(torch.nan)
    assert "writes NaN" not in caplog.text
    trainer.save_model(tmp_path / "model.safetensors")
    assert "writes NaN, because 0.weight" in caplog.text
    trainer.train(num_steps=4)
    assert steps(tmp_path) == [2, 4]
    with pytest.raises(CheckpointError, match=r"step 8 is not saved to .*state.pt, because models"):
        trainer.save(tmp_path / "state.pt")
    assert (tmp_path / "state.pt").read_bytes() == before
    assert caplog.text.count("models[0].0.weight has NaN or infinity") == 2
    trainer.load(tmp_path / "state.pt")
    weights(trainer)["0.weight"].data.fill_(torch.nan)
    trainer.train(num_steps=4)
    assert caplog.text.count("callbacks=[TerminateOnNaN()]") == 2


def test_two_callbacks_cannot_save_into_one_folder(make_trainer, tmp_path):
    both = [CheckpointCallback(), CheckpointCallback(tmp_path / "run" / ".." / "checkpoints")]
    with pytest.raises(ValueError, match=r"two CheckpointCallbacks save into .*checkpoints,"):
        make_trainer(callbacks=both, logdir=tmp_path)
    trainer = make_trainer(callbacks=both[:1], logdir=tmp_path)
    with pytest.raises(ValueError, match="own folder"):
        trainer.fit(1, callbacks=both[1:])
    other = make_trainer(callbacks=both[1:])  # as in another thread
    trainer.fit(1, callbacks=[Calling(other.train)])
    other.train()


class Calling(Callback):
    def __init__(self, call):
        self._call = call

    def on_epoch_end(self, trainer, metrics):
        text = r"Two trainers save into .*checkpoints, .* own folder"
        with pytest.raises(ValueError, match=text):
            self._call()


@pytest.mark.parametrize(
    ("arguments", "max_steps", "error", "expected"),
    [
        ({"every": 3, "keep": None, "blocking": False}, 10, None, [3, 6, 9, 10]),
        ({}, 7, None, [5, 7]),
        ({"every": 3}, 6, None, [3, 6]),
        ({"every": 7, "blocking": False}, 15, KeyboardInterrupt, [7, 8]),
        ({}, 15, OSError, [5, 8]),
        ({"monitor": "val_loss"}, 15, OSError, [5, 8]),
        ({}, 15, CollectiveError, [5]),
    ],
)
def test_an_end_saves_the_steps_since_the_last_save_once(
    make_trainer, tmp_path, arguments, max_steps, error, expected
):
    trainer = make_trainer(Recorder, callbacks=[CheckpointCallback(tmp_path, **arguments)])
    if error is not None:
        with failure(trainer.get_local_operator(), 8, error=error) as caught:
            trainer.fit(max_steps=max_steps)
        assert f"step-{expected[-1]:08d}" in caught.value.__notes__[-1]
    else:
        trainer.fit(max_steps=max_steps)
    assert steps(tmp_path) == expected
    assert [read_manifest(each).global_step for each in sorted(tmp_path.glob("*.ckpt"))] == expected


def test_a_failed_validation_leaves_a_checkpoint_of_its_epoch(make_trainer, tmp_path):
    class Fails(Classifier):
        def validate_batch(self, batch, batch_info):
            if self.global_step == 10:
                raise OSError("the data is gone")
            return super().validate_batch(batch, batch_info)

    trainer = make_trainer(Fails, callbacks=[CheckpointCallback(tmp_path, monitor="val_loss")])
    with pytest.raises(OSError, match="the data is gone"):
        trainer.fit(3)
    assert steps(tmp_path) == [5, 10]


@pytest.mark.parametrize("where", ["on_validation_end", "on_epoch_result", "save"])
def test_ctrl_c_skips_no_other_callback_and_no_write(make_trainer, tmp_path, monkeypatch, where):
    def interrupt(*given):
        wait_until(lambda: where != "save" or saving._pending_write)
        os.kill(os.getpid(), signal.SIGINT)
        return save(*given)

    saving, first = CheckpointCallback(tmp_path, monitor="val_loss"), Callback()
    save = CheckpointStore.save
    monkeypatch.setattr(CheckpointStore if where == "save" else first, where, interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_trainer(callbacks=[first, saving]).fit(1)
    assert read_manifest(saving.best).metrics["val_loss"] > 0


def test_the_end_of_the_trainer_saves_new_steps_but_no_loaded_state(make_trainer, tmp_path):
    ends = {"new": [2, 3], "loaded": [2], "trained again": [2, 1], "failed": [2, 4, 5]}
    for name, expected in ends.items():
        folder = tmp_path / name
        with make_trainer(Recorder, callbacks=[CheckpointCallback(folder, every=2)]) as trainer:
            start = trainer.state_dict()
            trainer.train(num_steps=3)
            if name in ("loaded", "trained again"):
                trainer.load_state_dict(start)
            if name == "failed":
                with failure(trainer.get_local_operator(), 3, error=CollectiveError):
                    trainer.train()
            if name in ("trained again", "failed"):
                trainer.train(num_steps=1 if name == "trained again" else 2)
        assert steps(folder) == expected


@pytest.mark.parametrize(
    ("blocking", "num_epochs"), [(True, 3), (False, 3), pytest.param(False, 1, id="the last write")]
)
def test_failed_save_raises_and_training_can_continue(make_trainer, tmp_path, blocking, num_epochs):
    class InTheWay(Callback):
        def on_train_start(self, trainer):
            if not trainer.global_step:
                folder.rmdir()
                folder.write_text("in the way")

    folder = tmp_path / "checkpoints"
    saving = CheckpointCallback(folder, blocking=blocking, resume=False)
    trainer = make_trainer(callbacks=[saving, InTheWay()])
    with pytest.raises(CallbackError, match=r"failed in on_(epoch|train)_end") as caught:
        trainer.fit(num_epochs)
    assert isinstance(caught.value.__cause__, CheckpointError)
    with pytest.raises(CallbackError, match=r"failed in on_train_start: .*File exists"):
        trainer.fit(3)  # before it trains
    folder.unlink()
    trainer.fit(3)
    assert trainer.global_step == 15
    assert steps(folder)[-1] == 15


def test_checkpoint_of_another_model_is_an_error_with_advice(make_trainer, tmp_path, caplog):
    make_trainer(callbacks=[CheckpointCallback(tmp_path)]).fit(1)
    trainer = make_trainer(
        Recorder, callbacks=[CheckpointCallback(tmp_path, experiment="Classifier")]
    )
    with pytest.raises(CallbackError, match="on_train_start") as caught:
        trainer.fit(1)
    said = str(caught.value.__cause__)
    assert caught.value.__cause__.__cause__ is None, "prints the reason once"
    assert "failed in" not in caplog.text, "prints the reason once"
    assert "the same model and config" in said
    assert f"{names(tmp_path)[0]} into Recorder." in said
    assert "another folder (or logdir)" in said
    assert "0.weight" in said


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (CheckpointCallback, {"every": 0}),
        (CheckpointCallback, {"every": "step"}),
        (CheckpointCallback, {"every": True}),
        (CheckpointCallback, {"keep": 0}),
        (CheckpointCallback, {"monitor": 3}),
        (CheckpointCallback, {"mode": "low"}),
        (CheckpointCallback, {"blocking": "no"}),
        (CheckpointCallback, {"resume": None}),
        (EarlyStopping, {"mode": "low"}),
        (EarlyStopping, {"patience": 0}),
        (EarlyStopping, {"patience": 1.5}),
        (EarlyStopping, {"min_delta": float("nan")}),
        (TorchProfiler, {"num_steps": 0}),
        (TorchProfiler, {"skip_first": -1}),
    ],
)
def test_wrong_arguments_raise(kind, arguments):
    with pytest.raises((TypeError, ValueError), match=rf"{next(iter(arguments))}="):
        kind(**arguments)


SCRIPT = """
import sys, time
from raysgd import TorchTrainer
from raysgd.callbacks import CheckpointCallback
from raysgd.checkpoint import store
from tests.operators import Classifier

write = store.write_file
store.write_file = lambda *given: (time.sleep(0.5), write(*given))  # until training has ended
saving = CheckpointCallback(sys.argv[1], blocking=False)
trainer = TorchTrainer(training_operator_cls=Classifier, use_local=True, callbacks=[saving])
trainer.train()
"""


def test_a_script_that_ends_does_not_lose_its_write(tmp_path):
    run_python("-c", SCRIPT, tmp_path)
    assert read_manifest(tmp_path / names(tmp_path)[0]).epoch == 1
