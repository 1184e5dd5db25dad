"""Callbacks of a trainer with several workers: real losses, pauses, and calls between them."""

import json
import os
import signal
import time

import pytest
import torch

from raysgd import ElasticConfig, TorchTrainer
from raysgd.callbacks import CheckpointCallback, LearningRateLogger, TorchProfiler
from raysgd.errors import CallbackError
from tests.distributed.test_elastic import Killer, SlowLedger, kill
from tests.distributed.test_exactness import ledger_of
from tests.distributed.test_failures import Faulty, order, reached
from tests.operators import Classifier, replica_hash
from tests.unit.callbacks.spy import Spy


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def told(spy):
    return [detail for _, hook, detail in spy.calls if hook == "on_event"]


def test_a_loss_and_a_newcomer_reach_callbacks_and_the_run_folder(ray_cluster, tmp_path):
    """Each once, in order, with the workers that are left, while the call still runs."""

    class Timing(Spy):
        def on_event(self, trainer, event):
            super().on_event(trainer, event)
            self.calls.append((self.name, "written", len(lines(tmp_path / "events.jsonl"))))
            assert trainer.last_call is None, "the call has not returned yet"

    spy, began = Timing(), time.time()
    config = {"num_samples": 3000, "batch_size": 4, "loader_workers": 0}
    with TorchTrainer(
        training_operator_cls=SlowLedger,
        config={**config, "until_size": 2, "hold_at": 3000},
        num_workers=2,
        callbacks=[spy],
        logdir=tmp_path,
    ) as trainer:
        pid = trainer.apply_all_workers(os.getpid)[1]
        (tmp_path / "events.jsonl").touch()
        with Killer((lambda: reached(trainer) > 5, kill(pid))):
            metrics = trainer.train()
        assert metrics["num_samples"] == 3000
        events = trainer.events
    kinds = [event.kind for event in events]
    assert kinds == ["started", "lost", "resumed", "grown"]
    assert told(spy) == kinds
    assert spy.hooks[-2:] == ["on_epoch_end", "on_train_end"]
    written = lines(tmp_path / "events.jsonl")
    assert [line["kind"] for line in written] == kinds
    assert [line["num_workers"] for line in written] == [2, 1, 1, 2]
    assert [line["step"] for line in written] == [event.step for event in events]
    assert str(pid) in written[1]["cause"]
    assert began < written[0]["time"] <= written[1]["time"] < written[3]["time"] < time.time()
    run, trained = lines(tmp_path / "metrics.jsonl")
    assert (run["num_workers"], trained["num_workers"], trained["kind"]) == (2, 2, "train")
    assert trained["metrics"]["num_samples"] == 3000


def test_events_before_a_call_that_fails_reach_callbacks_before_the_error(ray_cluster, tmp_path):
    spy = Spy()
    with TorchTrainer(
        training_operator_cls=Faulty,
        config={"folder": str(tmp_path)},
        num_workers=2,
        elastic=ElasticConfig(grow=False),
        callbacks=[spy],
    ) as trainer:
        order(tmp_path, "train", 1, 3, "die")
        order(tmp_path, "train", 0, 5, "raise")
        with pytest.raises(KeyError, match="a mistake of the user"):
            trainer.fit(2)
        assert [call[1:] for call in spy.calls] == [
            ("on_train_start", 0),
            ("on_event", "started"),
            ("on_event", "lost"),
            ("on_event", "resumed"),
            ("on_event", "user_error"),
            ("on_exception", "KeyError"),
            ("on_train_end", 1),
        ]
        assert [event.num_workers for event in trainer.events] == [2, 1, 1, 1]
        assert len(trainer.fit(1)) == 1


def test_pauses_change_neither_metrics_nor_bits_and_a_saved_one_is_gone_on_from(
    ray_cluster, tmp_path
):
    def train(callbacks, logdir=None):
        with TorchTrainer(
            training_operator_cls=Classifier,
            config={"momentum": 0.9, "batch_norm": True, "batch_size": 30, "lr": 0.25},
            num_workers=2,
            callbacks=[*callbacks, LearningRateLogger()],
            logdir=logdir,
        ) as trainer:
            history = trainer.fit(2)
            prints = trainer.apply_all_operators(replica_hash)
            assert len(set(prints)) == 1
            return history, prints[0], trainer.global_step

    profiler = TorchProfiler(num_steps=2, skip_steps=3)
    plain = train([])
    folder = tmp_path / "checkpoints"
    paused = train([CheckpointCallback(every=4, keep=None), profiler], tmp_path)
    assert paused == plain
    history, _, num_steps = plain
    assert [entry["lr"] for entry in history] == [0.25, 0.25]
    saved = sorted(folder.glob("*.ckpt"))
    assert [int(path.name[-13:-5]) for path in saved] == list(range(4, num_steps + 1, 4))
    assert profiler.trace == tmp_path / "profile" / "trace-step-00000005.json.gz"
    assert profiler.trace.stat().st_size > 1000

    for path in saved[2:]:
        path.unlink()
    resumed = train([CheckpointCallback(folder)])
    assert resumed[1:] == plain[1:]
    assert resumed[0][-1] == history[-1]


def test_losses_between_pauses_lose_no_sample_and_say_what_metrics_died(ray_cluster, tmp_path):
    """What a lost worker measured before the pauses is gone as well, and the event says so."""
    saving = CheckpointCallback(tmp_path / "checkpoints", every=5, keep=None)
    config = {"num_samples": 2400, "batch_size": 4, "loader_workers": 0}
    with TorchTrainer(
        training_operator_cls=SlowLedger,
        config={**config, "until_size": 3, "hold_at": 1200},
        num_workers=3,
        callbacks=[saving],
    ) as trainer:
        pids = trainer.apply_all_workers(os.getpid)
        with Killer((lambda: reached(trainer) > 22, kill(pids[2]))):
            metrics = trainer.train()
        assert torch.equal(ledger_of(trainer), torch.ones(2400))
        assert metrics["num_samples"] == 2400
        lost = next(event for event in trainer.events if event.kind == "lost")
        assert lost.num_batches == lost.step > 20
        assert "grown" in [event.kind for event in trainer.events]
        names = [path.name for path in (tmp_path / "checkpoints").glob("*.ckpt")]
        saved = sorted(int(name[-13:-5]) for name in names)
        assert saved == list(range(5, trainer.global_step + 1, 5))


def test_a_worker_that_is_lost_in_a_pause_costs_no_sample(ray_cluster, tmp_path):
    class Killing(Spy):
        def on_pause(self, trainer):
            super().on_pause(trainer)
            if trainer.global_step == 10:
                os.kill(pids[1], signal.SIGKILL)
            trainer.save(tmp_path / "state.pt")

    spy = Killing(pause_every=10)
    config = {"num_samples": 800, "batch_size": 4, "loader_workers": 0}
    with TorchTrainer(
        training_operator_cls=SlowLedger,
        config={**config, "until_size": 0},
        num_workers=2,
        elastic=ElasticConfig(grow=False),
        callbacks=[spy],
    ) as trainer:
        pids = trainer.apply_all_workers(os.getpid)
        metrics = trainer.train()
        assert torch.equal(ledger_of(trainer), torch.ones(800))
        assert metrics["num_samples"] == 800
        assert told(spy) == ["started", "lost", "resumed"]
        assert trainer.events[1].num_batches == trainer.events[1].step == 10


def test_a_callback_that_raises_leaves_every_worker_in_the_same_state(ray_cluster):
    spies = [Spy("bad", fail_in=["on_epoch_end", "on_pause"], pause_every=3), Spy("good")]
    with TorchTrainer(training_operator_cls=Classifier, num_workers=2, callbacks=spies) as trainer:
        with pytest.raises(CallbackError, match="Spy failed in on_pause") as caught:
            trainer.train()
        assert "on_epoch_end" in "".join(caught.value.__notes__)
        assert spies[1].hooks[-2:] == ["on_epoch_end", "on_exception"]
        done = trainer.global_step
        spies[0].fail_in = ()
        assert trainer.train()["epoch"] == 2
        assert trainer.global_step == 2 * done
        assert len(set(trainer.apply_all_operators(replica_hash))) == 1
