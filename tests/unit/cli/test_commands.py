"""The command line."""

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

import raysgd
from raysgd.checkpoint import write_file
from raysgd.cli import commands as cli
from raysgd.cli import doctor
from raysgd.cli.commands import app
from tests.unit.callbacks.test_report import call, run, write


def invoke(*arguments):
    return CliRunner().invoke(app, arguments)


def test_every_command_explains_itself():
    for command in ([], ["fit"], ["report"], ["compare"], ["show"], ["doctor"], ["bench"]):
        result = invoke(*command, "--help")
        assert result.exit_code == 0
        assert "Usage" in result.output
    assert invoke("--version").output == f"raysgd {raysgd.__version__}\n"


def test_the_doctor_lists_what_is_available_and_what_is_missing():
    result = invoke("doctor")
    assert result.exit_code == 0
    lines = {line.partition(" ")[0]: line for line in result.output.splitlines()}
    assert re.fullmatch(f"torch +{re.escape(version('torch'))} +tested", lines["torch"])
    assert "available" in lines["gloo"]
    assert re.fullmatch(r'apex +missing +for use_fp16="apex"', lines["apex"])
    assert re.fullmatch(r"CPUs here +\d+", lines["CPUs"])
    assert re.fullmatch(r"memory here +\S+ GiB +\S+ GiB free", lines["memory"])


def test_show_prints_the_manifest(tmp_path):
    state = {"models": [], "optimizers": [], "epoch": 1, "provenance": {"command": "a.py"}}
    shown = invoke("show", write_file(state, tmp_path / "state.pt"))
    assert json.loads(shown.output)["provenance"] == {"command": "a.py"}
    missing = invoke("show", str(tmp_path / "missing.pt"))
    assert (missing.exit_code, missing.output) == (1, missing.stderr)
    assert "there is no such file" in missing.stderr


def install(folder, name, version, *files):
    """Create the files of a package, and its version for `importlib.metadata`."""
    for file in ("__init__.py", *files):
        (folder / name / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / file).write_text("raise RuntimeError")
    (folder / f"{name}-{version}.dist-info").mkdir()
    (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )


@pytest.mark.parametrize(
    ("name", "version", "files", "row", "warning"),
    [
        ("apex", "0.9.10", (), r'apex +missing +for use_fp16="apex"', "apex has no apex.amp"),
        ("apex", "0.1", ("amp/__init__.py",), r"apex +0\.1", ""),
        ("numpy", "1.25.2", (), r"numpy +1\.25\.2 +too old: raysgd needs 1\.26 or newer", ""),
        ("numpy", "2.6.0", (), r"numpy +2\.6\.0 +not tested, unlike 1\.26 to 2\.5", ""),
        ("numpy", "2.4.9", (), r"numpy +2\.4\.9 +tested", ""),
        ("triton", "3.9.0", (), r"triton +3\.9\.0", "only if triton is imported first"),
    ],
)
def test_the_doctor_judges_versions(monkeypatch, tmp_path, name, version, files, row, warning):
    install(tmp_path, name, version, *files)
    install(tmp_path, "tensorflow", "2.21.0")
    monkeypatch.syspath_prepend(tmp_path)
    for module in (name, "tensorflow"):  # a loaded module would be found first
        monkeypatch.delitem(sys.modules, module, raising=False)
    found = {each: doctor.installed_version(each) for each in (name, "tensorflow")}
    lines = []
    doctor.show([doctor.package_row(name, found[name])], lines.append)
    assert re.fullmatch(row, lines[0])
    assert warning in "".join(doctor.problems({"triton": None, "apex": None, **found}))


def test_the_doctor_names_a_cluster_that_is_not_there(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "No answer from a Ray cluster at RAY_ADDRESS=127.0.0.1:1" in result.stderr
    assert "gloo" in result.stdout


def test_the_doctor_says_what_a_cluster_has_and_what_is_free(monkeypatch):
    there = {"CPU": (4.0, 2.5), "object_store_memory": (3 * 2**30, 2.0**30)}
    monkeypatch.setattr("raysgd.cluster.ray_session.resources", lambda address: there)
    heading, cpus, memory = invoke("doctor", "--address", "auto").output.splitlines()[-3:]
    assert heading == "Ray cluster at auto:"
    assert re.fullmatch("CPU +4 +2.5 free", cpus)
    assert re.fullmatch("object_store_memory +3.0 GiB +1.0 GiB free", memory)


@pytest.mark.parametrize("given", [{"RAY_ADDRESS": "local"}, {"RAY_ADDRESS": ""}])
def test_doctor_starts_no_cluster_of_its_own(monkeypatch, given):
    monkeypatch.setattr("raysgd.cluster.ray_session.ray.init", lambda *a, **k: 1 / 0)
    result = CliRunner().invoke(app, ["doctor"], env=given)
    assert result.exit_code == 0
    assert ("There is no cluster at the address 'local'" in result.output) == any(given.values())


def test_doctor_shows_the_share_of_each_node_or_why_it_is_unknown(monkeypatch):
    speeds = [("10.0.0.1", 300.0, {"A6000", "GPU"}), ("10.0.0.2", 100.0, {"CPU"})]
    monkeypatch.setattr("raysgd.cluster.ray_session.resources", lambda address: {"CPU": (4, 2)})
    monkeypatch.setattr("raysgd.cluster.ray_session.node_speeds", lambda address: speeds)
    first, second = invoke("doctor", "--address", "auto", "--shares").output.splitlines()[-2:]
    assert re.fullmatch("10.0.0.1 +1.50 +A6000, GPU", first)
    assert re.fullmatch("10.0.0.2 +0.50 +CPU", second)
    monkeypatch.setattr("raysgd.cluster.ray_session.node_speeds", lambda address: {}["no answer"])
    result = invoke("doctor", "--address", "auto", "--shares")
    assert result.exit_code == 1
    assert "no answer" in result.stderr


def test_package_runs_as_a_module():
    command = [sys.executable, "-m", "raysgd", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"raysgd {raysgd.__version__}\n"


def test_report_writes_the_page_of_a_folder(tmp_path):
    write(tmp_path, [run(), call(120, 10, 5, train_loss=0.5)])
    result = invoke("report", str(tmp_path))
    assert result.exit_code == 0
    assert result.output.strip() == str(tmp_path / "report.html")
    assert (tmp_path / "report.html").is_file()


def test_an_unknown_benchmark_is_an_error_that_lists_the_known_ones():
    result = invoke("bench", "nothing")
    assert result.exit_code == 2
    assert "must be one of" in result.stderr
    assert "recovery" in result.stderr


def test_a_benchmark_gets_its_arguments_and_its_exit_status_is_that_of_the_command(monkeypatch):
    commands = []

    def run(command, check):
        commands.append(command)
        return subprocess.CompletedProcess(command, 7)

    monkeypatch.setattr(cli.subprocess, "run", run)
    assert invoke("bench", "saving", "--pairs", "2").exit_code == 7
    ((python, script, *arguments),) = commands
    assert (python, Path(script).name, arguments) == (sys.executable, "saving.py", ["--pairs", "2"])
    assert Path(script).is_file()
