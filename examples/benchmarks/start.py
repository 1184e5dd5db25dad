"""Measure the time to the first finished step of raysgd and its peers, in turn.

    python examples/benchmarks/start.py
    python examples/benchmarks/start.py --runs 3 --peers "raw DDP" raysgd

Ray is running, and the script has imported its libraries. Then each side starts two workers, which
import PyTorch, connect, create model and data, and train an epoch of one step.
"""

import argparse
import json
import os
import time
from pathlib import Path

import ray
from _peers import PEERS
from _workloads import NUM_WORKERS, in_turn, machine, spread


def time_start(peer):
    def start(run):
        began = time.perf_counter()
        side = PEERS[peer]("mlp", 1, 1)
        side.epoch(0)
        seconds = time.perf_counter() - began
        side.close()
        return seconds

    return start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="counted starts of each side")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--smoke-test", action="store_true", help="one run")
    parser.add_argument("--json", type=Path, help="write the result there")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    ray.init("local", num_cpus=2 * NUM_WORKERS, include_dashboard=False, log_to_driver=False)
    runs, warm_up = (1, 0) if args.smoke_test else (args.runs, 1)
    times = in_turn(runs, {peer: time_start(peer) for peer in args.peers}, warm_up)
    reference = times[args.peers[0]]
    result = {"machine": machine(), "start": {}}
    print(f"\nfrom nothing to the first finished step, {runs} runs in turn")
    print(f"{'':12}{'median':>11}{args.peers[0] + ' = 1':>15}   (min to max)")
    for peer, seconds in times.items():
        ratio = spread([s / r for s, r in zip(seconds, reference, strict=True)])
        result["start"][peer] = spread(seconds) | {"ratio": ratio}
        print(
            f"{peer:12}{spread(seconds)['median']:9.3f} s{ratio['median']:15.2f}   "
            f"({ratio['min']:.2f} to {ratio['max']:.2f})"
        )
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
