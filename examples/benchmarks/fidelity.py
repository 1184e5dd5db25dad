"""Compare an epoch of three workers that were four with an epoch of four.

    python examples/benchmarks/fidelity.py
    python examples/benchmarks/fidelity.py --runs 3

Both make the same steps on the same samples. The three workers split larger batches into parts. If
each worker has its own processor, an epoch of three takes 4/3 of the time. Any excess is the cost
of the parts. With fewer processors, it takes less.
"""

import argparse
import json
import os
import time
from pathlib import Path

import ray
from _peers import Regression
from _workloads import BATCH_SIZES, NUM_STEPS, in_turn, machine, spread

from raysgd import ElasticConfig, TorchTrainer
from raysgd.testing import chaos

NUM_WORKERS = 4
GOAL = 1.05 * NUM_WORKERS / (NUM_WORKERS - 1)


def make_trainer(num_steps):
    return TorchTrainer(
        training_operator_cls=Regression,
        # The data are sized for two workers.
        config={"name": "resnet", "num_steps": 2 * num_steps},
        num_workers=NUM_WORKERS,
        elastic=ElasticConfig(replace_workers=False),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=9, help="counted epochs of each side")
    parser.add_argument("--smoke-test", action="store_true", help="few steps, three runs")
    parser.add_argument("--json", type=Path, help="write the result there")
    args = parser.parse_args()
    runs = 3 if args.smoke_test else args.runs
    num_steps = 2 if args.smoke_test else NUM_STEPS["resnet"]
    os.environ["OMP_NUM_THREADS"] = "1"
    # Enough CPUs for the idle workers of the other group.
    ray.init("local", num_cpus=2 * NUM_WORKERS, include_dashboard=False, log_to_driver=False)
    with make_trainer(num_steps) as four, make_trainer(num_steps) as three:
        three.train(num_steps=1)
        chaos.kill(three, NUM_WORKERS - 1)
        three.train()

        def epoch(trainer, num_workers):
            started, before = time.perf_counter(), trainer.global_step
            trainer.train()
            seconds = time.perf_counter() - started
            assert trainer.num_workers == num_workers
            assert trainer.global_step == before + num_steps
            return seconds

        sides = {
            "four": lambda _: epoch(four, NUM_WORKERS),
            "three": lambda _: epoch(three, NUM_WORKERS - 1),
        }
        times = in_turn(runs, sides, warm_up=2)
    ratios = [few / all_ for few, all_ in zip(times["three"], times["four"], strict=True)]
    result = {"machine": machine(), "samples": num_steps * BATCH_SIZES["resnet"] * NUM_WORKERS}
    result |= {name: spread(seconds) for name, seconds in times.items()} | {"ratio": spread(ratios)}
    for name in times:
        print(f"{name:6} workers: {result[name]['median']:.3f} s an epoch of {num_steps} steps")
    ratio = result["ratio"]
    print(
        f"ratio: {ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f}); with a "
        f"processor for each worker at most {GOAL:.3f}"
    )
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
