"""Training functions with TensorFlow and with Horovod: identical replicas, errors, and losses.

Only a soak tests losses, because all processes restart.
"""

import os
import signal
from pathlib import Path

import pytest

from raysgd import ElasticConfig, train
from raysgd.train import Trainer
from tests.conftest import IN_SOAK, import_horovod

QUICK = ElasticConfig(initial_s=0.2, resize_cooldown_s=0.0)


def die_once(folder, epoch):
    """In a soak, kill worker 1 in epoch 1, once."""
    mark = Path(folder) / "died"
    if not IN_SOAK:
        return
    if epoch == 1 and train.world_rank() == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def learn_with_tensorflow(config):
    import keras
    import numpy as np
    import tensorflow as tf

    from raysgd.train.tensorflow import prepare_dataset_shard

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank, size = train.world_rank(), train.world_size()
    rng = np.random.default_rng(0)
    features = rng.normal(size=(128, 4)).astype("float32")
    target = features.sum(axis=1, keepdims=True)
    mine = tf.data.Dataset.from_tensor_slices((features[rank::size], target[rank::size]))
    shard = prepare_dataset_shard(mine.batch(16))
    policy = shard.options().experimental_distribute.auto_shard_policy
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.2)
        optimizer.build(model.trainable_variables)
    saved = train.load_checkpoint()
    if saved:
        model.set_weights(saved["weights"])

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            # The strategy sums the gradients of all workers.
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2) / train.world_size()
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step(x, y):
        return strategy.run(replica_step, (x, y))

    for epoch in range(saved["epoch"] + 1 if saved else 0, 4):
        for x, y in shard:
            loss = step(x, y)
        die_once(config["folder"], epoch)
        train.save_checkpoint(epoch=epoch, weights=model.get_weights())
        train.report(loss=float(loss), epoch=epoch)
    return {
        "weights": [w.tolist() for w in model.get_weights()],
        "workers": strategy.num_replicas_in_sync,
        "begun_at": saved["epoch"] if saved else None,
        "policy": policy.name,
        "place": os.environ["TF_CONFIG"],
    }


@pytest.mark.slow("two workers import TensorFlow")
def test_tensorflow_trains_in_step(ray_cluster, tmp_path):
    trainer = Trainer("tensorflow", num_workers=2, logdir=tmp_path / "runs", elastic=QUICK)
    trainer.start()
    try:
        results = trainer.run(learn_with_tensorflow, {"folder": str(tmp_path)})
        assert (tmp_path / "died").exists() == IN_SOAK
        assert [result["workers"] for result in results] == [2, 2]
        assert [result["begun_at"] for result in results] == [0 if IN_SOAK else None] * 2
        assert [result["policy"] for result in results] == ["OFF", "OFF"]
        assert '"index": 0' in results[0]["place"]
        assert results[0]["place"].count("127.0.0.1:") == 2
        assert results[0]["weights"] == results[1]["weights"]
        kernel = [value for (value,) in results[0]["weights"][0]]
        assert kernel == pytest.approx([1.0] * 4, abs=0.1)
        kinds = [event.kind for event in trainer.events]
        assert kinds == ["started", "lost", "restarted"][: 3 if IN_SOAK else 1]
    finally:
        trainer.shutdown()


def learn_with_horovod(config):
    import horovod.torch as hvd
    import torch

    hvd.init()
    assert (hvd.rank(), hvd.size()) == (train.world_rank(), train.world_size())
    torch.manual_seed(hvd.rank())  # the first weights differ, until they are broadcast
    model = torch.nn.Linear(4, 1)
    saved = train.load_checkpoint()
    if saved:
        model.load_state_dict(saved["model"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    generator = torch.Generator().manual_seed(hvd.rank())
    for epoch in range(saved["epoch"] + 1 if saved else 0, 4):
        for _ in range(10):
            features = torch.randn(16, 4, generator=generator)
            optimizer.zero_grad()
            loss = ((model(features) - features.sum(dim=1, keepdim=True)) ** 2).mean()
            loss.backward()
            optimizer.step()
        die_once(config["folder"], epoch)
        train.save_checkpoint(epoch=epoch, model=model.state_dict())
        train.report(loss=loss.item(), epoch=epoch)
    return {
        "weights": [p.tolist() for p in model.parameters()],
        "begun_at": saved["epoch"] if saved else None,
        "place": [os.environ[f"HOROVOD_{name}"] for name in ("RANK", "SIZE", "LOG_LEVEL")],
    }


def raise_alone(config):
    """Raise on worker 0 while worker 1 waits for it in a collective."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    hvd.allreduce(torch.ones(1), name="together")
    if hvd.rank() == 0:
        raise KeyError("on purpose")
    hvd.allreduce(torch.ones(1), name="alone")


@pytest.mark.slow("two workers start")
def test_horovod_trains_in_step(ray_cluster, tmp_path):
    import_horovod()
    trainer = Trainer("horovod", num_workers=2, logdir=tmp_path / "runs", elastic=QUICK)
    trainer.start()
    try:
        # The second run has no loss, and its workers are initialized already.
        for begun_at in (0 if IN_SOAK else None, None):
            results = trainer.run(learn_with_horovod, {"folder": str(tmp_path)})
            assert (tmp_path / "died").exists() == IN_SOAK
            assert [result["begun_at"] for result in results] == [begun_at] * 2
            infos = [result["place"] for result in results]
            assert infos == [["0", "2", "warning"], ["1", "2", "warning"]]
            assert results[0]["weights"] == results[1]["weights"]
            assert results[0]["weights"][0][0] == pytest.approx([1.0] * 4, abs=0.1)
        with pytest.raises(KeyError, match="on purpose"):
            trainer.run(raise_alone, {})
    finally:
        trainer.shutdown()
