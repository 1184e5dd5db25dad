"""Results, state, files, and shutdown of trainers, with one worker in this process."""

import gc
import sys
import traceback
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file

from raysgd._internal.worker_status import Measurements, WorkerStatus
from raysgd.callbacks import Callback, CheckpointCallback
from raysgd.checkpoint import CheckpointStore, read_manifest
from raysgd.checkpoint.file import CheckpointFile
from raysgd.cluster.worker import Outcome
from raysgd.errors import CheckpointError
from raysgd.loop.requests import StateRequest
from tests.operators import Adversaries, Classifier
from tests.unit.elastic.test_log_points import part
from tests.unit.recorder import Recorder


def state_of(trainer):
    return trainer.get_local_operator().model.state_dict()


def equal(left, right):
    return all(torch.equal(left[name], right[name]) for name in left)


# ---- results


def test_a_logged_point_counts_the_samples_of_a_worker_that_left(make_trainer, monkeypatch):
    points, calls = [], []

    class Leaving(Callback):
        def next_pause(self, global_step):
            return global_step + 1

        def on_pause(self, trainer):  # as if a second worker had left after step 1
            points = calls[-1].log_points
            measured = Measurements(log_points=[part(points.call_number, 1, 4, False)])
            points.add({"worker": WorkerStatus(measured=measured)}, ())

        def on_log(self, trainer, call, metrics):
            points.append(metrics["num_samples"])

    trainer = make_trainer(callbacks=[Leaving()])
    run = trainer._controller.run
    monkeypatch.setattr(trainer._controller, "run", lambda call: calls.append(call) or run(call))
    trainer.fit(max_steps=2, log_every=2)
    assert points == [20]


def test_metrics_have_the_names_that_users_know(make_trainer):
    trainer = make_trainer()
    counts, accuracy = {"num_samples", "batch_count"}, {"val_accuracy", "last_val_accuracy"}
    assert set(trainer.train()) == counts | {"epoch", "train_loss", "last_train_loss"}
    assert set(trainer.validate()) == counts | accuracy | {"val_loss", "last_val_loss"}


@pytest.mark.parametrize("in_pause", [False, True])
def test_metrics_of_workers_that_have_left_count(make_trainer, monkeypatch, in_pause):
    class Saving(Callback):
        def next_pause(self, global_step):
            return 1 if in_pause and global_step < 1 else None

        def on_pause(self, trainer):
            trainer.state_dict()

    trainer = make_trainer(callbacks=[Saving()])
    run = trainer._dispatcher.controller.run

    def leave(call):
        answers = run(call)
        if call.leaving_metrics_request and isinstance(call.request, StateRequest) == in_pause:
            call.leaving_outcomes.append(Outcome("ok", {"num_samples": 7}, WorkerStatus()))
        return answers

    monkeypatch.setattr(trainer._dispatcher.controller, "run", leave)
    assert trainer.train()["num_samples"] == 47


def test_train_reaches_train_batch_in_thirteen_frames(make_trainer):
    class Deep(Recorder):
        def train_batch(self, batch, batch_info):
            stacks.append([frame.name for frame in traceback.extract_stack()])
            return super().train_batch(batch, batch_info)

    stacks, caller = [], sys._getframe().f_code.co_name
    make_trainer(Deep).train(num_steps=1)
    names = stacks[0][stacks[0].index(caller) + 1 :]
    assert names[-1] == "train_batch"
    assert len(names) <= 13, names


def test_a_refused_call_of_another_thread_changes_nothing(make_trainer):
    class Shared(Classifier):
        def train_batch(self, batch, batch_info):
            with ThreadPoolExecutor() as pool, pytest.raises(RuntimeError, match="Another thread"):
                pool.submit(trainer.train).result()
            return super().train_batch(batch, batch_info)

    trainer = make_trainer(Shared)
    assert trainer.train(num_steps=2)["num_samples"] == 16


# ---- functions on workers


@pytest.mark.parametrize("value", [None, b"", {"a": torch.ones(1)}, lambda: 1])
def test_results_of_functions_on_workers_are_returned(make_trainer, value):
    trainer = make_trainer()
    assert trainer.apply_all_workers(lambda: value) == [value]
    assert trainer.apply_all_operators(lambda o: (o, value)) == [
        (trainer.get_local_operator(), value)
    ]


# ---- state


SCHEDULERS = {
    "LambdaLR": lambda s, o: s.LambdaLR(o, lambda step: 0.9**step),
    "SequentialLR": lambda s, o: s.SequentialLR(
        o, [s.ConstantLR(o), s.ExponentialLR(o, 0.9)], milestones=[3]
    ),
    "CyclicLR": lambda s, o: s.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "OneCycleLR": lambda s, o: s.OneCycleLR(o, 0.1, total_steps=20),
    "a scheduler in another": lambda s, o: WarmUp(o, s.StepLR(o, 1)),
    "schedulers in a list": lambda s, o: WarmUp(o, [s.StepLR(o, 1), s.StepLR(o, 2)]),
}


class WarmUp(torch.optim.lr_scheduler.LRScheduler):
    """Steps other schedulers later, as the GradualWarmupScheduler of warmup-scheduler does."""

    def __init__(self, optimizer, later):
        self.later = later
        super().__init__(optimizer)

    def get_lr(self):
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, epoch=None):
        if self.last_epoch > 0:
            for each in self.later if isinstance(self.later, list) else [self.later]:
                each.step()
        super().step(epoch)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_comes_back_from_a_file(make_trainer, tmp_path, name):
    def scheduler(optimizer):
        return SCHEDULERS[name](torch.optim.lr_scheduler, optimizer)

    arguments = {"config": {"scheduler": scheduler}, "scheduler_step_freq": "batch"}
    trainer, other = (make_trainer(Recorder, **arguments) for _ in range(2))
    trainer.train(num_steps=4)
    other.load(trainer.save(tmp_path / "state.pt"))
    for each in (trainer, other):
        each.train(num_steps=3)
    rates = [each.get_local_operator().optimizer.param_groups[0]["lr"] for each in (trainer, other)]
    assert rates[0] == rates[1]
    assert equal(state_of(trainer), state_of(other))


def test_training_does_not_change_a_returned_state(make_trainer):
    trainer = make_trainer()
    state = trainer.state_dict()
    weights = state["models"][0]["0.weight"].clone()
    trainer.train()
    assert torch.equal(state["models"][0]["0.weight"], weights)
    trainer.load_state_dict(state, blocking=True)
    assert trainer._controller.snapshots.load()["global_step"] == 0
    assert torch.equal(state_of(trainer)["0.weight"], weights)
    trainer.train()
    assert torch.equal(state["models"][0]["0.weight"], weights)
    assert trainer.global_step == 5


# ---- files


def test_a_loaded_file_is_the_snapshot_even_if_another_file_replaces_it(
    make_trainer, tmp_path, monkeypatch
):
    trainer, loaded = make_trainer(Recorder), []
    trainer.train(num_steps=3)
    path = trainer.save(tmp_path / "state.pt")
    expected = state_of(trainer)["0.weight"].clone()
    read = CheckpointFile.read

    def noted(file):
        loaded.append(weakref.ref((state := read(file))["models"][0]["0.weight"]))
        return state

    monkeypatch.setattr(CheckpointFile, "read", noted)
    trainer.load(path)
    assert loaded[0]() is None  # the driver holds no copy
    trainer.train()
    trainer.save(path)
    kept = trainer._controller.snapshots.load()
    assert kept["global_step"] == 3
    assert torch.equal(kept["models"][0]["0.weight"], expected)


def test_the_manifest_says_where_a_state_came_from(make_trainer, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    first = make_trainer(Recorder)
    first.train(num_steps=7)
    manifest = read_manifest(first.save(tmp_path / "0.pt"))
    assert (manifest.world_size, manifest.epoch, manifest.global_step) == (1, 2, 7)
    assert manifest.operator_name == "Recorder"
    facts = manifest.provenance
    assert facts.keys() >= {"started", "seed"}  # parallel tests have no command
    assert "parent" not in facts
    loader = {"samples": 40, "fingerprint": "40 samples, drop_last False, tensors 1d0762da"}
    assert facts["loaders"] == {"train": loader, "validation": loader}

    store = CheckpointStore(tmp_path / "run", experiment="Recorder")
    first.load(tmp_path / "0.pt")
    newest = store.save(first.state_dict())  # writes what `save` writes
    assert read_manifest(newest).provenance == {**facts, "parent": "~/0.pt"}
    saving = CheckpointCallback(tmp_path / "run", every=2)
    resumed = make_trainer(Recorder, callbacks=[saving])
    resumed.train(num_steps=2)
    assert read_manifest(store.restore().path).provenance["parent"] == f"~/run/{Path(newest).name}"
    with pytest.raises(CheckpointError):
        resumed.load(tmp_path / "missing.pt")
    assert resumed.provenance["parent"] == f"~/run/{Path(newest).name}"

    assert read_manifest(first.save(tmp_path / "1.pt", provenance=False)).provenance == {}
    saving = CheckpointCallback(tmp_path / "none", provenance=False, experiment="x")
    make_trainer(callbacks=[saving]).fit(1, validate_every=None)
    store = CheckpointStore(tmp_path / "none", experiment="x")
    assert read_manifest(store.restore().path).provenance == {}


def test_save_and_load_take_a_url(make_trainer):
    trainer = make_trainer()
    url = "memory://trainer/state.pt"
    try:
        trainer.train(num_steps=3)
        assert trainer.save(url) == url
        other = make_trainer()
        other.load(url)
        assert other.global_step == 3
    finally:
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]


def test_save_model_writes_the_weights(make_trainer, tmp_path):
    trainer = make_trainer(Adversaries, {"batch_size": 5})
    path = trainer.save_model(tmp_path / "models.safetensors")
    assert path == str(tmp_path / "models.safetensors")
    weights = {f"1.{key}": v for key, v in trainer.state_dict()["models"][1].items()}
    written = load_file(path)
    assert len(written) == 2 * len(weights)
    assert equal(weights, written)
    single = make_trainer()
    assert equal(single.state_dict()["models"][0], load_file(single.save_model(path)))


# ---- shutdown


def test_shutdown_frees_the_operator(make_trainer):
    """It is in a reference cycle, and keeps the threads of a process group until it is freed."""
    trainer = make_trainer()
    trainer.train(num_steps=1)
    operator = weakref.ref(trainer.get_local_operator())
    gc.disable()
    try:
        trainer.shutdown()
        assert operator() is None
    finally:
        gc.enable()


def test_every_call_after_shutdown_is_an_error(make_trainer, tmp_path):
    trainer = make_trainer()
    state = trainer.state_dict()
    trainer.shutdown()
    names = ("train", "validate", "state_dict", "get_model", "get_local_operator")
    calls = [
        *(getattr(trainer, name) for name in names),
        lambda: trainer.load_state_dict(state),
        lambda: trainer.save(tmp_path / "state.pt"),
        lambda: trainer.save_model(tmp_path / "model.safetensors"),
        lambda: trainer.load(tmp_path / "state.pt"),
        lambda: trainer.update_scheduler(1.0),
        lambda: trainer.apply_all_workers(int),
        lambda: trainer.apply_all_operators(id),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="TorchTrainer is shut down"):
            call()
    assert list(tmp_path.iterdir()) == []


def test_a_with_block_shuts_the_trainer_down(make_trainer):
    with make_trainer() as trainer:
        trainer.train()
    trainer.shutdown(force=True)  # does nothing
    assert (trainer.num_workers, trainer.epoch, trainer.global_step) == (0, 1, 5)
    with pytest.raises(KeyError), make_trainer() as trainer:
        raise KeyError
    assert trainer.num_workers == 0


def test_a_config_that_differs_from_the_checkpoint_is_logged(make_trainer, caplog):
    before = make_trainer(config={"lr": 0.1, "api_key": "a", "note": "x"}).state_dict()
    assert before["config"]["api_key"] == "***"
    make_trainer(config={"lr": 0.1, "api_key": "b", "note": "x"}).load_state_dict(before)
    assert not caplog.messages
    make_trainer(config={"lr": 0.5, "note": "x", "new": 1}).load_state_dict(before)
    (message,) = caplog.messages
    assert "The config differs from that of the checkpoint: lr 0.1 → 0.5." in message


def flat(optimizer):
    """Return a scheduler that halves the rate with each metric except the first."""
    return torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0, threshold=1e9, threshold_mode="abs"
    )


class ByLoss(Callback):
    def on_validation_end(self, trainer, metrics):
        trainer.update_scheduler(metrics["val_loss"])


def test_a_callback_may_step_a_plateau_scheduler(make_trainer, tmp_path):
    for num_epochs in (2, 4):
        callbacks = [ByLoss(), CheckpointCallback(tmp_path, monitor="val_loss")]
        settings = {"callbacks": callbacks, "scheduler_step_freq": "manual"}
        trainer = make_trainer(Recorder, {"scheduler": flat}, **settings)
        trainer.fit(num_epochs)
        (group,) = trainer.get_local_operator().optimizer.param_groups
        assert group["lr"] == 0.01 * 0.5 ** (num_epochs - 1)
