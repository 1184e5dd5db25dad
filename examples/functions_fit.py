"""Run a training function with fit(), and show the result and the best checkpoints.

    python examples/functions_fit.py
    python examples/functions_fit.py --num-workers 4

Stop it and run it again with --storage and the same --name to resume.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import train
from raysgd.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from raysgd.train.torch import TorchTrainer, prepare_data_loader, prepare_model


def train_loop(config):
    """The training function: runs on every worker."""
    data = load_diabetes()
    features = torch.tensor(data.data, dtype=torch.float32) * 20
    target = torch.tensor(data.target, dtype=torch.float32).reshape(-1, 1) / 100
    model = nn.Linear(features.shape[1], 1)
    loader = DataLoader(TensorDataset(features, target), batch_size=32, shuffle=True)
    loader = prepare_data_loader(loader)
    if (checkpoint := train.get_checkpoint()) is not None:
        state = checkpoint.to_dict()
        model.load_state_dict(state["model"])
        loader.load_state_dict(state["loader"])
    prepared = prepare_model(model)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=config["lr"])
    for epoch in range(loader.state_dict()["epoch"], config["num_epochs"]):
        losses = []
        for x, y in loader:
            loss = nn.functional.mse_loss(prepared(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        made = Checkpoint.from_dict({"model": model.state_dict(), "loader": loader.state_dict()})
        train.report({"loss": sum(losses) / len(losses), "epoch": epoch}, checkpoint=made)


def make_trainer(args, storage):
    folder = Path(storage) / args.name
    if TorchTrainer.can_restore(folder):
        print(f"going on with the run in {folder}")
        return TorchTrainer.restore(folder)
    return TorchTrainer(
        train_loop,
        train_loop_config={"lr": 0.02, "num_epochs": 2 if args.smoke_test else 20},
        scaling_config=ScalingConfig(num_workers=args.num_workers),
        run_config=RunConfig(
            name=args.name,
            storage_path=storage,
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(
                num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min"
            ),
        ),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--storage", help="folder for the run; a temporary one by default")
    parser.add_argument("--name", default="diabetes")
    parser.add_argument("--smoke-test", action="store_true", help="two epochs, no more")
    args = parser.parse_args()

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = make_trainer(args, args.storage or folder).fit()
        print(result.metrics_dataframe[["epoch", "loss"]])
        for checkpoint, numbers in result.best_checkpoints:
            print(f"loss {numbers['loss']:.4f} in {checkpoint.path}")
    print(f"done in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
