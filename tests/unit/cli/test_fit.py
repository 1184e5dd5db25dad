"""``raysgd fit``: operators, settings, and resuming."""

import json
import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raysgd.cli.commands import app
from raysgd.cli.fit import load_operator, read_settings
from raysgd.utils import BATCH_SIZE

OPERATOR = """
from tests.unit.recorder import Recorder as Given

class Recorder(Given):
    pass

class Other(Recorder):
    pass

class Broken(Recorder):
    def setup(self, config):
        raise ValueError("no data there")

def points():
    pass
"""
TRAINS = (
    "script_of_a_test:Recorder",
    "trainer.use_local=true",
    "trainer.use_gpu=false",
    *("config.num_samples=8", "config.batch_size=8"),
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory of the command, which contains a script."""
    (tmp_path / "script_of_a_test.py").write_text(OPERATOR)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    yield tmp_path
    sys.modules.pop("script_of_a_test", None)
    sys.modules.pop("a-copy", None)


def fit(*arguments):
    return CliRunner().invoke(app, ["fit", *map(str, arguments)])


@pytest.mark.parametrize("place", ["script_of_a_test:Recorder", "script_of_a_test.py:Recorder"])
def test_repeated_command_resumes(folder, place):
    (folder / "run.yaml").write_text(
        "config: {num_samples: 40, batch_size: 8, dropout: 1e-3}\n"
        "trainer: {use_local: true, use_gpu: false}\n"
    )
    arguments = [place, "config.batch_size=10", "--config", "run.yaml", "--num-epochs"]
    first = fit(*arguments, 2)
    assert first.exit_code == 0, first.output
    metrics = json.loads(first.stdout.splitlines()[-1])
    assert (metrics["epoch"], metrics["batch_count"]) == (2, 4)
    again = fit(*arguments, 3)
    assert json.loads(again.stdout.splitlines()[-1])["epoch"] == 3
    lines = (folder / "runs" / "Recorder" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines].count("train") == 3
    complete = fit(*arguments, 3)
    assert (complete.exit_code, complete.stdout) == (0, "")
    (folder / "a-copy.py").write_text(OPERATOR)
    arguments[0] = "a-copy.py:Recorder"
    other = fit(*arguments, 1, "--logdir", folder / "other", "checkpoint.every=2")
    assert (folder / "other" / "checkpoints" / "0001-epoch-00001-step-00000002.ckpt").exists()
    assert json.loads(other.stdout.splitlines()[-1])["epoch"] == 1


def test_the_example_trains(folder):
    examples = Path(__file__).parents[3] / "examples"
    place = f"{examples / 'digits.py'}:DigitClassifier"
    little = ["trainer.num_workers=1", "trainer.use_local=true", "fit.max_steps=4"]
    done = fit(place, "--config", examples / "digits.yaml", *little, "--num-epochs", 1)
    assert json.loads(done.stdout.splitlines()[-1])["batch_count"] == 4, done.output


def test_settings_are_those_of_the_file_but_for_what_is_overridden(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("config: {BATCH_SIZE: 64, lr: 1e-3, run: '1e3', net: &a {}, b: *a}\nfit:")
    found = read_settings(path, ["config.net.w=[3]", "trainer.num_workers=2"])
    assert found == {
        "config": {BATCH_SIZE: 64, "lr": 1e-3, "run": "1e3", "net": {"w": [3]}, "b": {}},
        "trainer": {"num_workers": 2},
        "fit": {},
        "checkpoint": {},
    }


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nowhere:Operator", "fit.max_steps=1"], "No module named 'nowhere'"),
        (["script_of_a_test:Recordr", "fit.max_steps=1"], "has no attribute 'Recordr'"),
        (["script_of_a_test:points", "fit.max_steps=1"], "must be package.module:Operator"),
        (["script_of_a_test.py", "fit.max_steps=1"], "must be package.module:Operator"),
        (["src/train.py:Operator", "fit.max_steps=1"], "src/train.py does not exist"),
        (["operator.py:Recorder", "fit.max_steps=1"], "Rename the file."),
        (["script_of_a_test:Recorder", "trainer.num_workers=two", "fit.max_steps=1"], "be an int"),
        ([*TRAINS, "fit.num_epochs=ten"], "fit(num_epochs='ten'): must be an int."),
        ([*TRAINS, "fit.max_steps=1", "checkpoint.every=0"], 'must be "epoch" or a number'),
        (["script_of_a_test:Recorder", "lr=3"], "'lr=3': must be SECTION.NAME=VALUE"),
        (["script_of_a_test:Recorder", "config=3"], "'config=3': must be SECTION.NAME=VALUE"),
        (["script_of_a_test:Recorder", "--config", "no.yaml"], "does not exist"),
        (["script_of_a_test:Recorder", "--config", "flat.yaml"], "the key 'lr'. It must have"),
        ([*TRAINS, "fit.max_steps=1", "trainer.num_worker=2"], "Did you mean 'num_workers'?"),
        ([*TRAINS, "fit.max_steps=1", "trainer.callbacks=a"], "multiple values for keyword"),
        ([*TRAINS, "fit.max_epochs=2"], "argument 'max_epochs'. Did you mean 'num_epochs'?"),
        (["script_of_a_test:Recorder", "--config", "odd.yaml"], "odd.yaml is not valid YAML"),
        (["script_of_a_test:Recorder", "--config", "fit.yaml"], "fit.yaml has the key 'fit'"),
        ([*TRAINS, "config.a=1", "config.a.b=2"], "config.a is already"),
        (["script_of_a_test:Recorder"], "needs --num-epochs"),
    ],
)
def test_wrong_argument_is_one_sentence(folder, arguments, text):
    (folder / "flat.yaml").write_text("lr: 3\n")
    (folder / "fit.yaml").write_text("fit\n")
    (folder / "operator.py").touch()
    (folder / "odd.yaml").write_text("a: [3")
    result = fit(*arguments)
    assert result.exit_code == 2
    assert text in result.stderr
    assert "Traceback" not in result.stderr


def test_a_failing_import_in_the_module_is_raised_unchanged(folder):
    (folder / "script_of_a_test.py").write_text("import nowhere_at_all")
    with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
        load_operator("script_of_a_test:Recorder")
    assert len(fit(*TRAINS, "--num-epochs", 1).stderr.splitlines()) < 8


def test_an_error_in_setup_has_the_frames_of_the_user_alone(folder):
    _, *given = TRAINS
    result = fit("script_of_a_test:Broken", *given, "--num-epochs", 1)
    assert result.exit_code == 1
    assert "in setup" in result.stderr
    assert "ValueError: no data there" in result.stderr
    assert "cli.py" not in result.stderr


def test_folder_of_another_operator_is_refused(folder):
    _, *given = TRAINS
    fit(*TRAINS, "--num-epochs", 1, "--logdir", "run")
    result = fit("script_of_a_test:Other", *given, "--num-epochs", 1, "--logdir", "run")
    assert result.exit_code == 1
    assert "has checkpoints of experiment 'Recorder'" in result.stderr
