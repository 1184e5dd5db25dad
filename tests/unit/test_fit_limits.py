"""Where ``fit()`` ends early, and how much of the data it takes for an epoch.

An epoch is five batches of eight samples.
"""

import itertools
import logging

import pytest
import torch

from raysgd.callbacks import CheckpointCallback
from raysgd.data.partition import EpochPartition
from tests.operators import parameters
from tests.unit.callbacks.spy import Spy
from tests.unit.recorder import Recorder, Streaming, Unsized

KINDS = pytest.mark.parametrize(
    ("operator_cls", "config"),
    [(Recorder, {}), (Streaming, {}), (Streaming, {"wrap": list})],
    ids=["sharded", "unsized", "list"],
)


@KINDS
def test_an_epoch_and_a_validation_can_be_limited(make_trainer, operator_cls, config):
    trainer = make_trainer(operator_cls, config)
    operator = trainer.get_local_operator()
    history = trainer.fit(2, limit_train_batches=2, limit_val_batches=3)
    assert [entry["epoch"] for entry in history] == [1, 2]
    assert [entry["num_samples"] for entry in history] == [16, 16]
    assert operator.trained == [*range(16), *range(16)]
    assert operator.validated == [*range(24), *range(24)]
    assert history.stop_reason is None
    assert trainer.train()["num_samples"] == trainer.validate()["num_samples"] == 40


def test_a_limit_may_be_a_share(make_trainer):
    trainer = make_trainer(Recorder)
    assert trainer.fit(1, limit_train_batches=0.5)[0]["num_samples"] == 16
    assert trainer.fit(2, limit_train_batches=1.0, limit_val_batches=0.01)[0]["num_samples"] == 40
    assert len(trainer.get_local_operator().validated) == 40 + 8
    with pytest.raises(ValueError, match="a Unsized, has no length"):
        make_trainer(Streaming).fit(1, limit_train_batches=0.5)


def test_limited_epochs_differ_unless_overfit_batches_is_set(make_trainer):
    trainer = make_trainer(Recorder, {"shuffle": True})
    trained = trainer.get_local_operator().trained
    trainer.fit(3, limit_train_batches=1)
    assert trained[:8] != trained[8:16] != trained[16:]
    trained.clear()
    history = trainer.fit(6, overfit_batches=2)
    assert trained[:16] == trained[16:32] == trained[32:]
    assert trainer.latest_metrics["batch_count"] == 2
    assert history[-1]["num_samples"] == 16


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
    assert "max_steps=7 is reached" in caplog.text
    assert [entry["num_samples"] for entry in trainer.fit(2)] == [24]
    assert trainer.get_local_operator().trained == [*range(40), *range(40)]
    assert len(trainer.fit(max_steps=20)) == 2
    assert trainer.epoch == 4


def test_fit_ends_after_max_time_s(make_trainer, tmp_path):
    trainer = make_trainer(Recorder, callbacks=[CheckpointCallback(tmp_path, every=2)])
    history = trainer.fit(max_time_s=1e-9)
    assert history == []
    history = trainer.fit(max_time_s=0.3)
    assert history.stop_reason == "max_time_s=0.3 is over"
    steps = trainer.global_step
    assert len(history) == -(-steps // 5) > 0
    assert len(trainer.get_local_operator().trained) == 8 * steps


class Endless(Unsized):
    def __iter__(self):
        return itertools.cycle(self._batches)


def test_max_time_s_ends_an_endless_epoch(make_trainer):
    trainer = make_trainer(Streaming, {"wrap": Endless})
    history = trainer.fit(max_time_s=0.3)
    assert history.stop_reason == "max_time_s=0.3 is over"
    assert trainer.epoch == 1
    assert history[0]["num_samples"] == 8 * trainer.global_step > 0
    assert trainer.train(num_steps=2)["num_samples"] == 16


def test_fast_dev_run_runs_everything_and_restores_the_trainer(make_trainer, tmp_path):
    spy = Spy()
    trainer = make_trainer(Recorder, {"dropout": 0.5}, callbacks=[spy], logdir=tmp_path)
    trainer.train(num_steps=2)
    before = parameters(trainer.get_local_operator())
    place, latest, random = trainer.global_step, trainer.latest_metrics, torch.get_rng_state()
    num_hooks = len(spy.hooks)
    (metrics,) = trainer.fit(9, fast_dev_run=True, callbacks=[CheckpointCallback()])
    assert metrics["num_samples"] == 8
    assert metrics["val_loss"] > 0
    assert (trainer.global_step, trainer.latest_metrics) == (place, latest)
    assert torch.equal(parameters(trainer.get_local_operator()), before)
    assert torch.equal(torch.get_rng_state(), random)
    assert len(spy.hooks) == num_hooks
    assert not (tmp_path / "checkpoints").exists()
    trainer.get_local_operator().trained.clear()
    trainer.train()
    assert trainer.get_local_operator().trained == list(range(16, 40))


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({}, TypeError, "num_epochs=None.*must be an int.*max_steps or max_time_s"),
        ({"max_steps": 0}, ValueError, r"max_steps=0\): must be at least 1"),
        ({"max_time_s": 0}, ValueError, "max_time_s=0.: must be a positive number"),
        ({"max_time_s": "5"}, ValueError, "max_time_s='5'.: must be a positive number"),
        ({"limit_train_batches": 0}, ValueError, "limit_train_batches=0.: must be a number of"),
        ({"limit_val_batches": 1.5}, ValueError, "limit_val_batches=1.5.*up to 1.0"),
        ({"overfit_batches": "2"}, ValueError, "overfit_batches='2'.: must be a number"),
        ({"overfit_batches": 2, "limit_val_batches": 1}, ValueError, "pass either"),
    ],
)
def test_wrong_limits_are_errors(make_trainer, given, error, text):
    with pytest.raises(error, match=text):
        make_trainer(Recorder).fit(1 if given else None, **given)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_workers_share_out_what_is_left_of_a_limited_epoch(world_size, drop_last):
    """In the same steps, also where the group becomes smaller on the way."""
    shards = [
        EpochPartition(100, 4, world_size, rank, drop_last, full_size=3, max_steps=5)
        for rank in range(world_size)
    ]
    spans = sorted(span for shard in shards for span in shard.batches(24))
    assert [n for start, stop in spans for n in range(start, stop)] == list(range(24, 60))
    assert {shard.num_steps(24) for shard in shards} == {3}
    assert shards[0].num_steps(60) == shards[0].num_steps(100) == 0
