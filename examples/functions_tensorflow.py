"""A training function for TensorFlow, run on two workers.

    python examples/functions_tensorflow.py
    python examples/functions_tensorflow.py --num-workers 1 --smoke-test

Needs TensorFlow: pip install "raysgd[tensorflow]". The function creates a strategy and makes its
own steps, because fit() of Keras 3 does not support several workers. raysgd provides reports,
checkpoints, and restarts.
"""

import argparse
import time

import numpy as np
from sklearn.datasets import load_digits

from raysgd import train
from raysgd.train import RunConfig, ScalingConfig
from raysgd.train.tensorflow import TensorflowTrainer, prepare_dataset_shard


def train_func(config):
    """The training function: runs on every worker, and imports TensorFlow there."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank, size = train.world_rank(), train.world_size()
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images, labels = data.data[order].astype("float32") / 16, data.target[order]
    share = slice(rank, 1440, size)
    mine = tf.data.Dataset.from_tensor_slices((images[share], labels[share]))
    batches = prepare_dataset_shard(mine.shuffle(1440).batch(64 // size, drop_remainder=True))
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((64,)),
                keras.layers.Dense(128, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        optimizer = keras.optimizers.Adam(config["lr"])
        optimizer.build(model.trainable_variables)
    criterion = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    saved = train.load_checkpoint()
    if saved is not None:
        model.set_weights(saved["weights"])

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            # Gradients are summed over the workers, so each contributes its part of the mean.
            loss = criterion(y, model(x, training=True)) / size
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step(x, y):
        return strategy.run(replica_step, (x, y))

    for epoch in range(0 if saved is None else saved["epoch"] + 1, config["num_epochs"]):
        for x, y in batches:
            step(x, y)
        predicted = model(images[1440:]).numpy().argmax(axis=1)
        train.save_checkpoint(epoch=epoch, weights=model.get_weights())
        train.report(epoch=epoch, accuracy=float((predicted == labels[1440:]).mean()))


class Table(train.TrainingCallback):
    """Prints a line per epoch."""

    def handle_result(self, results, **info):
        print(f"epoch {results[0]['epoch'] + 1:2d}   accuracy {results[0]['accuracy']:.2%}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--num-epochs", type=int, default=12)
    parser.add_argument("--smoke-test", action="store_true", help="two epochs, no more")
    args = parser.parse_args()
    started = time.monotonic()
    result = TensorflowTrainer(
        train_func,
        train_loop_config={"lr": 3e-3, "num_epochs": 2 if args.smoke_test else args.num_epochs},
        scaling_config=ScalingConfig(num_workers=args.num_workers),
        run_config=RunConfig(callbacks=[Table()]),
    ).fit()
    print(f"done in {time.monotonic() - started:.1f} s")
    if not args.smoke_test and result.metrics["accuracy"] < 0.93:
        raise SystemExit(f"accuracy {result.metrics['accuracy']:.2%} is below 93 %")


if __name__ == "__main__":
    main()
