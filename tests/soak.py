"""Search for rare failures: `make soak ARGS="--minutes 120"`.

The parts take turns, each turn with new seeds, until the time is over. A table shows the results.
The log of a failed turn is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

CLUSTER = "tests/distributed"
ALL_CORES = ["--numprocesses", "logical"]
PARTS = {
    "schedules": ["tests/blackbox/simulation", "--hypothesis-profile=soak"],
    "chaos": [f"{CLUSTER}/test_{name}.py" for name in ("chaos", "train_kills")],
    "fire": [f"{CLUSTER}/test_under_fire.py", "-rP"],
    "properties": ["-m", "hypothesis", "tests/unit", "--hypothesis-profile=soak", *ALL_CORES],
    "hosts": ["tests/hosts/test_hosts.py"],
    "files": ["tests/unit/checkpoint"],
    "frameworks": ["-k", "tensorflow or horovod or frameworks", CLUSTER],
    "round": [
        *("--deselect", f"{CLUSTER}/test_chaos.py"),
        *("--deselect", f"{CLUSTER}/test_under_fire.py"),
        *ALL_CORES,
    ],
}
"""Arguments of pytest by part. Tests that need a GPU or Horovod are skipped without it."""

NUM_SEEDS = 5
"""Default number of seeds of the random kills in a turn."""
MAX_TURN_MINUTES = 100
"""Limit of a turn with that number of seeds."""
MAX_TEST_S = 3000
END_S = 30.0
"""Seconds that an interrupted turn may take to clean up."""


def turn(arguments: list[str], seed: int, num_seeds: int, left_s: float, log: Path) -> str:
    """Run a part once. Return "passed", "failed" or "cut off"."""
    # stop at the first failure, because an interrupted turn reports none
    command = [sys.executable, "-m", "pytest", "-q", "--maxfail=1", f"--timeout={MAX_TEST_S}"]
    command += ["-p", "no:cacheprovider", *arguments]
    if any("hypothesis" in argument for argument in arguments):
        command.append(f"--hypothesis-seed={seed}")
    environment = {**os.environ, "RAYSGD_SOAK": str(num_seeds), "RAYSGD_SEED": str(seed)}
    # a new session and folder, so that an interrupted turn leaves no process or file
    with tempfile.TemporaryDirectory(prefix="soak") as folder, log.open("w") as output:
        environment["TMPDIR"] = folder
        run = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        try:
            most_s = 60 * MAX_TURN_MINUTES * max(1, num_seeds / NUM_SEEDS)
            return "failed" if run.wait(min(left_s, most_s)) else "passed"
        except subprocess.TimeoutExpired:
            return "cut off"
        finally:
            with contextlib.suppress(ProcessLookupError):  # all processes have ended
                run.send_signal(signal.SIGINT)  # pytest cleans up and stops its workers
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.wait(END_S)
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()


def main() -> int:
    """Take turns until the time is over or Ctrl-C. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="duration (default 60)")
    parser.add_argument("--seed", type=int, default=None, help="seed of the first turn")
    parser.add_argument(
        "--seeds", type=int, default=NUM_SEEDS, help="number of seeds of the kills in a turn"
    )
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run"
    )
    parser.add_argument("--out", type=Path, default=Path("soak_results"), help="folder for logs")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    seed = int(time.time()) if given.seed is None else given.seed
    end = time.monotonic() + 60 * given.minutes
    results: Counter[tuple[str, str]] = Counter()
    minutes: Counter[str] = Counter()
    failures = []
    turns = itertools.cycle(given.only)
    with contextlib.suppress(KeyboardInterrupt):
        while (left_s := end - time.monotonic()) > 0:
            name = next(turns)
            log = given.out / f"{name}-{seed}.log"
            began, result = time.monotonic(), "cut off"
            try:
                result = turn(PARTS[name], seed, given.seeds, left_s, log)
            finally:  # also after Ctrl-C
                minutes[name] += (time.monotonic() - began) / 60
                results[name, result] += 1
            lines = log.read_text(errors="replace").strip().splitlines()
            print("".join(f"{line}\n" for line in lines if line.startswith("seed ")), end="")
            print(f"{name:12} seed {seed}: {result}. {''.join(lines[-1:])}", flush=True)
            if result == "failed":
                failures.append(log)
            elif result == "passed":
                log.unlink()
            seed += given.seeds
    print(f"\n{'part':12} {'passed':>8} {'failed':>8} {'cut off':>8} {'minutes':>8}")
    for name in given.only:
        counts = " ".join(f"{results[name, kind]:8}" for kind in ("passed", "failed", "cut off"))
        print(f"{name:12} {counts} {minutes[name]:8.1f}")
    for log in failures:
        print(f"failed: see {log}")
    passed = {name for name, result in results if result == "passed"}
    if nothing := [name for name in given.only if name not in passed]:
        print(f"never finished: {', '.join(nothing)}")
    return 1 if failures or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
