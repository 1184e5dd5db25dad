"""Runs of tests in a copy of the tree, each in a process of its own."""

import ast
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import coverage

from tests.mutation.mutants import ROOT, digest

TESTS = ["tests/unit", "tests/blackbox/simulation", "tests/blackbox/golden"]
MOST_TESTS = 300
"""Number of tests that may run for one mutant."""
LIMIT_S = 1800
"""Seconds that the tests of one mutant may take. A mutant that takes longer is killed."""
WORK = ROOT / "build" / "mutation"
TREE = WORK / "tree"
DATA = WORK / "coverage"


def prepare():
    """Copy the tree, and return a hash of the sources."""
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    names = [name for name in listed.split("\0") if name and os.path.lexists(ROOT / name)]
    shutil.rmtree(TREE, ignore_errors=True)
    for name in names:
        (TREE / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, TREE / name, follow_symlinks=False)
    matters = re.compile("raysgd/|operators/|tests/(?!mutation/)|pyproject.toml")
    files = [ROOT / name for name in names if matters.match(name) and (ROOT / name).is_file()]
    return digest(*(digest(file, file.read_bytes()) for file in files))[:12]


def run(*arguments, limit_s=None, under=()):
    """Run pytest in the copy. Return its exit status, or None if it does not end."""
    command = [sys.executable, "-m", *under, "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--hypothesis-seed=0", *arguments]
    # no bytecode: a mutant is written and reverted within a second
    given = {"PYTHONPATH": str(TREE), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    with (
        (WORK / "tests.log").open("w") as log,
        subprocess.Popen(
            command,
            cwd=TREE,
            env={**os.environ, **given},
            stdout=log,
            stderr=log,
            start_new_session=True,
        ) as process,
    ):
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and its child processes


def measure():
    """Run all tests under coverage, which records the tests of each line."""
    settings, customize = WORK / "measured.ini", TREE / "sitecustomize.py"
    settings.write_text(
        f"[run]\nsource = {TREE / 'raysgd'}\ndata_file = {DATA}\nparallel = true\n"
        # for child processes; the plugin sets the context of the process of the tests
        "context = ${PYTEST_CURRENT_TEST-}\npatch =\n    _exit\n    fork\n"
    )
    customize.write_text(
        "import os\n\nimport coverage\n\nif 'PYTEST_CURRENT_TEST' in os.environ:\n"
        f"    os.environ['COVERAGE_PROCESS_START'] = {str(settings)!r}\n"
        "    coverage.process_startup()\n"
    )
    there = [name for name in TESTS if (TREE / name).exists()]
    under = ["coverage", "run", f"--rcfile={settings}", "-m"]
    if run("-p", "tests.mutation.contexts", *there, under=under) != 0:
        raise SystemExit(f"The tests must pass first. The log is {WORK / 'tests.log'}.")
    customize.unlink()
    coverage.Coverage(config_file=str(settings)).combine([str(WORK)])


def tests_of(mutant):
    """Return tests that execute a mutant's line, first those of its test file and its folder."""
    data = coverage.CoverageData(str(DATA))
    data.read()
    path, contexts = Path(mutant.file), data.contexts_by_lineno(str(TREE / mutant.file))

    def tests(lines):
        found = {name for line in lines for name in contexts.get(line, ())}
        return {name.rpartition("|")[2].rsplit(" (", 1)[0] for name in found} - {""}

    if "" in contexts.get(mutant.line, ()):
        found = tests(contexts)  # a line that runs at import can affect the whole file
    else:
        found = next(filter(None, map(tests, _lines_around(mutant))), None)
    own, folder = f"test_{path.name}::", f"tests/unit/{path.parent.relative_to('raysgd')}/"
    if found is None:  # perhaps in a process that was killed before it stored its data
        found = [test for test in tests(contexts) if own in test]
    near = {test: (own not in test, folder not in test) for test in found}
    chosen = sorted(near, key=lambda test: (near[test], digest(test)))[:MOST_TESTS]
    return sorted(chosen, key=lambda test: (near[test], test))  # fixtures of a file run once


def _lines_around(mutant):
    """Yield the line, its innermost statement up to it, and the `def` of each inner function.

    coverage records no lines of functions that run in threads of C++.
    """
    yield [mutant.line]
    tree = ast.parse((TREE / mutant.file).read_text(encoding="utf-8"))
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= mutant.line <= node.end_lineno
    ]
    yield range(max((node.lineno for node in around), default=mutant.line), mutant.line + 1)
    yield from ([node.lineno] for node in reversed(around) if isinstance(node, ast.FunctionDef))


def judge(mutant):
    """Return the outcome of a mutant."""
    selected = tests_of(mutant)
    result = {"num_tests": len(selected), "change": mutant.change()}
    if not selected:
        return {**result, "outcome": "not covered"}
    path = TREE / mutant.file
    before = path.read_text(encoding="utf-8")
    path.write_text(mutant.source(), encoding="utf-8")
    try:
        passes = run("-x", "--timeout=120", *selected, limit_s=LIMIT_S) == 0
    finally:
        path.write_text(before, encoding="utf-8")
    return {**result, "outcome": "survived" if passes else "killed"}
