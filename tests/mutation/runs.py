"""Runs of tests, each in a fork of this process, in a copy of the tree."""

import ast
import compileall
import contextlib
import importlib
import json
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import coverage
import pytest

from tests.mutation.mutants import ROOT, digest

TESTS = ["tests/unit", "tests/blackbox/simulation", "tests/blackbox/golden"]
LARGE = ["numpy", "torch", "torch.utils.data", "ray", "hypothesis", "tensorflow"]
"""Modules that the process imports before it forks. None may import raysgd."""
BUDGET_S = 60.0
"""CPU seconds that the tests of one mutant may take, measured under coverage."""
WORK = ROOT / "build" / "mutation"
TREE = WORK / "tree"
DATA = WORK / "coverage"


def prepare():
    """Copy the tree, import large modules, and return a hash of the sources."""
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    names = [name for name in listed.split("\0") if name and os.path.lexists(ROOT / name)]
    shutil.rmtree(TREE, ignore_errors=True)
    for name in names:
        (TREE / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, TREE / name, follow_symlinks=False)
    # compare contents, not times: a mutant is written and reverted within a second
    mode = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(TREE / "raysgd", quiet=2, invalidation_mode=mode)
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # a fork loses threads
    for name in LARGE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    matters = re.compile("raysgd/|operators/|tests/(?!mutation/)|pyproject.toml")
    files = [ROOT / name for name in names if matters.match(name) and (ROOT / name).is_file()]
    return digest(*(digest(file, file.read_bytes()) for file in files))[:12]


def in_fork(run, log, timeout_s):
    """Run a function in a fork, in the copy. Return its status, or None if it hangs."""
    temporary = tempfile.mkdtemp(prefix="m")
    os.chmod(temporary, 0o755)  # a test changes its user ID
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            _enter_copy(log, temporary)
            status = run()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    deadline, status = time.monotonic() + timeout_s, None
    while status is None and time.monotonic() < deadline:
        time.sleep(0.05)
        ended, code = os.waitpid(pid, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if ended else None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # and its child processes
    if status is None:
        os.waitpid(pid, 0)
    shutil.rmtree(temporary, ignore_errors=True)
    return status


def _enter_copy(log, temporary):
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number, target in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
        os.dup2(target, number)
    os.chdir(TREE)
    sys.path[:] = [str(TREE), *(each for each in sys.path if Path(each).resolve() != ROOT)]
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TREE), os.environ.get("PYTHONPATH", "")])
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = temporary
    os.environ["TMPDIR"] = tempfile.tempdir = temporary


class Recorder:
    """A pytest plugin: selects tests, and writes their durations and failures."""

    def __init__(self, file, selected=None, context=None):
        self._file = file
        self._selected = selected
        self._context = context
        self._seconds = {}
        self._failed = []

    def pytest_collection_modifyitems(self, items):
        if self._selected is not None:
            items[:] = [item for item in items if item.nodeid in self._selected]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        if self._context is not None:
            self._context(item.nodeid)
        # CPU time of this process and its children, which does not depend on other load
        started = sum(os.times()[:4])
        result = yield
        self._seconds[item.nodeid] = round(sum(os.times()[:4]) - started, 2)
        return result

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._failed.append(report.nodeid)

    def pytest_sessionfinish(self):
        self._file.write_text(json.dumps([self._seconds, self._failed]))


def _pytest(recorder, *arguments):
    settings = ["-q", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    settings += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of imported plugins
    return int(pytest.main([*settings, *arguments], plugins=[recorder]))


def measure():
    """Run all tests under coverage; return the seconds of each that passes."""
    settings, log, report = WORK / "measured.ini", WORK / "tests.log", WORK / "tests.json"
    settings.write_text(
        f"[run]\nsource = {TREE / 'raysgd'}\ndata_file = {DATA}\nparallel = true\n"
        # for child processes; the recorder sets the context of this process
        "context = ${PYTEST_CURRENT_TEST-}\npatch =\n    _exit\n    fork\n"
    )
    customize = TREE / "sitecustomize.py"
    customize.write_text("import coverage\n\ncoverage.process_startup()\n")

    def run():
        os.environ["COVERAGE_PROCESS_START"] = str(settings)
        measured = coverage.Coverage(config_file=str(settings))
        measured.start()
        there = [name for name in TESTS if Path(name).exists()]
        _pytest(Recorder(report, context=measured.switch_context), *there)
        measured.stop()
        measured.save()
        return 0

    if in_fork(run, log, 7200) != 0:
        raise SystemExit(f"The tests did not finish. The log is {log}.")
    customize.unlink()
    coverage.Coverage(config_file=str(settings)).combine([str(WORK)])
    seconds, failed = json.loads(report.read_text())
    return {test: took for test, took in seconds.items() if test not in failed}


def tests_of(mutant, seconds):
    """Return the tests that execute a mutant's line, by file: {file: {test: seconds}}.

    The test file of the same name comes first, then the fastest. Tests beyond the budget are
    omitted.
    """
    data = coverage.CoverageData(str(DATA))
    data.read()
    contexts = data.contexts_by_lineno(str(TREE / mutant.file))

    def tests(lines):
        # In scripts, the name of a test follows that of the test which began their fork server.
        found = {
            name.rpartition("|")[2].rsplit(" (", 1)[0]
            for line in lines
            for name in contexts.get(line, ())
        }
        return found & set(seconds)

    if "" in contexts.get(mutant.line, ()):
        found = tests(contexts)  # a line that runs at import can affect the whole file
    else:
        found = tests([mutant.line]) or tests(_statement(mutant))
    by_file = {}
    for test in sorted(found, key=lambda test: (seconds[test], test)):
        by_file.setdefault(test.split("::")[0], {})[test] = seconds[test]
    own = f"test_{Path(mutant.file).name}"
    left_s, selected = BUDGET_S, {}
    for file in sorted(by_file, key=lambda f: (not f.endswith(own), sum(by_file[f].values()))):
        for test, took in by_file[file].items():
            if took <= left_s:
                selected.setdefault(file, {})[test] = took
                left_s -= took
    return selected


def _statement(mutant):
    """Return the lines of the innermost statement, up to the line of the mutant."""
    tree = ast.parse((TREE / mutant.file).read_text(encoding="utf-8"))
    starts = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= mutant.line <= node.end_lineno
    ]
    return range(max(starts, default=mutant.line), mutant.line + 1)


def judge(mutant, seconds):
    """Return the outcome of a mutant, and the test that detects it.

    A test that also fails without the mutant is removed from `seconds`.
    """
    result = {"num_tests": 0, "change": mutant.change(), "by": None}
    while selected := tests_of(mutant, seconds):
        result["num_tests"] = sum(map(len, selected.values()))
        with _written(mutant):
            by = _first_failure(selected)
        if by is None:
            return {**result, "outcome": "survived"}
        file = by.split("::")[0]
        without = _first_failure({file: selected[file]} if by in seconds else selected)
        if without != by:
            return {**result, "outcome": "killed", "by": by}
        if by not in seconds:
            raise RuntimeError(f"{by} also fails without the mutant. See {WORK / 'failure.log'}.")
        del seconds[by]
    return {**result, "outcome": "not covered"}


@contextlib.contextmanager
def _written(mutant):
    path = TREE / mutant.file
    before = path.read_text(encoding="utf-8")
    path.write_text(mutant.source(), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(before, encoding="utf-8")


def _first_failure(selected):
    """Run tests by file. Return the first failed test, "no end", or "import"; None if all pass."""
    report = WORK / "failure.json"
    report.unlink(missing_ok=True)
    took = [one for tests in selected.values() for one in tests.values()]

    def run():
        limit = f"--timeout={60 + 10 * max(took):.0f}"
        for file, tests in selected.items():
            status = _pytest(Recorder(report, selected=tests), "-x", limit, file)
            if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                return status
        return 0

    status = in_fork(run, WORK / "failure.log", 120 + 5 * sum(took))
    if status == 0:
        return None
    failed = json.loads(report.read_text())[1] if report.exists() else []
    return "no end" if status is None else failed[0] if failed else "import"
