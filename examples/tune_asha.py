"""Search for good hyperparameters with Ray Tune, and stop bad trials early (ASHA).

    python examples/tune_asha.py
    python examples/tune_asha.py --num-workers 2 --smoke-test

Each trial trains a small network on scikit-learn's handwritten digits, with its own learning rate
and width. After 1, 3, and 9 epochs, ASHA stops a trial that is not in the best third so far.
Therefore good trials get most of the time.
"""

import argparse
import os
import tempfile
import time

import ray
import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator
from raysgd.utils import BATCH_SIZE


class DigitClassifier(TrainingOperator):
    """A network with one hidden layer. The search varies its width and the learning rate."""

    def setup(self, config):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(64, config["width"]),
            torch.nn.ReLU(),
            torch.nn.Linear(config["width"], 10),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=torch.nn.CrossEntropyLoss()
        )
        pixels, digits = load_digits(return_X_y=True)
        data = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(digits))
        train, validation = torch.utils.data.random_split(
            data, [1440, 357], generator=torch.Generator().manual_seed(0)
        )
        size = config[BATCH_SIZE]
        self.register_data(
            train_loader=DataLoader(train, batch_size=size, shuffle=True),
            validation_loader=DataLoader(validation, batch_size=size),
        )


class Log(tune.Callback):
    """Prints a line when a trial ends."""

    def __init__(self):
        self.begun = False

    def on_trial_complete(self, iteration, trials, trial, **info):
        if not self.begun:
            print("\ntrial        lr   width   epochs   val_accuracy")
        self.begun = True
        result = trial.last_result
        print(
            f"{trial.trial_id[-2:]:>5}   {trial.config['lr']:.5f}   {trial.config['width']:5d}   "
            f"{result['training_iteration']:6d}   {result['val_accuracy']:12.2%}",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=1, help="of each trial")
    parser.add_argument("--num-trials", type=int, default=16)
    parser.add_argument("--use-gpu", action="store_true", help="one GPU a worker")
    parser.add_argument("--smoke-test", action="store_true", help="three trials of three epochs")
    args = parser.parse_args()
    num_trials, num_epochs = (3, 3) if args.smoke_test else (args.num_trials, 27)

    started = time.perf_counter()
    if not ray.is_initialized():
        own = {"address": "local", "num_cpus": max(args.num_workers, os.cpu_count())}
        ray.init(log_to_driver=False, **({} if "RAY_ADDRESS" in os.environ else own))
    num_cpus_per_worker = 1
    if args.smoke_test:  # each trial takes all CPUs, so that all run one by one in one process
        num_cpus_per_worker = int(ray.cluster_resources()["CPU"]) // args.num_workers
    trainable = TorchTrainer.as_trainable(
        training_operator_cls=DigitClassifier,
        config={BATCH_SIZE: 64},  # the trial's config is merged over this
        num_workers=args.num_workers,
        num_cpus_per_worker=num_cpus_per_worker,
        use_gpu=args.use_gpu,
        use_local=True,  # worker 0 runs in the trial's process
    )
    with tempfile.TemporaryDirectory() as folder:
        tuner = tune.Tuner(
            trainable,
            param_space={"lr": tune.loguniform(1e-4, 1), "width": tune.choice([16, 64, 256])},
            tune_config=tune.TuneConfig(
                metric="val_accuracy",
                mode="max",
                num_samples=num_trials,
                scheduler=ASHAScheduler(max_t=num_epochs, grace_period=1, reduction_factor=3),
                search_alg=tune.search.BasicVariantGenerator(random_state=0),
                reuse_actors=True,  # the next trial reuses the process
            ),
            run_config=tune.RunConfig(storage_path=folder, callbacks=[Log()], verbose=0),
        )
        results = tuner.fit()
    if results.errors:
        raise SystemExit(results.errors[0])

    best = results.get_best_result()
    spent = sum(result.metrics["training_iteration"] for result in results)
    print(
        f"\nbest: lr {best.config['lr']:.5f}, width {best.config['width']}, "
        f"val_accuracy {best.metrics['val_accuracy']:.2%}\n"
        f"{spent} epochs instead of {num_trials * num_epochs}, "
        f"done in {time.perf_counter() - started:.1f} s"
    )
    if not args.smoke_test and best.metrics["val_accuracy"] < 0.95:
        raise SystemExit("val_accuracy is below 95 %")


if __name__ == "__main__":
    main()
