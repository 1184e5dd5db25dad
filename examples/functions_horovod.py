"""Run a training function with Horovod on two workers.

    python examples/functions_horovod.py
    python examples/functions_horovod.py --num-workers 1 --smoke-test

The function is a Horovod script as for horovodrun. raysgd provides reports, checkpoints, and
restarts. docs/horovod.md describes how to install Horovod.
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from raysgd import train
from raysgd.train import Trainer


def make_data():
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return [TensorDataset(images[part], labels[part]) for part in (order[:1440], order[1440:])]


def train_func(config):
    """The training function: runs on every worker."""
    import horovod.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    training, validation = make_data()
    sampler = DistributedSampler(training, hvd.size(), hvd.rank())
    loader = DataLoader(training, batch_size=64 // hvd.size(), sampler=sampler)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    first = 0
    if (saved := train.load_checkpoint()) is not None:
        model.load_state_dict(saved["model"])
        first = saved["epoch"] + 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=config["lr"]),
        named_parameters=model.named_parameters(),
    )
    criterion = torch.nn.CrossEntropyLoss()
    for epoch in range(first, config["num_epochs"]):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            criterion(model(images), labels).backward()
            optimizer.step()
        with torch.no_grad():
            images, labels = validation.tensors
            accuracy = (model(images).argmax(dim=1) == labels).float().mean().item()
        train.save_checkpoint(epoch=epoch, model=model.state_dict())
        train.report(epoch=epoch, accuracy=accuracy)
    return accuracy


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--num-epochs", type=int, default=12)
    parser.add_argument("--smoke-test", action="store_true", help="two epochs, no more")
    args = parser.parse_args()
    started = time.monotonic()
    num_epochs = 2 if args.smoke_test else args.num_epochs
    trainer = Trainer("horovod", num_workers=args.num_workers)
    trainer.start()
    reports = trainer.run_iterator(train_func, {"lr": 3e-3, "num_epochs": num_epochs})
    for results in reports:
        print(f"epoch {results[0]['epoch'] + 1:2d}   accuracy {results[0]['accuracy']:.2%}")
    accuracy = reports.get_final_results()[0]
    trainer.shutdown()
    print(f"done in {time.monotonic() - started:.1f} s")
    if not args.smoke_test and accuracy < 0.95:
        raise SystemExit(f"accuracy {accuracy:.2%} is below 95 %")


if __name__ == "__main__":
    main()
