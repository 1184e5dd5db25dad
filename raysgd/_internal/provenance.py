"""Where a checkpoint came from: the command line and the commit of the script."""

import datetime
import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raysgd._internal.paths import HIDDEN, is_secret, without_secrets

_GIT_S = 5.0
# A name before a value within an argument: `a=b`, `"a": "b"`, `--a b`.
_NAME = re.compile(r"""([\w.-]+)["']?[\s=:]+["']?(?=\S)""")
_ACCOUNT = re.compile(r"[\w.+-]+(:[^\s@/]*)?@(?=[\w-]+[.:/])")  # ann@host.org, ann:pass@host/
_HOMES = re.compile(
    r"""(?<![\w.~])(?:(?:(?:/[\w.-]+)*?/(?:homes?|[Uu]sers)/|~)[^/\s:;,'"=]+|/root(?![\w.-]))"""
)


@functools.cache
def process_provenance() -> Mapping[str, Any]:
    """Return the start time and, if a script runs, its command line and commit."""
    facts: dict[str, Any] = {"started": f"{datetime.datetime.now(datetime.UTC):%FT%TZ}"}
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None or Path(script).name == "default_worker.py":  # a notebook, or a Ray worker
        return facts
    facts["command"], path = redact_command(sys.orig_argv), Path(script).resolve()
    commands = Path(sys.executable).parent.resolve(), Path(__file__).parents[1]
    if path.parent in commands:  # a command such as raysgd, or python -m raysgd
        path = Path.cwd() / path.name
    if commit := _git(path, "describe", "--always", "--dirty", "--abbrev=64", "--exclude=*"):
        is_new = path.is_file() and not _git(path, "ls-files", "--", path.name)
        facts["commit"] = commit.removesuffix("-dirty")
        facts["dirty"] = is_new or commit.endswith("-dirty")
    return facts


def _git(script: Path, *arguments: str) -> str:
    """Return the output of git, or "" without git or a repository."""
    git = ["git", "-C", str(script.parent), "--no-optional-locks", "--literal-pathspecs"]
    try:
        done = subprocess.run([*git, *arguments], capture_output=True, timeout=_GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace").strip()


def redact_command(arguments: Sequence[str]) -> str:
    """Return a command line without secrets and home folders.

    >>> redact_command(["/root/bin/python", "a.py", "TOKEN=x", "--api-key", "x", "--lr=0.5"])
    "~/bin/python a.py 'TOKEN=***' --api-key '***' --lr=0.5"
    """
    shown, hides = [], False
    for given in arguments:
        argument = _ACCOUNT.sub(f"{HIDDEN}@", without_secrets(given))
        if hides and not argument.startswith("--"):
            shown.append(HIDDEN)
            continue  # an option such as --keys can have several values
        hides = argument.startswith("-") and is_secret(argument, is_count=False)
        names = (match for match in _NAME.finditer(argument) if is_secret(match[1], is_count=False))
        if (name := next(names, None)) is not None:
            # Hide the rest, because a secret can contain any character.
            argument, hides = argument[: name.end()] + HIDDEN, False
        shown.append(argument)
    return without_homes(shlex.join(shown))


def without_homes(text: str) -> str:
    """Return a text with ``~`` for the home folders of all users.

    >>> without_homes("--data=/nfs/home/ann/data:/root/x file:///home/ann/x src/home/page.py")
    '--data=~/data:~/x file://~/x src/home/page.py'
    """
    home = os.path.expanduser("~")
    for own in {home, os.path.realpath(home)} - {"/"}:
        text = re.sub(rf"{re.escape(own)}(?![\w.-])", "~", text)
    return _HOMES.sub("~", text)
