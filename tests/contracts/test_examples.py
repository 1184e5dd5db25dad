"""Each example runs unchanged, with `--smoke-test`, on the Ray cluster of the tests."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.conftest import IN_SOAK, import_horovod, needs_runtime_env, run_python

FOLDER = Path(__file__).parents[2] / "examples"
TWO_WORKERS = ("elastic", "functions") if IN_SOAK else ("elastic",)
"""Examples that run on two workers. The others run on one."""
SAYS = {
    "elastic": ["lost", "each one exactly once an epoch", "bit-identical"],
    # The worse trial continues from the better one, with another learning rate.
    "tune_pbt": [r"trial \w+ +1e-05 +1e-05 +(?!1e-05)(\S+) +\1 +[5-9]\d\.\d\d%"],
}
"""Patterns that the output of an example must match."""
ON_RAY = ("elastic", "functions", "functions_fit", "ray_data", "tune_pbt")
IN_SOAK_ALONE = ("functions_horovod", "functions_tensorflow", "tune_asha")
"""Examples that only a soak runs. Tests of functions and of Tune cover the same."""
IN_A_PROCESS = ("out_of_memory",)
"""Examples that limit the memory of their process, and so need their own."""
NO_RAY = sorted({p.stem for p in FOLDER.glob("*.py")} - {*ON_RAY, *IN_SOAK_ALONE, *IN_A_PROCESS})
"""Examples that run one worker in this process, without Ray."""


@pytest.fixture
def run_example(monkeypatch, capsys, tmp_path):
    """A function that runs an example and returns its output."""

    def run(name):
        path = FOLDER / f"{name}.py"
        num_workers = 2 if name in TWO_WORKERS else 1
        arguments = ["--num-workers", str(num_workers), "--smoke-test"]
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        monkeypatch.setenv("HOME", str(tmp_path))  # runs without a folder save files here
        runpy.run_path(str(path), run_name="__main__")
        printed = capsys.readouterr().out
        assert "done in" in printed
        if name == "functions" and num_workers == 2:
            assert "2 workers, started from epoch 1" in printed
        return printed

    return run


@pytest.mark.slow("an example is a whole program, and some import transformers or TensorFlow")
@pytest.mark.parametrize("name", NO_RAY)
def test_an_example_runs_in_this_process(name, run_example):
    if "horovod" in name:
        import_horovod()
    run_example(name)


@pytest.mark.slow("an example is a whole program, some of them with Tune or TensorFlow")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs_runtime_env if name.startswith("tune") else ())
        for name in ON_RAY + IN_SOAK_ALONE * IN_SOAK
    ],
)
def test_an_example_runs_on_workers(name, run_example, ray_cluster):
    if "horovod" in name:
        import_horovod()
    printed = run_example(name)
    for expected in SAYS.get(name, []):
        assert re.search(expected, printed), printed


@pytest.mark.slow("a process of its own imports torch")
@pytest.mark.parametrize("name", IN_A_PROCESS)
def test_an_example_runs_in_a_process_of_its_own(name):
    assert "done in" in run_python(FOLDER / f"{name}.py", "--smoke-test").stdout


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in (FOLDER / "benchmarks").glob("[a-z]*.py"))
)
def test_a_benchmark_can_be_started(name, monkeypatch, capsys):
    """Only the imports and the options are tested, not the measurements."""
    if name == "all":
        pytest.importorskip("matplotlib")
    path = FOLDER / "benchmarks" / f"{name}.py"
    monkeypatch.syspath_prepend(str(path.parent))
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert not ended.value.code
    assert "--smoke-test" in capsys.readouterr().out
