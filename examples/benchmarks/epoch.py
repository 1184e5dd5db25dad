"""Time an epoch of raysgd, plain DDP, Lightning, Accelerate, and Ray Train in turn.

    python examples/benchmarks/epoch.py
    python examples/benchmarks/epoch.py --runs 3 --peers "raw DDP" raysgd
    python examples/benchmarks/epoch.py --compiled
    python examples/benchmarks/epoch.py --guard
    python examples/benchmarks/epoch.py --exact
    python examples/benchmarks/epoch.py --local

Each side has two workers with one thread each, which stay alive for the whole run. The sides take
turns, and their losses must agree after each epoch. *mlp* is a tiny network that measures overhead.
*resnet* measures arithmetic, and *loader*, with large batches for a linear model, the loading of
samples that are in memory. ``--compiled`` compares raysgd and plain DDP with compiled models,
which compile in the warm-up epochs. ``--guard`` compares raysgd with and without comparisons of the
replicas, and ``--exact`` with and without ``exact="bits"``. ``--local`` compares raysgd in this
process with a loop by hand.
"""

import argparse
import json
import math
import os
import time
from pathlib import Path

import ray
import torch
from _peers import COMPILED_PEERS, EXACT_PEERS, GUARD_PEERS, LOCAL_PEERS, PEERS
from _workloads import NUM_STEPS, NUM_WORKERS, in_turn, machine, spread

WARM_UP = 2
TOLERANCE = {"mlp": 1e-5, "resnet": 0.1, "loader": 1e-5}
"""Tolerance of the losses. All sides use the same samples per step. However, not all assign the
same half to the same worker, which affects batch normalization."""


def time_epochs(name, num_steps, runs, peers):
    """Return the seconds per epoch of each side, and their ratios to those of the first."""
    sides = {peer: start(name, num_steps, runs + WARM_UP) for peer, start in peers.items()}
    peers = list(peers)
    losses = {}

    def timed(peer):
        def epoch(run):
            started = time.perf_counter()
            losses[peer] = sides[peer].epoch(run)
            seconds = time.perf_counter() - started
            expected = losses[peers[0]]
            found = math.nan if losses[peer] is None else losses[peer]
            if not math.isclose(found, expected, rel_tol=TOLERANCE[name], abs_tol=1e-6):
                raise SystemExit(
                    f"losses differ in epoch {run}: {expected} with {peers[0]}, {losses[peer]} "
                    f"with {peer}"
                )
            return seconds

        return epoch

    times = in_turn(runs, {peer: timed(peer) for peer in peers}, WARM_UP)
    for side in sides.values():
        side.close()
    reference = times[peers[0]]
    return {
        peer: spread(seconds)
        | {"ratio": spread([s / r for s, r in zip(seconds, reference, strict=True)])}
        for peer, seconds in times.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=9, help="counted epochs of each side")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--only", nargs="+", choices=NUM_STEPS, default=list(NUM_STEPS))
    parser.add_argument("--compiled", action="store_true", help="models that torch has compiled")
    parser.add_argument("--guard", action="store_true", help="raysgd with and without a guard")
    parser.add_argument("--exact", action="store_true", help="raysgd with and without equal bits")
    parser.add_argument("--local", action="store_true", help="raysgd and a loop in this process")
    parser.add_argument("--smoke-test", action="store_true", help="few steps, three runs")
    parser.add_argument("--json", type=Path, help="write the result there")
    args = parser.parse_args()
    runs = 3 if args.smoke_test else args.runs
    known = COMPILED_PEERS if args.compiled else PEERS
    peers = {peer: known[peer] for peer in args.peers if peer in known}
    peers = GUARD_PEERS if args.guard else LOCAL_PEERS if args.local else peers
    peers = EXACT_PEERS if args.exact else peers
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    # Enough CPUs for the idle workers of the other side.
    ray.init("local", num_cpus=2 * NUM_WORKERS, include_dashboard=False, log_to_driver=False)
    result = {"machine": machine(), "epoch": {}}
    for name in args.only:
        num_steps = NUM_STEPS[name]
        num_steps = max(2, num_steps // 20) if args.smoke_test else num_steps
        rows = result["epoch"][name] = time_epochs(name, num_steps, runs, peers)
        print(f"\nan epoch of {name}: {num_steps} steps, {runs} runs in turn")
        print(f"{'':12}{'median':>11}{next(iter(peers)) + ' = 1':>15}   (min to max)")
        for peer, row in rows.items():
            ratio = row["ratio"]
            print(
                f"{peer:12}{row['median']:9.3f} s{ratio['median']:15.3f}   "
                f"({ratio['min']:.3f} to {ratio['max']:.3f})",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
