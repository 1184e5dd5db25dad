"""Compare the bits of models over numbers of workers, kills, and resumes. It prints a table.

    python -m tests.equal_bits
    python -m tests.equal_bits --seeds 0

Rank processes without Ray train each model for 3 epochs with 8 logical workers. Then trainers with
random kills and joins train some of the models, and resume on other numbers of workers.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import ray
import torch

from raysgd import ElasticConfig, EqualBits, TorchTrainer
from raysgd.testing import chaos
from tests.unit.torch.bits import (
    BFLOAT16,
    CASES,
    Case,
    Recurrent,
    Trains,
    Transformer,
    digest,
    merged,
)
from tests.unit.torch.cases import processes

NUM_LOGICAL_WORKERS = 8
NUM_EPOCHS = 3
SIZES = (1, 2, 3, 5, 8)
SHARES = {3: (1.0, 4.0, 2.0), 5: (3.0, 1.0, 1.0, 1.0, 2.0)}
MODELS = {
    **{name: case for name, case in CASES.items() if name != "own loop"},
    "recurrent, accumulated, SGD": Case(
        Recurrent, "SGD", register={"gradient_accumulation_steps": 3, "max_grad_norm": 0.1}
    ),
    "recurrent, bfloat16": Case(Recurrent, settings=BFLOAT16),
    "transformer, bfloat16, clipped": Case(
        Transformer, settings=BFLOAT16, register={"max_grad_norm": 0.1}
    ),
    "own loop, clipped": Case(own_loop=True, register={"max_grad_norm": 0.1}),
}
KILLED = ("perceptron", "accumulation", "recurrent", "transformer, bfloat16, clipped")


def hashes_of_ranks(size, shares=None):
    """Return the hash of each model on a number of workers, of state, metrics, and predictions."""
    found = {}
    more = {"num_logical_workers": NUM_LOGICAL_WORKERS, "num_epochs": NUM_EPOCHS, "shares": shares}
    with processes(size, timeout_s=300) as run:
        for name, case in MODELS.items():
            results = run(replace(case, num_workers=size, **more))
            states = {state for state, *_ in results}
            found[name] = digest([*sorted(states), merged(results)])[:12]
    return found


class Slow(Trains):
    def train_batch(self, batch, batch_info):
        time.sleep(0.01)  # so that workers are killed within an epoch
        return super().train_batch(batch, batch_info)


def make_trainer(case, num_workers, operator_cls=Slow, config=(), **settings):
    return TorchTrainer(
        training_operator_cls=operator_cls,
        config={**case.config(), **dict(config)},
        num_workers=num_workers,
        use_gpu=False,
        exact=EqualBits(case.num_logical_workers),
        elastic=ElasticConfig(resize_cooldown_s=0.0, backoff_initial_s=0.1),
        **{"scheduler_step_freq": "batch", **case.settings, **settings},
    )


def hash_of(trainer, trained=()):
    """Return a hash of the state, of a validation, and of the metrics of other calls."""
    state, metrics = trainer.state_dict(), trainer.validate()
    kept = {name: metrics[name] for name in ("val_loss", "val_accuracy", "num_samples")}
    names = ("models", "optimizers", "schedulers", "amp_native")
    return digest([state.get(name) for name in names] + [kept, trained])[:12]


def steps_of(draw):
    """Return the numbers of steps after which calls end."""
    num_steps = 20 * NUM_EPOCHS
    return [*sorted(draw.sample(range(2, num_steps), 2)), num_steps]


def undisturbed(case, seed):
    stops = steps_of(random.Random(seed))
    with make_trainer(case, 1) as trainer:
        sizes = [stop - start for start, stop in zip([0, *stops], stops, strict=False)]
        return hash_of(trainer, [trainer.train(num_steps=size) for size in sizes])


def disturbed(case, seed):
    """Train with random kills, and resume twice on another number of workers, within epochs."""
    draw = random.Random(seed)
    stops = steps_of(draw)
    started, num_killed, sizes, trained = 0, 0, [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        for stop in stops:
            sizes.append(draw.choice([1, 2, 3, 4]))
            with make_trainer(case, sizes[-1]) as trainer:
                if started:
                    trainer.load(path)
                steps = sorted(draw.sample(range(started, stop), min(2, stop - started)))
                faults = [chaos.Fault(draw.randrange(sizes[-1]), step) for step in steps]
                with chaos.Chaos(trainer, faults) as injected:
                    trained.append(trainer.train(num_steps=stop - started, max_retries=10))
                num_killed += len(injected.injected)
                started = stop
                trainer.save(path)
                if stop == stops[-1]:
                    return hash_of(trainer, trained), num_killed, sizes
    raise AssertionError


def compare_ranks():
    columns = {str(size): hashes_of_ranks(size) for size in SIZES}
    columns |= {f"{size} with shares": hashes_of_ranks(size, s) for size, s in SHARES.items()}
    print(f"Hashes with {', '.join(columns)} workers:")
    failed = False
    for name in MODELS:
        found = {column: hashes[name] for column, hashes in columns.items()}
        differs = len(set(found.values())) > 1
        failed |= differs
        print(f"{name:32} {found['1']} {found if differs else 'equal'}", flush=True)
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="disturbed runs of each model")
    parser.add_argument("--killed", nargs="*", default=KILLED, help="models of these runs")
    parser.add_argument("--no-table", action="store_true", help="train only these models")
    args = parser.parse_args()
    torch.set_num_threads(1)
    failed = False if args.no_table else compare_ranks()
    if args.seeds:
        ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    for name in args.killed if args.seeds else ():
        for seed in range(args.seeds):
            case = replace(
                MODELS[name], num_samples=24 * 20, num_logical_workers=NUM_LOGICAL_WORKERS
            )
            expected = undisturbed(case, seed)
            found, num_killed, sizes = disturbed(case, seed)
            failed |= found != expected
            outcome = "equal" if found == expected else f"differs: {found}"
            print(
                f"{name:32} {expected} {outcome} ({num_killed} kills, workers {sizes})", flush=True
            )
    sys.exit(failed)


if __name__ == "__main__":
    main()
