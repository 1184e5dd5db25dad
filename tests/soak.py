"""Search for rare failures: `make soak ARGS="--minutes 120"`.

The parts take turns, each turn with new seeds, until the time is over. A table shows the results.
The log of a failed turn is kept. `--only recoveries` counts recoveries from injected faults. It
first plants a lost sample for each kind of fault, which the round must find.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

CLUSTER = "tests/distributed"
ALL_CORES = ["--numprocesses", "logical"]
RECOVERIES = ("workers", "saves", "joins", "drains", "hosts", "drivers")
"""Kinds of faults in `tests/recoveries.py`. Hosts need root and iproute2."""
TESTS = {
    "schedules": ["tests/blackbox/simulation", "--hypothesis-profile=soak"],
    "properties": ["-m", "hypothesis", "tests/unit", "--hypothesis-profile=soak", *ALL_CORES],
    "network": ["tests/hosts/test_hosts.py"],
    "frameworks": ["-k", "tensorflow or horovod or frameworks", CLUSTER],
    "round": ALL_CORES,
}
"""Arguments of pytest by part. Tests that need a GPU or Horovod are skipped without it."""
PARTS = (*RECOVERIES, *TESTS)

MAX_TURN_MINUTES = 100
"""Limit of a turn."""
ROUND_MINUTES = 30
"""Limit of a round of recoveries."""
MAX_TEST_S = 3000
END_S = 30.0
"""Seconds that an interrupted turn may take to clean up."""


def command_of(name: str, seed: int) -> list[str]:
    """Return the command of a turn."""
    if name in RECOVERIES:
        return [sys.executable, "-m", "tests.recoveries", name, str(seed)]
    # stop at the first failure, because an interrupted turn reports none
    command = [sys.executable, "-m", "pytest", "-q", "--maxfail=1", f"--timeout={MAX_TEST_S}"]
    command += ["-p", "no:cacheprovider", *TESTS[name]]
    if any("hypothesis" in argument for argument in command):
        command.append(f"--hypothesis-seed={seed}")
    return command


def turn(command: list[str], left_s: float, log: Path) -> str:
    """Run a part once. Return "passed", "failed" or "cut off"."""
    environment = {**os.environ, "RAYSGD_SOAK": "1"}
    # a new session and folder, so that an interrupted turn leaves no process or file
    with tempfile.TemporaryDirectory(prefix="soak") as folder, log.open("w") as output:
        environment["TMPDIR"] = folder
        run = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        try:
            return "failed" if run.wait(min(left_s, 60 * MAX_TURN_MINUTES)) else "passed"
        except subprocess.TimeoutExpired:
            return "cut off"
        finally:
            with contextlib.suppress(ProcessLookupError):  # all processes have ended
                run.send_signal(signal.SIGINT)  # pytest cleans up and stops its workers
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.wait(END_S)
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()


def plant(kinds: list[str], seed: int, out: Path) -> bool:
    """Plant a lost sample in a round of each kind. Return whether all rounds found it."""
    found = []
    for kind in kinds:
        log = out / f"planted-{kind}.log"
        command = [*command_of(kind, seed), "--number", "1", "--loses"]
        if turn(command, 60 * MAX_TURN_MINUTES, log) == "failed":
            found += re.findall(r"^recovery .*: LEDGER .*", log.read_text(errors="replace"), re.M)
    if kinds:
        print("".join(f"planted: {line}\n" for line in found), end="")
        print(f"planted losses found: {len(found)} of {len(kinds)}", flush=True)
    return len(found) == len(kinds)


def machine() -> str:
    """Return the model of the CPU and the number of cores."""
    models = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores"


def main() -> int:
    """Take turns until the time is over or Ctrl-C. Return the exit status."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in background jobs
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="duration (default 60)")
    parser.add_argument("--seed", type=int, default=None, help="seed of the first turn")
    parser.add_argument(
        "--only", nargs="+", choices=[*PARTS, "recoveries"], default=PARTS, help="parts to run"
    )
    parser.add_argument("--out", type=Path, default=Path("soak_results"), help="folder for logs")
    given = parser.parse_args()
    parts = [part for part in PARTS if {part, "recoveries" * (part in RECOVERIES)} & {*given.only}]
    given.out.mkdir(parents=True, exist_ok=True)
    seed = int(time.time()) if given.seed is None else given.seed
    end = time.monotonic() + 60 * given.minutes
    results: Counter[tuple[str, str]] = Counter()
    minutes: Counter[str] = Counter()
    failures = []
    good: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    if not plant([part for part in parts if part in RECOVERIES], seed, given.out):
        return 1
    turns = itertools.cycle(parts)
    with contextlib.suppress(KeyboardInterrupt):
        while (left_s := end - time.monotonic()) > 0:
            name = next(turns)
            log = given.out / f"{name}-{seed}.log"
            began, result = time.monotonic(), "cut off"
            try:
                # a round of recoveries may end later
                limit_s = left_s if name in TESTS else 60 * ROUND_MINUTES
                result = turn(command_of(name, seed), limit_s, log)
            finally:  # also after Ctrl-C
                minutes[name] += (time.monotonic() - began) / 60
                results[name, result] += 1
                if result == "cut off":
                    print(f"cut off: {name} seed {seed}", flush=True)
            lines = log.read_text(errors="replace").strip().splitlines()
            told = [line for line in lines if line.startswith("recovery ")]
            print("".join(f"{line}\n" for line in told), end="")
            if name in RECOVERIES:
                ends = [line.endswith(": good") for line in told]
                if result != "passed" and all(ends):
                    ends.append(False)  # the fault after which the round ended
                good[name] += sum(ends)
                faults[name] += len(ends)
            print(f"{name:12} seed {seed}: {result}. {''.join(lines[-1:])}", flush=True)
            if result == "failed":
                failures.append(log)
            elif result == "passed":
                log.unlink()
            seed += 1
    print(f"\n{'part':12} {'passed':>8} {'failed':>8} {'cut off':>8} {'minutes':>8}")
    for name in parts:
        counts = " ".join(f"{results[name, kind]:8}" for kind in ("passed", "failed", "cut off"))
        print(f"{name:12} {counts} {minutes[name]:8.1f}")
    for log in failures:
        print(f"failed: see {log}")
    passed = {name for name, result in results if result == "passed"}
    if nothing := [name for name in parts if name not in passed]:
        print(f"never finished: {', '.join(nothing)}")
    if faults:
        print(f"\n| fault | recoveries ({machine()}) |\n| --- | ---: |")
        for name in faults:
            print(f"| {name} | {good[name]} of {faults[name]} |")
        print(f"| all | {good.total()} of {faults.total()} |")
    return 1 if failures or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
