"""Limits that end ``fit()`` early. An epoch is five batches of eight samples."""

import logging

from tests.unit.callbacks.spy import Spy
from tests.unit.recorder import Recorder


def test_fit_continues_within_an_epoch_after_max_steps(make_trainer, caplog):
    spy = Spy()
    trainer = make_trainer(Recorder, callbacks=[spy])
    history = trainer.fit(9, max_steps=7)
    assert history.stop_reason == "max_steps=7 is reached"
    assert [entry["num_samples"] for entry in history] == [40, 16]
    assert ["val_loss" in entry for entry in history] == [True, False]
    assert spy.hooks[2:-1] == ["on_epoch_end", "on_validation_end", "on_steps_end"]
    with caplog.at_level(logging.WARNING):
        assert trainer.fit(max_steps=7) == []
    assert caplog.messages == ["fit() ends at step 7: max_steps=7 is reached"]
    assert [entry["num_samples"] for entry in trainer.fit(2)] == [24]
    assert trainer.get_local_operator().trained == [*range(40), *range(40)]
    assert len(trainer.fit(max_steps=20)) == 2
    assert trainer.epoch == 4
