"""Early stopping when a metric no longer improves."""

import pytest

from raysgd.callbacks import Callback, CheckpointCallback, EarlyStopping
from raysgd.errors import CallbackError
from tests.unit.callbacks.spy import Scripted

NAN = float("nan")


@pytest.mark.parametrize(
    ("arguments", "values", "epochs"),
    [
        ({}, [5, 4, 3, 2, 1], 5),
        ({}, [3, 4, 4, 4, 4], 4),
        ({}, [3, 3, 3, 3, 1], 4),
        ({"mode": "max"}, [3, 2, 2, 4, 1], 5),
        ({"mode": "max"}, [3, 2, 1, 0, 9], 4),
        ({"patience": 1}, [3, 4, 1], 2),
        ({"patience": 2, "min_delta": 0.5}, [3, 2.6, 2.6, 1], 3),
        ({"patience": 2, "min_delta": 0.5}, [3, 2.4, 1.8, 1], 4),
        ({"patience": 2}, [NAN, NAN, 1], 2),
        ({"patience": 2}, [NAN, 2, NAN, NAN, 1], 4),
        ({"patience": 2}, [2, NAN, 1, 0], 4),
        ({"patience": 2}, ["bad"], None),
    ],
    ids=str,
)
def test_it_stops_when_the_metric_has_not_improved(make_trainer, arguments, values, epochs):
    callbacks = [Scripted(values), EarlyStopping("score", **arguments)]
    trainer = make_trainer(callbacks=callbacks)
    if epochs is None:
        with pytest.raises(CallbackError, match="must be a number") as caught:
            trainer.fit(len(values))
        assert isinstance(caught.value.__cause__, ValueError)
        return
    history = trainer.fit(len(values))
    assert len(history) == epochs
    if epochs < len(values):
        assert history.stop_reason.startswith("score has not improved")
    (started := make_trainer()).train(num_steps=1)
    for each, added in ((trainer, ()), (make_trainer(), callbacks)):
        each.load_state_dict(started.state_dict())
        assert len(each.fit(len(values), callbacks=added)) == epochs, "it begins again"


@pytest.mark.parametrize(
    ("name", "best"),
    [
        *((name, 0.9) for name in ("val_accuracy", "mean_IoU", "val_answer_f1")),
        *((name, 0.1) for name in ("valErr", "accuracy_loss", "word_error", "quality")),
    ],
)
def test_mode_follows_from_the_name(make_trainer, tmp_path, name, best, caplog):
    stopping, values = EarlyStopping(name), [0.5, 0.9, 0.1]
    saving = CheckpointCallback(tmp_path, keep=1, monitor=name)
    make_trainer(callbacks=[Scripted(values, name), stopping, saving]).fit(3, verbose=False)
    assert stopping.best_value == best
    assert f"epoch-0000{values.index(best) + 1}" in saving.best
    advice = 'smaller values count as better. If not, pass mode="max".'
    assert caplog.text.count(advice) == 2 * (name == "quality")


def test_several_validations_of_an_epoch_count_once(make_trainer, tmp_path):
    class Validating(Callback):
        def on_epoch_end(self, trainer, metrics):
            trainer.validate()
            trainer.validate()

    values = [1, 2, 3, 4]
    trainer = make_trainer(callbacks=[Scripted(values), Validating()])
    stopping = EarlyStopping("score", patience=3)
    assert len(trainer.fit(9, callbacks=[stopping], verbose=False)) == 4
    again = EarlyStopping("score", patience=4)
    again.load_state_dict(stopping.state_dict())
    trainer.validate()
    again.on_epoch_result(trainer, trainer.last_call, {"score": 4})
    assert again.num_waited == 3
