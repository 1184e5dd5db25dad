"""Train on handwritten digits in full and mixed precision, with gradient accumulation.

    python examples/precision.py
    python examples/precision.py --dtype float16 --num-workers 1 --smoke-test

Every run sees the same data in the same order and starts from the same weights. This shows that the
results match. The speedup of mixed precision depends on the machine: large on GPUs, small on CPUs
with suitable instructions, and none otherwise.
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator
from raysgd.utils import BATCH_SIZE

PRECISIONS = {
    "float32": {},
    "bfloat16": {"use_fp16": True, "amp_dtype": torch.bfloat16},
    "float16": {"use_fp16": True, "amp_dtype": torch.float16},
}


class DigitClassifier(TrainingOperator):
    """Two convolutions and a linear layer, with its own train_batch."""

    def setup(self, config):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, kernel_size=3, padding=1),
            torch.nn.ReLU(),
            torch.nn.Conv2d(16, 32, kernel_size=3, padding=1),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(32 * 4 * 4, 10),
        )
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.Adam(model.parameters(), lr=2e-3),
            criterion=torch.nn.CrossEntropyLoss(),
            gradient_accumulation_steps=2,  # each update covers two batches
            max_grad_norm=5.0,
        )
        digits = load_digits()
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)[order] / 16
        labels = torch.tensor(digits.target)[order]
        train = TensorDataset(images[:1440], labels[:1440])
        validation = TensorDataset(images[1440:], labels[1440:])
        self.register_data(
            train_loader=DataLoader(train, batch_size=config[BATCH_SIZE], shuffle=True),
            validation_loader=DataLoader(validation, batch_size=config[BATCH_SIZE]),
        )

    def train_batch(self, batch, batch_info):
        images, labels = self.to_device(batch)
        with self.autocast():
            output = self.model(images)
            loss = self.criterion(output, labels)
        self.backward(loss)
        self.optimizer_step(self.optimizer)
        accuracy = (output.argmax(dim=1) == labels).double().mean()
        return {
            "train_loss": loss.detach(),
            "train_accuracy": accuracy,
            "num_samples": len(labels),
        }


def train(name, args):
    """Train in one precision and return the accuracy on held-out images."""
    num_epochs, num_steps = (1, 10) if args.smoke_test else (args.num_epochs, None)
    with TorchTrainer(
        training_operator_cls=DigitClassifier,
        config={BATCH_SIZE: 32},
        num_workers=args.num_workers,
        use_gpu=args.use_gpu,
        use_local=args.num_workers == 1,  # needs no Ray
        **PRECISIONS[name],
    ) as trainer:
        started = time.perf_counter()
        for _ in range(num_epochs):
            metrics = trainer.train(num_steps=num_steps)
        seconds = time.perf_counter() - started
        accuracy = trainer.validate()["val_accuracy"]
    print(
        f"{name:8}   train_loss {metrics['train_loss']:.4f}   val_accuracy {accuracy:.2%}   "
        f"{seconds / num_epochs:.2f} s an epoch"
    )
    return accuracy


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--num-epochs", type=int, default=10)
    parser.add_argument(
        "--dtype", choices=["float16", "bfloat16", "both"], default="both", help="beside float32"
    )
    parser.add_argument("--use-gpu", action="store_true", help="one GPU a worker")
    parser.add_argument("--smoke-test", action="store_true", help="ten steps in one of them")
    args = parser.parse_args()
    names = ["bfloat16", "float16"] if args.dtype == "both" else [args.dtype]
    if args.smoke_test:
        names = names[-1:]

    started = time.perf_counter()
    expected = train("float32", args)
    lowest = min(train(name, args) for name in names)
    print(f"done in {time.perf_counter() - started:.1f} s")
    if not args.smoke_test and lowest < expected - 0.01:
        raise SystemExit(f"val_accuracy {lowest:.2%} is more than 1 point below {expected:.2%}")


if __name__ == "__main__":
    main()
