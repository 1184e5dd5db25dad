"""Run functions that were written for the creators of the original RaySGD.

python examples/creators.py
python examples/creators.py --num-workers 3
"""

import argparse
import time

import torch
from sklearn.datasets import load_diabetes
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator


def model_creator(config):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(10, config["hidden_size"]),
        torch.nn.ReLU(),
        torch.nn.Linear(config["hidden_size"], 1),
    )


def optimizer_creator(model, config):
    return torch.optim.Adam(model.parameters(), lr=config["lr"])


def scheduler_creator(optimizer, config):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)


def data_creator(config):
    """Return loaders for training and validation: 442 patients with ten numbers each."""
    data = load_diabetes()
    features = torch.tensor(data.data, dtype=torch.float32) * 20
    target = torch.tensor(data.target, dtype=torch.float32).unsqueeze(1) / 100
    order = torch.randperm(len(target), generator=torch.Generator().manual_seed(0))
    train, validation = order[:360], order[360:]
    return (
        DataLoader(TensorDataset(features[train], target[train]), batch_size=16, shuffle=True),
        DataLoader(TensorDataset(features[validation], target[validation]), batch_size=64),
    )


Operator = TrainingOperator.from_creators(
    model_creator=model_creator,
    optimizer_creator=optimizer_creator,
    data_creator=data_creator,
    loss_creator=torch.nn.MSELoss,
    scheduler_creator=scheduler_creator,
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--num-epochs", type=int, default=20)
    parser.add_argument("--use-gpu", action="store_true", help="one GPU a worker")
    parser.add_argument("--smoke-test", action="store_true", help="two epochs, no more")
    args = parser.parse_args()
    num_epochs = 2 if args.smoke_test else args.num_epochs

    started = time.perf_counter()
    with TorchTrainer(
        training_operator_cls=Operator,
        scheduler_step_freq="epoch",
        config={"lr": 1e-2, "hidden_size": 32},
        num_workers=args.num_workers,
        use_local=args.num_workers == 1,  # needs no Ray
        use_gpu=args.use_gpu,
    ) as trainer:
        for _ in range(num_epochs):
            train, validation = trainer.train(), trainer.validate()
            print(
                f"epoch {train['epoch']:2d}   train_loss {train['train_loss']:.4f}   "
                f"val_loss {validation['val_loss']:.4f}"
            )
    print(f"done in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
