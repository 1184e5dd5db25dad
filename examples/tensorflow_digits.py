"""Train a Keras model on handwritten digits with two workers.

    python examples/tensorflow_digits.py
    python examples/tensorflow_digits.py --num-workers 1 --smoke-test

Needs TensorFlow: pip install "raysgd[tensorflow]". scikit-learn contains the images. The operator
has its own step, because fit() of Keras 3 does not support several workers.
"""

import argparse
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits

from raysgd import TFTrainer
from raysgd.tf import TrainingOperator
from raysgd.utils import BATCH_SIZE


def digits():
    """Return 1,440 and 357 images, as (8, 8, 1) floats from 0 to 1, with their digits."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = (data.images[order, :, :, None] / 16).astype("float32")
    labels = data.target[order].astype("int64")
    return (images[:1440], labels[:1440]), (images[1440:], labels[1440:])


class DigitClassifier(TrainingOperator):
    """Two convolutions and a linear layer."""

    def setup(self, config):
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
                keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
                keras.layers.MaxPooling2D(),
                keras.layers.Flatten(),
                keras.layers.Dropout(0.25),
                keras.layers.Dense(10),
            ]
        )
        self.model, self.optimizer, self.criterion, _ = self.register(
            models=model,
            optimizers=keras.optimizers.Adam(config["lr"]),
            criterion=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        train, validation = digits()
        self.register_data(train_loader=train, validation_loader=validation)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--num-epochs", type=int, default=12)
    parser.add_argument("--backend", choices=("gloo", "horovod"), default="gloo")
    parser.add_argument("--smoke-test", action="store_true", help="two epochs, no more")
    args = parser.parse_args()
    num_epochs = 2 if args.smoke_test else args.num_epochs

    started = time.perf_counter()
    with TFTrainer(
        training_operator_cls=DigitClassifier,
        config={"lr": 2e-3, BATCH_SIZE: 64},
        num_workers=args.num_workers,
        use_local=args.num_workers == 1,  # needs no Ray
        backend=args.backend,
    ) as trainer:
        print(f"{trainer.num_workers} workers ready after {time.perf_counter() - started:.1f} s")
        for _ in range(num_epochs):
            train, validation = trainer.train(), trainer.validate()
            print(
                f"epoch {train['epoch']:2d}   train_loss {train['train_loss']:.4f}   "
                f"val_loss {validation['val_loss']:.4f}   "
                f"val_accuracy {validation['val_accuracy']:.2%}"
            )
        with tempfile.TemporaryDirectory() as folder:
            trainer.load(trainer.save(Path(folder) / "digits"))
        print(f"saved and loaded after {trainer.global_step} steps")
        model = trainer.get_model()

    images, labels = digits()[1]
    predicted = model.predict(images[:8], verbose=0).argmax(axis=1)
    print(f"digits    {labels[:8].tolist()}\npredicted {predicted.tolist()}")
    print(f"done in {time.perf_counter() - started:.1f} s")
    if not args.smoke_test and validation["val_accuracy"] < 0.95:
        raise SystemExit(f"val_accuracy {validation['val_accuracy']:.2%} is below 95 %")


if __name__ == "__main__":
    main()
