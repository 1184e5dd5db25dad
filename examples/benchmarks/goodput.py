"""Simulate the goodput of training with frequent worker failures.

    python examples/benchmarks/goodput.py
    python examples/benchmarks/goodput.py --num-workers 100 --mean-s 1 10 --draw goodput.svg

The real driver code runs on the simulated cluster of the tests, in simulated time. Workers fail at
random, including those that start. `--mean-s` is the mean time between two failures. Goodput is the
time of all steps, without repeated ones, divided by the time since the end of the first start.

- *in place*: raysgd's default.
- *restart all*: each failure ends all processes, which resume from the newest snapshot
  as training functions do. Workers that have started stay, so a failure meanwhile costs
  one.
- *all or nothing*: a failure during a restart also repeats the restart, as in most libraries. The
  formula is ``exp(-restart / mean)``, without repeated steps.
"""

import argparse
import contextlib
import json
import math
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from raysgd.errors import WorkerLostError
from tests.blackbox.simulation import world as simulation

TICK_S = 0.25
SNAPSHOT_EVERY = 20
MODES = ("in place", "restart all")


def simulate(mode, num_workers, mean_s, length_s, given, seed=0):
    """Return the goodput of a run of `length_s` seconds."""
    draw = random.Random(seed)
    world = simulation.World(room=num_workers)
    world.snapshot_every, world.step_s = SNAPSHOT_EVERY, given["step_s"]
    world.join_s = given["join_ms_per_worker"] * num_workers / 1000

    def prepare(member):
        # Start times vary.
        member.start_s = given["start_s"] * draw.uniform(0.8, 1.2)
        member.setup_s = given["setup_s"] * draw.uniform(0.8, 1.2)
        world.workers[:] = [worker for worker in world.workers if not worker.dead]

    def lose_one():
        alive = [worker for worker in world.workers if not worker.dead]
        if alive:
            draw.choice(alive).die("lost")
        world.plan(draw.expovariate(1 / mean_s), lose_one)

    world.on_new_worker.append(prepare)
    world.plan(draw.expovariate(1 / mean_s), lose_one)
    driver = world.drive(
        num_workers,
        min_workers=num_workers // 2,
        resize_cooldown_s=0.0,
        can_join=mode == "in place",
        timeout_s=1800.0,
    )

    class OverError(Exception):
        """The simulated time has ended."""

    def end():
        raise OverError

    world.plan(length_s, end)
    with contextlib.suppress(OverError, WorkerLostError):
        driver.train(10**9, max_retries=math.inf)
    return world.furthest * given["step_s"] / length_s


def measure(args):
    """Return the goodput of each mode by the mean time between failures."""
    given = {
        "start_s": args.start_s,
        "setup_s": args.setup_s,
        "join_ms_per_worker": args.join_ms,
        "step_s": args.step_s,
    }
    restart_s = args.start_s + args.setup_s + args.join_ms * args.num_workers / 1000
    simulation.TICK_S = TICK_S
    simulation.MAX_TICKS = simulation.MAX_LOOKS = 10**12
    rows = {}
    print(f"{args.num_workers} workers; goodput in %", flush=True)
    print(f"{'a loss every':>14}" + "".join(f"{mode:>16}" for mode in (*MODES, "all or nothing")))
    for mean_s in args.mean_s:
        began = time.perf_counter()
        row = rows[mean_s] = {
            mode: simulate(mode, args.num_workers, mean_s, args.seconds, given) for mode in MODES
        }
        row["all or nothing"] = math.exp(-restart_s / mean_s)
        shares = "".join(f"{100 * share:16.1f}" for share in row.values())
        print(f"{mean_s:12g} s{shares}   ({time.perf_counter() - began:.0f} s)", flush=True)
    return {"num_workers": args.num_workers, "given": given, "goodput": rows}


def draw(result, path):
    """Draw the goodput of each mode over the mean time between failures."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    rows = dict(sorted(result["goodput"].items()))
    colors = {"in place": "#e4572e", "restart all": "#8da0b3", "all or nothing": "#55606b"}
    figure, axis = pyplot.subplots(figsize=(7, 3.6))
    for mode, color in colors.items():
        style = ":" if mode == "all or nothing" else "o-"
        axis.plot(list(rows), [100 * row[mode] for row in rows.values()], style, color=color)
        axis.plot([], [], style, color=color, label=mode)
    axis.set(
        title=f"{result['num_workers']:,} workers",
        xlabel="seconds between two losses, on average",
        ylabel="goodput in %",
        xscale="log",
        ylim=(0, 100),
    )
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=1000)
    parser.add_argument("--mean-s", type=float, nargs="+", default=[1, 3, 10, 30])
    parser.add_argument("--seconds", type=float, default=120.0, help="length of a run")
    parser.add_argument("--start-s", type=float, default=5.0, help="a process and its imports")
    parser.add_argument("--setup-s", type=float, default=10.0, help="the operator's setup")
    parser.add_argument("--join-ms", type=float, default=1.0, help="of a new generation, a worker")
    parser.add_argument("--step-s", type=float, default=0.25, help="a step")
    parser.add_argument("--smoke-test", action="store_true", help="a few workers, a minute")
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--draw", type=Path, help="draw it there (needs matplotlib)")
    args = parser.parse_args()
    if args.smoke_test:
        args.num_workers, args.seconds, args.mean_s = 10, 60.0, [10]
    result = measure(args)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))
    if args.draw:
        draw(result, args.draw)


if __name__ == "__main__":
    main()
