"""Let a population of trials find a learning-rate schedule (population based training).

    python examples/tune_pbt.py
    python examples/tune_pbt.py --num-workers 2 --smoke-test

Each trial trains a small network on scikit-learn's handwritten digits. The initial learning rates
are far too low or far too high. Every other epoch, worse trials copy the weights and optimizer
state of better ones. They continue with options close to theirs.
"""

import argparse
import os
import tempfile
import time

import ray
import torch
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator
from raysgd.utils import BATCH_SIZE


class DigitClassifier(TrainingOperator):
    """A network with one hidden layer. PBT changes its learning rate and momentum."""

    def setup(self, config):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        )
        optimizer = torch.optim.SGD(
            model.parameters(), lr=config["lr"], momentum=config["momentum"]
        )
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

    def train_batch(self, batch, batch_info):
        # The actual rate of the optimizer shows that a copied trial uses its new rate.
        lr = self.optimizer.param_groups[0]["lr"]
        return {**super().train_batch(batch, batch_info), "optimizer_lr": lr}


class History(tune.Callback):
    """Stores the results of each trial."""

    def __init__(self):
        self.results = {}

    def on_trial_result(self, iteration, trials, trial, result, **info):
        self.results.setdefault(trial.trial_id, []).append(result)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=1, help="of each trial")
    parser.add_argument("--num-trials", type=int, default=4)
    parser.add_argument("--num-epochs", type=int, default=12)
    parser.add_argument("--use-gpu", action="store_true", help="one GPU a worker")
    parser.add_argument("--smoke-test", action="store_true", help="two trials of four epochs")
    args = parser.parse_args()
    num_trials, num_epochs = (2, 4) if args.smoke_test else (args.num_trials, args.num_epochs)

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
    first_rates = [1e-5, 0.3, 1e-4, 10.0]
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=2,
        quantile_fraction=0.5,
        hyperparam_mutations={"lr": tune.loguniform(1e-4, 1), "momentum": [0.0, 0.5, 0.9]},
        synch=True,  # compare trials after the same number of epochs
    )
    history = History()
    with tempfile.TemporaryDirectory() as folder:
        tuner = tune.Tuner(
            trainable,
            param_space={
                "lr": tune.grid_search([first_rates[n % 4] for n in range(num_trials)]),
                "momentum": 0.5,
            },
            tune_config=tune.TuneConfig(
                metric="val_accuracy", mode="max", scheduler=scheduler, reuse_actors=True
            ),
            run_config=tune.RunConfig(
                storage_path=folder,
                stop={"training_iteration": num_epochs},
                callbacks=[history],
                verbose=0,
            ),
        )
        results = tuner.fit()
        if results.errors:
            raise SystemExit(results.errors[0])

    print("\nlearning rate of each epoch, and accuracy after the last")
    for trial, trained in sorted(history.results.items()):
        rates = "  ".join(f"{result['optimizer_lr']:7.2g}" for result in trained)
        print(f"trial {trial[-2:]}   {rates}   {trained[-1]['val_accuracy']:8.2%}")
    accuracy = min(result.metrics["val_accuracy"] for result in results)
    print(f"the worst of {num_trials} trials: {accuracy:.2%}")
    print(f"done in {time.perf_counter() - started:.1f} s")
    if not args.smoke_test and accuracy < 0.9:
        raise SystemExit("a trial has stayed below 90 %")


if __name__ == "__main__":
    main()
