"""Examples run as they are; here on the cluster of the tests, and no longer than for a look."""

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    "name",
    [
        "callbacks",
        "checkpoints",
        "creators",
        "custom_loop",
        "digits",
        "functions",
        "functions_fit",
        "functions_horovod",
        "functions_tensorflow",
        "gan",
        "horovod_digits",
        "language_model",
        "precision",
        "ray_data",
        "segmentation",
        "tensorflow_creators",
        "tensorflow_digits",
        "text_classification",
        "tune_asha",
        "tune_pbt",
    ],
)
def test_an_example_runs(name, ray_cluster, monkeypatch, capsys):
    path = FOLDER / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), "--num-workers", "1", "--smoke-test"])
    runpy.run_path(str(path), run_name="__main__")
    assert "done in" in capsys.readouterr().out
