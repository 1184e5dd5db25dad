"""Where a checkpoint came from: command lines without secrets, and the commit of the script."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import raysgd
from raysgd._internal.provenance import redact_command, without_homes
from raysgd.checkpoint import Manifest
from tests.conftest import run_python

PRINT = "import json; from raysgd._internal.provenance import process_provenance\n"
PRINT += "print(json.dumps(dict(process_provenance())))\n"


@pytest.mark.parametrize(
    "arguments",
    [
        "--api-key=HIDE",
        "--api-key HIDE",
        "-apiKey HIDE",
        "--api-keys HIDE HIDE",
        "API_KEY=HIDE",
        "+wandb.api_key=HIDE",
        "--token 1HIDE",
        "--hf_token='HIDE, HIDE'",
        "--DB_PASS=HIDE",
        "--password -HIDE",
        "--no-token -p HIDE",
        "--dsn me:HIDE@host:5432/x",
        "--mail HIDE@example.com",
        "--client.secret HIDE",
        "--auth HIDE",
        "--bearer HIDE",
        "--session-cookie 'a=HIDE; b=HIDE'",
        "--github_pat=HIDE",
        """--json '{"lr": 1, "api_key": "HIDE", "b": 1}'""",
        "--header 'Authorization: Bearer HIDE'",
        "--run 'train.py --password HIDE'",
        "--db postgres://me:HIDE@host/x",
        "https://host/x?sig=HIDE&user=1",
        "--data /home/HIDE/x:/nfs/home/HIDE",
        "--path=/Users/HIDE/x",
        "file:///home/HIDE/x",
        "~HIDE/x",
    ],
)
def test_a_shown_command_has_no_secrets(arguments):
    shown = redact_command(["a.py", *shlex.split(arguments), "--lr", "0.1"])
    assert "HIDE" not in shown
    assert shown.startswith("a.py ")
    assert shown.endswith(" --lr 0.1")


def test_a_shown_command_keeps_what_is_no_secret():
    plain = "a.py --tokenizer gpt2 --keyboard x --patience 3 --path x src/home/page.py p=0.5"
    assert redact_command(shlex.split(plain)) == plain
    assert redact_command(["--secret", "--lr", "1"]) == "--secret --lr 1"
    assert redact_command(["data", "--token", "12345", "--lr"]) == "data --token '***' --lr"


def test_the_own_home_is_a_tilde_wherever_it_is(monkeypatch):
    monkeypatch.setenv("HOME", "/data/ann")
    assert without_homes("-o/data/ann/x:/data/ann2 /data/ann") == "-o~/x:/data/ann2 ~"


def git(folder, *arguments):
    identity = ["-c", "user.name=x", "-c", "user.email=x", "-c", "protocol.file.allow=always"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "train.py").write_text(PRINT)
    git(folder, "add", "train.py")
    git(folder, "commit", "-qm", "x")
    return folder


def facts_of(*command, cwd=None, **environ):
    return json.loads(run_python(*command, cwd=cwd, **environ).stdout)


def test_a_script_has_the_commit_of_its_repository(repository, tmp_path):
    commit = git(repository, "rev-parse", "HEAD")
    git(tmp_path, "clone", "-q", "--depth=1", f"file://{repository}", "shallow")
    git(tmp_path, "init", "-q", "outer")
    git(tmp_path / "outer", "submodule", "--quiet", "add", str(repository), "inner")
    for script in (repository, tmp_path / "shallow", tmp_path / "outer" / "inner"):
        facts = facts_of(script / "train.py", "--key", "x")
        assert (facts["commit"], facts["dirty"]) == (commit, False)
        assert facts["command"].endswith("train.py --key '***'")
    for path in (Path(sys.executable).with_name("raysgd"), raysgd.__file__):  # and -m raysgd
        command = f"__file__ = {str(path)!r}\n{PRINT}"
        assert facts_of("-c", command, cwd=repository)["commit"] == commit
    (repository / "new.py").write_text(PRINT)
    assert facts_of(repository / "train.py")["dirty"] is False
    for ignored in ("", "new.py"):
        (repository / ".git" / "info" / "exclude").write_text(ignored)
        assert facts_of(repository / "new.py")["dirty"] is True
    with (repository / "train.py").open("a") as file:
        file.write("\n")
    assert facts_of(repository / "train.py")["dirty"] is True


def test_what_is_unknown_is_missing(repository, tmp_path):
    (tmp_path / "alone.py").write_text(PRINT)
    (repository / "default_worker.py").write_text(PRINT)  # as in a worker of Ray
    assert facts_of(tmp_path / "alone.py").keys() == {"started", "command"}
    assert facts_of(repository / "train.py", PATH="").keys() == {"started", "command"}
    assert facts_of(repository / "default_worker.py").keys() == {"started"}
    assert facts_of("-c", PRINT).keys() == {"started"}


def test_a_manifest_of_an_older_version_has_no_provenance():
    content = json.loads(Manifest().to_json())
    del content["provenance"]
    assert Manifest.from_json(json.dumps(content).encode()) == Manifest()
