"""TensorFlow operators and data that several tests use."""

import hashlib

import numpy as np

from raysgd.tf import TrainingOperator


def digits():
    """Return the digits as rows of 64 values in 0..1: 1,440 for training, 357 for validation."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = (data.images.reshape(-1, 64) / 16).astype("float32")
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], data.target[order].astype("int64")
    return (images[:1440], labels[:1440]), (images[1440:], labels[1440:])


def make_model(batch_norm=False):
    """Return a small network with seeded initial weights."""
    import keras

    layers = [keras.Input((64,))]
    init = keras.initializers.GlorotUniform
    layers.append(keras.layers.Dense(32, activation="relu", kernel_initializer=init(seed=1)))
    if batch_norm:
        layers.append(keras.layers.BatchNormalization())
    layers.append(keras.layers.Dense(10, kernel_initializer=init(seed=2)))
    return keras.Sequential(layers)


class Digits(TrainingOperator):
    """A classifier of digits; the config sets what tests vary."""

    def setup(self, config):
        import keras
        import tensorflow as tf

        model = make_model(config.get("batch_norm", False))
        kind = getattr(keras.optimizers, config.get("optimizer", "Adam"))
        self.model, self.optimizer, self.criterion, self.metrics = self.register(
            models=model,
            optimizers=kind(config.get("lr", 0.01)),
            criterion=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        train, validation = digits()
        size = config.get("batch_size", 32)
        if num := config.get("num_samples"):
            train = (train[0][:num], train[1][:num])
        if config.get("data") == "tf":
            streams = [tf.data.Dataset.from_tensor_slices(part) for part in (train, validation)]
            if config.get("shuffle", True):
                streams[0] = streams[0].shuffle(len(train[0]))
            if config.get("shuffle_validation"):
                streams[1] = streams[1].shuffle(len(validation[0]))
            self.register_data(
                train_loader=streams[0].batch(size), validation_loader=streams[1].batch(size)
            )
        else:
            self.register_data(
                train_loader=train,
                validation_loader=validation,
                batch_size=size,
                shuffle=config.get("shuffle", True),
            )

    def train_batch(self, batch, batch_info):
        fail = self.config.get("fail_at")
        if fail == (self.world_rank, batch_info.get("global_step")):
            self.config["fail_at"] = None
            raise ValueError("bad batch")
        if not self.config.get("own_step"):
            return super().train_batch(batch, batch_info)
        loss, _ = self.minimize(self.own_loss, *batch)
        return {"train_loss": loss, "num_samples": len(batch[-1])}

    def own_loss(self, images, labels):
        output = self.model(images, training=True)
        return self.criterion(labels, output), output


def weights(operator):
    """Return the trainable weights of an operator's model in one vector."""
    from raysgd.tf.keras import arrays_of

    arrays = arrays_of(operator.model.trainable_variables)
    return np.concatenate([array.ravel() for array in arrays.values()])


def replica_hash(operator):
    """Return a hash, equal on two workers only if models and optimizers are equal."""
    from raysgd.tf.state_access import KerasStateAccess

    digest = hashlib.sha256()
    state = KerasStateAccess(operator._train_state).read()
    for arrays in (*state["models"], *state["optimizers"]):
        for array in arrays.values():
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
