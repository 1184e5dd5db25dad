"""Write your own training loop over an epoch.

    python examples/custom_loop.py
    python examples/custom_loop.py --num-workers 3 --float16

The loop adds noise to the pixels of every second batch. raysgd still counts and partitions the
batches that the loop takes from its iterator. `self.autocast`, `self.backward`, and
`self.optimizer_step` add mixed precision, accumulation, and clipping.
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator


class Robust(TrainingOperator):
    """Trains on clean and on noisy images, and reports metrics for both."""

    def setup(self, config):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
        )
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.Adam(model.parameters(), lr=config["lr"]),
            criterion=torch.nn.CrossEntropyLoss(),
            max_grad_norm=5.0,
        )
        data = load_digits()
        images = torch.tensor(data.images, dtype=torch.float32) / 16
        labels = torch.tensor(data.target)
        self.register_data(
            train_loader=DataLoader(
                TensorDataset(images[:1440], labels[:1440]), batch_size=32, shuffle=True
            ),
            validation_loader=DataLoader(
                TensorDataset(images[1440:], labels[1440:]), batch_size=128
            ),
        )

    def train_epoch(self, iterator, info=None, num_steps=None, epoch_idx=0):
        self.train_mode(True)
        sums = {"clean": [0.0, 0], "noisy": [0.0, 0]}
        for index, batch in enumerate(iterator):
            images, labels = self.to_device(batch)
            kind = "noisy" if index % 2 else "clean"
            if kind == "noisy":
                images = images + info["noise"] * torch.randn_like(images)
            with self.autocast():
                loss = self.criterion(self.model(images), labels)
            self.backward(loss)
            self.optimizer_step(self.optimizer)
            sums[kind][0] += float(loss.detach()) * len(labels)
            sums[kind][1] += len(labels)
        return {
            **{f"{kind}_loss": total / count for kind, (total, count) in sums.items() if count},
            "num_samples": sum(count for _, count in sums.values()),
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--num-epochs", type=int, default=8)
    parser.add_argument("--float16", action="store_true", help="mixed precision, loss scaled")
    parser.add_argument("--use-gpu", action="store_true", help="one GPU a worker")
    parser.add_argument("--smoke-test", action="store_true", help="two epochs, no more")
    args = parser.parse_args()

    started = time.perf_counter()
    with TorchTrainer(
        training_operator_cls=Robust,
        config={"lr": 3e-3},
        num_workers=args.num_workers,
        use_local=args.num_workers == 1,  # needs no Ray
        use_gpu=args.use_gpu,
        use_fp16=args.float16,
        amp_dtype=torch.float16 if args.float16 else None,
    ) as trainer:
        for _ in range(2 if args.smoke_test else args.num_epochs):
            train, validation = trainer.train(info={"noise": 0.2}), trainer.validate()
            print(
                f"epoch {train['epoch']}   clean_loss {train['clean_loss']:.4f}   "
                f"noisy_loss {train['noisy_loss']:.4f}   "
                f"val_accuracy {validation['val_accuracy']:.2%}"
            )
    print(f"done in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
