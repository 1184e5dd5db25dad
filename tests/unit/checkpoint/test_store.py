"""A folder of checkpoints: what it keeps, what it restores, and what survives a kill."""

import math
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from raysgd._internal.files import temporary_name
from raysgd.checkpoint import CheckpointStore, Manifest, read_manifest, write_file
from raysgd.checkpoint.file import read_checkpoint
from raysgd.checkpoint.location import Location, UnreachableError
from raysgd.errors import CheckpointError
from tests.unit.checkpoint.processes import fork
from tests.unit.checkpoint.states import flip, state_at, step_of


def name_at(step, number=None, epoch=1):
    """Return the name of a checkpoint. By default, its number is its step."""
    return f"{number or step:04d}-epoch-{epoch:05d}-step-{step:08d}.ckpt"


@pytest.fixture(params=["local", "url"])
def folder(request, tmp_path):
    """A folder that does not exist yet, as a path and as a URL."""
    yield str(tmp_path / "run") if request.param == "local" else f"memory://{tmp_path.name}/run"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def names_in(folder):
    if folder.startswith("memory://"):
        own = f"{folder.removeprefix('memory:/')}/"  # other tests leave files in other folders
        found = (path.removeprefix(own) for path in MemoryFileSystem.store if path.startswith(own))
    else:
        found = os.listdir(folder)
    return sorted(found)


def steps_in(folder):
    return sorted(int(re.findall("[0-9]+", name)[2]) for name in names_in(folder))


def restored_step(folder, **arguments):
    return step_of(CheckpointStore(folder, **{"experiment": "first", **arguments}).restore().state)


def saved(folder, *steps, keep=None):
    """Save states at these steps, and return the store."""
    store = CheckpointStore(folder, experiment="first", keep=keep)
    for step in steps:
        store.save(state_at(step))
    return store


# ---- saving and restoring


def test_the_newest_state_comes_back(folder):
    store = CheckpointStore(folder, experiment="first")
    for step in (1, 2):
        path = store.save(state_at(step), {"loss": 0.5}, world_size=3, operator_name="Digits")
    assert path == f"{folder}/{name_at(2)}"
    manifest = read_manifest(path)
    assert (manifest.experiment, manifest.operator_name) == ("first", "Digits")
    assert manifest.world_size == 3
    assert manifest.metrics == {"loss": 0.5}
    restored = CheckpointStore(folder, experiment="first").restore()
    assert (restored.path, step_of(restored.state)) == (path, 2)
    assert names_in(folder) == [name_at(1), name_at(2)]
    assert read_manifest(store.save(state_at(3))).world_size == 1


def test_an_empty_or_missing_folder_has_nothing_to_restore(folder, tmp_path):
    assert CheckpointStore(folder, experiment="first").restore() is None
    assert CheckpointStore(tmp_path, experiment="first").restore() is None
    (tmp_path / temporary_name(name_at(1))).write_bytes(b"half of it")
    assert CheckpointStore(tmp_path, experiment="first").restore() is None


def damage(folder, step):
    (name,) = [name for name in names_in(folder) if f"-{step:08d}." in name]
    with fsspec.open(f"{folder}/{name}", "wb") as file:
        file.write(b"damaged")


def test_the_newest_save_comes_first_after_going_back(folder):
    saved(folder, 10, 20, 30, 40)
    CheckpointStore(folder, experiment="first", keep=4).save(state_at(25))
    assert steps_in(folder) == [20, 25, 30, 40]
    for step in [25, 40, 30, 20]:
        assert restored_step(folder) == step
        damage(folder, step)
    with pytest.raises(CheckpointError, match="No checkpoint in"):
        restored_step(folder)


# ---- what is kept


@pytest.mark.parametrize(("keep", "kept"), [(1, [5]), (2.0, [4, 5]), (None, [1, 2, 3, 4, 5])])
def test_the_newest_are_kept(folder, keep, kept):
    saved(folder, *range(1, 6), keep=keep)
    assert steps_in(folder) == kept


@pytest.mark.parametrize(
    ("mode", "kept"), [("min", [2, 4, 6]), ("max", [1, 3, 6])], ids=["min", "max"]
)
def test_the_best_are_kept_and_always_the_newest(folder, mode, kept):
    store = CheckpointStore(folder, experiment="first", keep=2, monitor="score", mode=mode)
    assert store.best is None
    for step, score in enumerate([0.9, 0.1, 0.8, 0.2, math.nan, 0.5], start=1):
        store.save(state_at(step), {"score": score})
    assert steps_in(folder) == kept
    assert store.best == f"{folder}/{name_at(kept[0])}"
    anew = CheckpointStore(folder, experiment="first", monitor="score", mode=mode)
    assert anew.best == store.best
    assert CheckpointStore(folder, experiment="first").best is None


def test_a_failing_clean_up_does_not_fail_the_save(tmp_path, monkeypatch, caplog):
    def fail(self):
        raise CheckpointError("Cannot remove it.")

    monkeypatch.setattr(Location, "remove", fail)
    store = saved(tmp_path, 1, 2, keep=1)
    assert "Cannot remove it." in caplog.text
    monkeypatch.undo()
    store.save(state_at(3))
    assert steps_in(str(tmp_path)) == [3]


def test_what_killed_writers_left_is_removed_and_nothing_else(folder):
    left = [temporary_name(name) for name in (name_at(1), name_at(7))]
    others = ["notes.txt", ".saving-other", temporary_name("state.pt")]
    for name in (*left, *others):
        Location(folder).make_folder()
        Location(folder).child(name).write(lambda file: file.write(b"half of it"))
    store = CheckpointStore(folder, experiment="first")
    assert store.restore() is None
    assert set(left) < set(names_in(folder))
    store.save(state_at(1))
    assert set(names_in(folder)) == {*others, name_at(1)}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"keep": 0}, "keep=0"),
        ({"keep": True}, "keep=True"),
        ({"keep": 1.5}, "keep=1.5"),
        ({"mode": "best"}, "mode='best'"),
        ({"experiment": ""}, "experiment=''"),
        ({"experiment": None}, "experiment=None"),
    ],
)
def test_wrong_arguments_raise(tmp_path, arguments, words):
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        CheckpointStore(tmp_path, **{"experiment": "first", **arguments})


# ---- skipped checkpoints


def test_damaged_checkpoints_are_skipped_and_named(tmp_path, caplog):
    saved(tmp_path, 1, 2, 3)
    flip(tmp_path / name_at(3), 700)
    (tmp_path / name_at(2)).write_bytes(b"")
    assert restored_step(tmp_path) == 1
    for step in (3, 2):
        assert re.search(f"Skipped {tmp_path / name_at(step)}: .*damaged", caplog.text)


SPOILED = {
    "models": [{"weight": torch.tensor([1.0, math.nan])}],
    "optimizers": [{"state": {0: {"momentum": torch.tensor([math.inf])}}}],
    "averages": {"decay": 0.9, "models": [{"weight": torch.tensor(math.nan)}]},
}


@pytest.mark.parametrize("part", SPOILED)
def test_a_state_that_is_not_finite_replaces_no_checkpoint(folder, part):
    store = saved(folder, 1, keep=1)
    bad = state_at(2) | {part: SPOILED[part]}
    before = names_in(folder)
    with pytest.raises(CheckpointError, match=rf"step 2 is not saved.*{part}.* has NaN"):
        store.save(bad)
    assert names_in(folder) == before


def test_numbers_and_known_buffers_may_be_infinite(tmp_path):
    models = [{"mask": torch.tensor([0.0, -math.inf]), "none": torch.zeros(1).to_sparse()}]
    optimizers = [{"state": {}, "param_groups": [{"growth_rate": math.inf}]}]
    state = {**state_at(1), "models": models, "optimizers": optimizers}
    CheckpointStore(tmp_path, experiment="first").save(state | {"not_finite": ["models[0].mask"]})


def test_a_checkpoint_of_a_newer_format_is_an_error_and_not_skipped(folder):
    store = saved(folder, 1)
    write_file(state_at(2), f"{folder}/{name_at(2)}", Manifest(experiment="first", format=9))
    for call in (store.restore, lambda: store.save(state_at(3))):
        with pytest.raises(CheckpointError, match=r"in format 9.*Update raysgd"):
            call()


def test_files_without_a_manifest_are_skipped(tmp_path, caplog):
    saved(tmp_path, 1)
    torch.save(state_at(9), tmp_path / name_at(9))
    assert restored_step(tmp_path) == 1
    assert "no manifest" in caplog.text


def test_damaged_checkpoints_do_not_count_toward_keep(tmp_path):
    saved(tmp_path, 1, 2, 3)
    flip(tmp_path / name_at(3), 700)
    store = CheckpointStore(tmp_path, experiment="first", keep=2)
    assert step_of(store.restore().state) == 2
    store.save(state_at(4))
    assert steps_in(str(tmp_path)) == [2, 3, 4]
    flip(tmp_path / name_at(4), -3)  # its trailer, so that its experiment is unknown
    CheckpointStore(tmp_path, experiment="first", keep=1).save(state_at(5))
    assert steps_in(str(tmp_path)) == [4, 5]


def test_unreachable_checkpoint_is_an_error_and_not_skipped(tmp_path, monkeypatch):
    store = saved(tmp_path, 1, 2)

    def refuse(path):
        raise UnreachableError(f"Cannot load {path}: no answer.")

    monkeypatch.setattr("raysgd.checkpoint.store.read_checkpoint", refuse)
    with pytest.raises(UnreachableError, match=rf"{name_at(2)}: no answer"):
        store.restore()


def test_a_password_in_the_url_is_in_no_message(tmp_path, caplog):
    url = f"memory://me:secret@{tmp_path.name}/run"
    shown = url.replace("secret", "***")
    store = saved(url, 1, 2)
    damage(url, 2)
    restored = store.restore()
    assert restored.path == f"{url}/{name_at(1)}", "the path can be opened"
    damage(url, 1)
    with pytest.raises(CheckpointError, match="No checkpoint in") as caught:
        store.restore()
    assert str(caught.value).count(f"{shown}/0") >= 2
    assert f"Skipped {shown}/{name_at(2)}" in caplog.text
    assert "secret" not in caplog.text + str(caught.value)


# ---- other experiments


def test_a_folder_of_another_experiment_is_refused(folder):
    CheckpointStore(folder, experiment="first").save(state_at(1))
    before = names_in(folder)
    other = CheckpointStore(folder, experiment="second", keep=1)
    for call in (other.restore, lambda: other.save(state_at(2))):
        with pytest.raises(CheckpointError, match=r"experiment 'first'.*this is 'second'.*folder"):
            call()
    assert names_in(folder) == before


# ---- kill -9


@pytest.fixture
def memory_folder(tmp_path):
    """A folder in memory, if possible: data survives a kill even if it is not synced."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def kill_at_event(number):
    """Kill this process before the file operation with the given index."""
    left = iter(range(number))

    def hook(event, arguments):
        watched = ("open", "os.rename", "os.remove", "os.mkdir", "os.scandir")
        if event in watched and next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def test_a_kill_before_any_call_to_the_system_leaves_the_newest_state_whole(memory_folder):
    """Kill at each file operation in turn, until a save succeeds."""
    for number in range(200):
        folder = memory_folder / str(number)
        store = saved(folder, 1, 2, keep=1)

        def save(store=store, number=number):
            kill_at_event(number)
            store.save(state_at(3))

        _, status = os.waitpid(fork(save), 0)
        step = restored_step(folder)
        # no file with a final name is incomplete
        assert all(read_checkpoint(str(path)) for path in folder.glob("[0-9]*.ckpt"))
        if status == 0:
            assert step == 3
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert step in (2, 3)
    assert number > 6
