"""Train a compiled Keras model with creator functions, as in scripts for the oldest TFTrainer.

    python examples/tensorflow_creators.py
    python examples/tensorflow_creators.py --num-workers 1 --smoke-test

Needs TensorFlow: pip install "raysgd[tensorflow]".
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from raysgd import TFTrainer


def model_creator(config):
    import keras

    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(config["lr"]),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def data_creator(config):
    """Return training and validation data with global batches."""
    import tensorflow as tf

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = (data.images.reshape(-1, 64)[order] / 16).astype("float32")
    labels = data.target[order]
    train = tf.data.Dataset.from_tensor_slices((images[:1440], labels[:1440]))
    validation = tf.data.Dataset.from_tensor_slices((images[1440:], labels[1440:]))
    size = config["batch_size"]
    return train.repeat().shuffle(1440).batch(size), validation.batch(size)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--smoke-test", action="store_true", help="two epochs, no more")
    args = parser.parse_args()

    started = time.perf_counter()
    config = {
        "lr": 5e-3,
        "batch_size": 64,
        "fit_config": {"epochs": 1 if args.smoke_test else 5, "steps_per_epoch": 1440 // 64},
    }
    with TFTrainer(
        model_creator,
        data_creator,
        config=config,
        num_replicas=args.num_workers,
        use_local=args.num_workers == 1,  # needs no Ray
    ) as trainer:
        for _ in range(2):
            print(trainer.train())
            result = trainer.validate()
            print(result)
        with tempfile.TemporaryDirectory() as folder:
            trainer.restore(trainer.save(Path(folder) / "digits"))
        model = trainer.get_model()
    model.summary()
    print(f"done in {time.perf_counter() - started:.1f} s")
    if not args.smoke_test and result["validation_accuracy"] < 0.95:
        raise SystemExit(f"validation_accuracy {result['validation_accuracy']:.2%} is below 95 %")


if __name__ == "__main__":
    main()
