"""Run tests in another environment: CPU, threads, order, user, folder, locale, or load.

    python -m tests.variations                     # list the variations
    python -m tests.variations 2 tests/unit -x     # run one, with arguments for pytest
    python -m tests.variations of-commit           # the number of commits chooses

This file is also a plugin of pytest. It asserts in each process that its variation is in force.
"""

import contextlib
import itertools
import locale
import os
import pwd
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch

ROOT = Path(__file__).parents[1]
CAPABILITIES = ["DEFAULT", "AVX2", "AVX512"]
BEST = torch.backends.cpu.get_cpu_capability()
VARIATIONS = [
    "compatible threads=4 shuffled turkish",
    "user folder threads=1 posix",
    "compatible folder load",
    "user threads=4 load turkish",
    "shuffled threads=1 posix",
    *(name.lower() for name in CAPABILITIES if BEST in CAPABILITIES[CAPABILITIES.index(name) :]),
]
"""Five combinations, in which each factor occurs twice, and each capability of this CPU alone."""
VARIABLES = {
    **{name.lower(): {"ATEN_CPU_CAPABILITY": name.lower()} for name in CAPABILITIES},
    # They round differently on each CPU. TensorFlow cannot use oneDNN with this limit.
    "compatible": {
        "MKL_CBWR": "COMPATIBLE",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "TF_ENABLE_ONEDNN_OPTS": "0",
    },
    "threads=1": {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    "threads=4": {"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "4", "MKL_DYNAMIC": "FALSE"},
    "posix": {"LC_ALL": "C", "TZ": "NST+3:30"},
    "turkish": {"LC_ALL": "tr_TR.UTF-8", "TZ": "NPT-5:45"},
}
SEED = 20261128
FOLDER = "my ü"
MOST_FILES = 1024
IN_FORCE = os.environ.get("RAYSGD_VARIATION", "").split()
BUSY = os.environ.get("RAYSGD_BUSY", "").split()


# ---- the plugin


def pytest_report_header():
    return f"variation: {' '.join(IN_FORCE)}" + f", seed {SEED}" * ("shuffled" in IN_FORCE)


def pytest_sessionstart():
    for name in IN_FORCE:
        variables = VARIABLES.get(name, {})
        assert variables.items() <= os.environ.items()
        if "LC_ALL" in variables:  # Python uses C if the locale is missing
            assert locale.setlocale(locale.LC_CTYPE) == variables["LC_ALL"]
            assert time.timezone == {"posix": 12_600, "turkish": -20_700}[name]
    for name in {*IN_FORCE} & {name.lower() for name in CAPABILITIES}:
        assert torch.backends.cpu.get_cpu_capability() == name.upper()
    for name in IN_FORCE:
        assert not name.startswith("threads=") or name == f"threads={torch.get_num_threads()}"
    if "user" in IN_FORCE:
        assert os.getuid() != 0
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (MOST_FILES, MOST_FILES)
    if "folder" in IN_FORCE:
        assert all(FOLDER in path for path in (sys.executable, __file__, os.getcwd()))
    if "load" in IN_FORCE:
        assert [psutil.Process(int(pid)).status() for pid in BUSY] == ["running"] * 4


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Shuffle the modules, and the tests of each module."""
    if "shuffled" in IN_FORCE:
        modules = [list(group) for _, group in itertools.groupby(items, lambda item: item.path)]
        draw = random.Random(SEED)
        for module in modules:
            draw.shuffle(module)
        draw.shuffle(modules)
        items[:] = itertools.chain(*modules)


# ---- the command


def copy_links(source, target):
    """Copy a folder. Its files are hard links if possible."""
    links = "-al" if source.stat().st_dev == target.parent.stat().st_dev else "-a"
    subprocess.run(["cp", links, source, target], check=True)


def copy_environment(target, is_for_user):
    """Copy this environment to `target`. An ordinary user can run its Python."""
    copy_links(Path(sys.prefix), target)
    for script in (target / "bin").iterdir():
        old = f"#!{sys.prefix}/bin/python"
        if (
            script.is_file()
            and not script.is_symlink()
            and script.read_bytes().startswith(old.encode())
        ):
            _, rest = script.read_text().split("\n", 1)
            script.unlink()
            # A path with a space cannot be in the first line.
            script.write_text(
                f"#!/bin/sh\n'''exec' \"{target}/bin/python\" \"$0\" \"$@\"\n' '''\n{rest}"
            )
            script.chmod(0o755)
    base = Path(sys.base_prefix)
    if is_for_user and not all(each.stat().st_mode & 1 for each in (base, *base.parents)):
        own = target.parent.parent / "python"
        copy_links(base, own)
        settings = (target / "pyvenv.cfg").read_text().replace(str(base), str(own))
        (target / "pyvenv.cfg").unlink()
        (target / "pyvenv.cfg").write_text(settings)
        (target / "bin/python").unlink()
        (target / "bin/python").symlink_to(
            own / "bin" / os.path.basename(os.path.realpath(sys.executable))
        )


def run(variation, arguments):
    """Run pytest in a variation, and return its exit code."""
    names = variation.split()
    variables = [VARIABLES.get(name, {}) for name in names]
    environment = dict(os.environ, RAYSGD_VARIATION=variation)
    for each in variables:
        environment |= each
    options, root, python = {}, ROOT, sys.executable
    with contextlib.ExitStack() as stack:
        top = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="v")))
        top.chmod(0o755)
        if {"user", "folder"} & {*names}:
            root = top / (FOLDER if "folder" in names else "raysgd")
            ignored = shutil.ignore_patterns(".venv*", ".git", "__pycache__", "soak_*", "_build")
            shutil.copytree(ROOT, root, symlinks=True, ignore=ignored)
            environment |= {"PYTHONPATH": str(root), "HOME": str(top / "home")}
            (top / "home").mkdir()
        if "user" in names and os.getuid() == 0:
            nobody = pwd.getpwnam("nobody")
            options = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            subprocess.run(["chown", "-R", f"{nobody.pw_uid}:{nobody.pw_gid}", top], check=True)
            environment |= {"USER": "nobody", "LOGNAME": "nobody", "RAY_TMPDIR": str(top)}
            environment["LD_LIBRARY_PATH"] = str(top / "python/lib")  # of `copy_environment`
        if root != ROOT:
            copy_environment(root / ".venv", "user" in names)
            python = str(root / ".venv/bin/python")
        if "turkish" in names:
            environment["LOCPATH"] = str(top)
            command = ["localedef", "-i", "tr_TR", "-f", "UTF-8", str(top / "tr_TR.UTF-8")]
            subprocess.run(command, check=True)
        if "load" in names:
            endless = [sys.executable, "-c", "while True: pass"]
            busy = [stack.enter_context(subprocess.Popen(endless)) for _ in range(4)]
            for each in busy:
                stack.callback(each.kill)
            environment["RAYSGD_BUSY"] = " ".join(str(each.pid) for each in busy)

        def limit():
            if "user" in names:
                resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_FILES, MOST_FILES))

        command = [python, "-m", "pytest", "-p", "tests.variations", *arguments]
        print(f"variation: {variation}", flush=True)
        done = subprocess.run(command, cwd=root, env=environment, preexec_fn=limit, **options)
        return done.returncode


def main():
    number, *arguments = sys.argv[1:] or [None]
    if number is None:
        sys.exit("\n".join(f"{number} {each}" for number, each in enumerate(VARIATIONS)))
    if number == "of-commit":
        command = ["git", "-C", ROOT, "rev-list", "--count", "HEAD"]
        number = int(subprocess.check_output(command)) % len(VARIATIONS)
    sys.exit(run(VARIATIONS[int(number)], arguments))


if __name__ == "__main__":
    main()
