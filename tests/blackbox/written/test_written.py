"""Files of an earlier version load, and training continues from them without a difference."""

import json
import shutil
from pathlib import Path

import pytest

from raysgd.checkpoint import CheckpointStore, read_file, read_manifest
from raysgd.train import Trainer
from tests.blackbox.written.runs import digits, line_trainer

FOLDERS = sorted(path for path in Path(__file__).parent.iterdir() if (path / "state.pt").exists())


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def folder(request, tmp_path):
    """A copy of a folder of an earlier version."""
    return Path(shutil.copytree(request.param, tmp_path / "written"))


def said(folder, name):
    return json.loads((folder / name).read_text())


def test_training_continues_from_an_old_state(folder, tmp_path):
    with line_trainer(tmp_path / "new") as trainer:
        trainer.load(folder / "state.pt")
        assert digits(trainer) == pytest.approx(said(folder, "expected.json"), rel=1e-4)
        trainer.train()
        assert digits(trainer) == pytest.approx(said(folder, "next.json"), rel=1e-4)


def test_an_old_run_continues_in_its_folder(folder):
    with line_trainer(folder / "run") as trainer:
        trainer.fit(3)
        assert trainer.epoch == 3
        assert digits(trainer) == pytest.approx(said(folder, "next.json"), rel=1e-4)


def test_a_store_restores_an_old_checkpoint(folder):
    checkpoints = folder / "run" / "checkpoints"
    restored = CheckpointStore(checkpoints, experiment="Line").restore()
    assert restored.state["global_step"] == 16
    for path in checkpoints.glob("*.ckpt"):
        manifest = read_manifest(path)
        assert (manifest.experiment, manifest.operator_name) == ("Line", "Line")
        assert (manifest.format, manifest.world_size) == (1, 1)


def test_a_keras_state_loads_without_keras(folder):
    state = read_file(folder / "keras.state")
    assert (state["epoch"], state["global_step"]) == (1, 6)
    sums = {name: float(array.sum()) for name, array in state["models"][0].items()}
    assert sums == pytest.approx(said(folder, "keras.json"), abs=1e-5)
    assert read_manifest(folder / "keras.state").epoch == 1


def test_checkpoints_of_functions_are_read(folder):
    found = Trainer.load_checkpoint_from_path(folder / "function" / "checkpoint_000002")
    assert (found["epoch"], found["weights"]) == (1, [1.0, 2.0])
