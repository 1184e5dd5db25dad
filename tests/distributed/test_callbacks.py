"""Callbacks of a trainer with several workers: lost workers, pauses, errors, and shutdown."""

import json
import math
import os
import signal
import time

import pytest

from raysgd.callbacks import CheckpointCallback, LearningRateMonitor, TerminateOnNaN, TorchProfiler
from tests.ends import check_that_shutdown_ends
from tests.faulty import check_epoch, faulty_trainer, fingerprints, order, pids_of
from tests.operators import NUM_SAMPLES
from tests.shared import Shared
from tests.unit.callbacks.spy import Spy
from tests.unit.callbacks.test_checkpoint import steps


@pytest.fixture(scope="module")
def module_workers(module_cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("orders")
    config = {"batch_size": 16, "lr": 0.25}
    logdir = tmp_path_factory.mktemp("run")
    with faulty_trainer(folder, 2, config=config, logdir=logdir) as trainer:
        yield Shared(trainer, folder)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def told(spy):
    return [detail for _, hook, detail in spy.calls if hook == "on_event"]


def test_a_loss_in_a_pause_costs_no_sample_and_its_events_reach_callbacks(fresh, tmp_path):
    """Each event arrives once, in order, and with the number of remaining workers."""
    trainer, pids, began = fresh.trainer, pids_of(fresh.trainer), time.time()
    log, before = trainer.logdir / "events.jsonl", trainer.last_call

    class Killing(Spy):
        def on_pause(self, trainer):
            super().on_pause(trainer)
            if trainer.global_step == 10:
                os.kill(pids[1], signal.SIGKILL)
            trainer.save(tmp_path / "state.pt")

        def on_event(self, trainer, event):
            super().on_event(trainer, event)
            assert lines(log)[-1]["kind"] == event.kind
            assert trainer.last_call is before, "the call has not returned yet"

    spy = Killing(pause_every=10)
    saving = CheckpointCallback(tmp_path / "checkpoints", every=5, keep=None)
    (fresh.folder / "until_size").write_text("2")
    trainer.fit(1, None, callbacks=[spy, saving])
    check_epoch(trainer)
    assert fresh.kinds == told(spy) == ["lost", "regrouped", "grown"]
    assert fresh.events[0].step == 10
    end = trainer.global_step
    assert steps(tmp_path / "checkpoints") == sorted({*range(5, end, 5), end})
    assert spy.hooks[-2:] == ["on_epoch_end", "on_train_end"]
    assert [line["kind"] for line in lines(log)] == [event.kind for event in trainer.events]
    written = lines(log)[-3:]
    assert [line["num_workers"] for line in written] == [1, 1, 2]
    assert [line["step"] for line in written] == [event.step for event in fresh.events]
    assert str(pids[1]) in written[0]["cause"]
    assert began < written[0]["time"] <= written[1]["time"] < written[2]["time"] < time.time()
    run, *_, trained = lines(trainer.logdir / "metrics.jsonl")
    assert (run["num_workers"], trained["num_workers"], trained["kind"]) == (2, 2, "train")


def test_pauses_do_not_change_results_and_a_checkpoint_resumes_them(fresh):
    trainer = fresh.trainer

    def fit(*callbacks, **arguments):
        trainer.load_state_dict(fresh.start)
        history = trainer.fit(2, callbacks=[*callbacks, LearningRateMonitor()], **arguments)
        prints = fingerprints(trainer)
        assert len(set(prints)) == 1
        return list(history), prints[0], trainer.global_step

    profiler = TorchProfiler(num_steps=2, skip_first=3)
    plain = fit()
    folder = trainer.logdir / "checkpoints"
    assert fit(CheckpointCallback(every=8, keep=None), profiler, log_every=8) == plain
    history, _, num_steps = plain
    points = [line for line in lines(trainer.logdir / "metrics.jsonl") if line["kind"] == "step"]
    assert [point["global_step"] for point in points] == list(range(8, num_steps + 1, 8))
    # The last batch is uneven, so each worker counts by its number of samples.
    sums = [p["metrics"]["train_loss"] * p["metrics"]["num_samples"] for p in points]
    total = sum(entry["train_loss"] for entry in history)
    assert sum(sums) / NUM_SAMPLES == pytest.approx(total)
    assert {point["metrics"]["lr-0"] for point in points} == {0.25}
    assert all(point["metrics"]["grad_norm-0"] > 0 for point in points)
    assert [(entry["lr-0"], entry["lr-1"]) for entry in history] == [(0.25, 1.0)] * 2
    assert steps(folder) == list(range(8, num_steps + 1, 8))
    assert profiler.trace_path == trainer.logdir / "profile" / "trace-step-00000005.json.gz"
    assert profiler.trace_path.stat().st_size > 1000

    for path in sorted(folder.glob("*.ckpt"))[2:]:
        path.unlink()
    resumed = fit(CheckpointCallback(folder))
    assert resumed[1:] == plain[1:]
    assert resumed[0][-1] == history[-1]


def test_a_bad_loss_on_one_worker_ends_the_step_on_all(fresh, tmp_path):
    def spoil(operator):
        def train_batch(batch, batch_info):
            metrics = type(operator).train_batch(operator, batch, batch_info)
            is_bad = operator.world_rank == 1 and batch_info["global_step"] == 5
            return {**metrics, "other_loss": math.nan if is_bad else 1.0}

        operator.train_batch = train_batch

    fresh.trainer.apply_all_operators(spoil)
    history = fresh.trainer.fit(2, callbacks=[TerminateOnNaN()])
    fresh.trainer.apply_all_operators(lambda operator: delattr(operator, "train_batch"))
    assert history.stop_reason == "other_loss is nan in epoch 1, step 6."
    assert len(set(fingerprints(fresh.trainer))) == 1


@pytest.mark.ends_shared
def test_a_fit_is_ended_by_a_shutdown_in_a_callback(fresh):
    trainer, folder = fresh.trainer, fresh.folder
    order(folder, "train", 1, 3, "wait")

    def by_callback(fit, shut_down, is_time):
        class Ending(Spy):
            def on_progress(self, trainer, kind, progress):
                if is_time():
                    shut_down()

        fit([Ending()])

    check_that_shutdown_ends(
        lambda callbacks=(): trainer.fit(2, callbacks=callbacks),
        trainer,
        by_callback,
        (folder / "waiting").exists,
        2,
    )
