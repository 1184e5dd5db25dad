"""TFTrainer on real workers: exact steps, and lost workers.

Importing TensorFlow takes each worker seconds, so most tests share two workers. In a soak, two more
exchange gradients with Horovod.
"""

import functools
import itertools

import numpy as np
import pytest

from raysgd import ElasticConfig, TFTrainer
from raysgd.callbacks import LearningRateMonitor
from raysgd.errors import CheckpointError
from raysgd.testing import chaos
from tests.conftest import IN_SOAK, import_horovod, needs_tensorflow, wait_until
from tests.ends import by_timer, check_that_shutdown_ends, hold
from tests.faulty import pids_of
from tests.tf_operators import Digits, digits, replica_hash, weights

pytestmark = needs_tensorflow

QUICK = ElasticConfig(backoff_initial_s=0.2, backoff_max_s=2.0, resize_cooldown_s=0.0)
STEPS = {"shuffle": False, "optimizer": "SGD", "lr": 0.1}
"""Config of steps that depend only on the data, not on random numbers."""
OWN_STEPS = {**STEPS, "data": "tf", "shuffle_validation": True, "own_step": True}
ARRAYS = {**STEPS, "data": "arrays"}


def make_trainer(config, **arguments):
    """Return a trainer with 32 samples per step, by default on two workers."""
    given = {"num_workers": 2, "elastic": QUICK, "timeout_s": 120, **arguments}
    config = {**config, "batch_size": 32 // given["num_workers"]}
    return TFTrainer(training_operator_cls=Digits, config=config, **given)


def hashes(trainer):
    return set(trainer.apply_all_operators(replica_hash))


def own_labels(operator):
    return [label for _, labels in operator.validation_loader for label in labels.numpy().tolist()]


def check_that_two_work_as_one(trainer, config):
    """Check that 20 steps of two new workers equal those of one with twice the batch."""
    before = trainer.apply_all_operators(weights)[0]
    trainer.train(num_steps=20)
    assert len(hashes(trainer)) == 1
    found = trainer.apply_all_operators(weights)[0]
    assert np.abs(found - before).max() > 0.01
    with make_trainer(config, num_workers=1, use_local=True) as alone:
        alone.train(num_steps=20)
        expected = alone.apply_all_operators(weights)[0]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def check_that_two_learn_the_digits(trainer, path):
    trainer.train()  # the rest of the epoch
    for epoch in (2, 3):
        trained, validated = trainer.train(), trainer.validate()
        assert trained["epoch"] == epoch
        assert trained["num_samples"] == 1440
        assert trained["lr"] == pytest.approx(STEPS["lr"])
        assert validated["num_samples"] == 357  # 23 batches over two workers, the last of 5
        assert len(hashes(trainer)) == 1
    assert validated["val_accuracy"] > 0.8  # 0.91, and 0.1 before training
    model = trainer.get_model()
    (_, _), (images, labels) = digits()
    own = (model.predict(images, verbose=0).argmax(axis=1) == labels).mean()
    assert validated["val_accuracy"] == pytest.approx(own, abs=1e-6)

    trainer.save(path)
    step = trainer.global_step
    (held,) = hashes(trainer)
    trainer.train(num_steps=3)
    assert hashes(trainer) != {held}
    trainer.load(path)
    assert trainer.global_step == step
    assert hashes(trainer) == {held}


@pytest.mark.skipif(not IN_SOAK, reason="four workers import TensorFlow, for a rare combination")
def test_two_workers_learn_the_digits_with_horovod(module_cluster, tmp_path):
    import_horovod()
    with make_trainer(ARRAYS, backend="horovod", callbacks=[LearningRateMonitor()]) as trainer:
        check_that_two_work_as_one(trainer, ARRAYS)
        check_that_two_learn_the_digits(trainer, tmp_path / "state")
        step = trainer.global_step
        with chaos.Chaos(trainer, [chaos.Fault(rank=1, step=step + 5)]):
            trainer.train()  # all workers restart
        assert trainer.global_step == 4 * 45
        assert [e.kind for e in trainer.events if e.kind in ("lost", "restarted")] == [
            "lost",
            "restarted",
        ]
        # comes last, because all workers restart after an exception
        with pytest.raises(CheckpointError, match="models"):
            trainer.load_state_dict({**trainer.state_dict(), "models": []})


@pytest.fixture(scope="module")
def shared(module_cluster):
    """Two workers, which the tests share, and their first state."""
    with make_trainer(OWN_STEPS, callbacks=[LearningRateMonitor()]) as made:
        yield made, made.state_dict()


@pytest.fixture
def trainer(shared):
    """The shared workers in their first state."""
    shared[0].load_state_dict(shared[1])
    return shared[0]


@pytest.mark.slow("two workers import TensorFlow")
def test_two_workers_learn_the_digits_in_step(trainer, tmp_path):
    check_that_two_work_as_one(trainer, OWN_STEPS)
    check_that_two_learn_the_digits(trainer, tmp_path / "state")
    parts = trainer.apply_all_operators(own_labels)
    # each sample once, although the data set shuffles without a seed
    assert sorted(itertools.chain(*parts)) == sorted(digits()[1][1])


def means_of_all_kinds(operator):
    """Return the types, and for each type the mean of a tensor over the workers, as lists."""
    import tensorflow as tf

    kinds = (tf.float32, tf.bfloat16, tf.float16, tf.float64)
    dense = [tf.fill([2, 3], tf.constant(operator.world_rank + 1, kind)) for kind in kinds]
    means = operator._train_state.collectives.all_reduce_mean(dense)
    types = [mean.dtype.name for mean in means]
    return types, [tf.cast(mean, tf.float32).numpy().tolist() for mean in means]


def test_gradients_of_every_type_are_averaged(trainer):
    own, other = trainer.apply_all_operators(means_of_all_kinds)
    assert own == other
    types, dense = own
    assert types == ["float32", "bfloat16", "float16", "float64"]
    assert dense == [[[1.5] * 3] * 2] * 4


def change_of_kernels(operator):
    """Return how much a step lowers two kernels, if each worker has another loss."""
    import tensorflow as tf

    kernels = [layer.kernel.value for layer in operator.model.layers]

    def loss_of(_):
        if operator.world_rank == 0:
            return tf.reduce_sum(kernels[0])
        return tf.add_n([tf.reduce_sum(tf.gather(kernel, [0])) for kernel in kernels])

    before = [kernel.numpy() for kernel in kernels]
    operator.minimize(loss_of, tf.constant(0.0))
    return [old - kernel.numpy() for old, kernel in zip(before, kernels, strict=True)]


def test_different_branches_on_workers_make_one_update(trainer):
    changes = trainer.apply_all_operators(change_of_kernels)
    for of_both, first_row, rest in zip(
        zip(*changes, strict=True), (0.1, 0.05), (0.05, 0.0), strict=True
    ):
        for change in of_both:
            np.testing.assert_allclose(change[0], first_row, atol=1e-6)
            np.testing.assert_allclose(change[1:], rest, atol=1e-6)
    assert len(hashes(trainer)) == 1


@pytest.mark.ends_shared(place=-1)  # a replacement lacks data that later tests register
@pytest.mark.slow("a worker imports TensorFlow to take the place of a lost one")
def test_lost_worker_costs_no_finished_step_and_is_replaced(trainer):
    before = pids_of(trainer)
    trainer.apply_all_operators(lambda op: setattr(op.model.layers[0], "trainable", False))
    step, epoch, num_events = trainer.global_step, trainer.epoch, len(trainer.events)
    with chaos.Chaos(trainer, [chaos.Fault(rank=1, step=step + 10)]) as injected:
        result = trainer.train()
        wait_until(lambda: not injected.pending)  # a busy driver may kill late
    assert result["epoch"] == epoch + 1
    assert trainer.global_step == (epoch + 1) * 45

    def whole():
        trainer.train(num_steps=5)
        return trainer.num_workers == 2

    wait_until(whole, timeout_s=90)
    kinds = [event.kind for event in trainer.events[num_events:]]
    assert kinds == ["lost", "regrouped", "grown"]
    survivor, replacement = pids_of(trainer)
    assert survivor == before[0]
    assert replacement not in before
    assert len(hashes(trainer)) == 1
    flags = [[False, True]] * 2
    assert trainer.apply_all_operators(lambda op: [x.trainable for x in op.model.layers]) == flags
    # each sample is validated once, whatever the order
    losses = [trainer.validate()["val_loss"] for _ in range(2)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def change_a_flag(operator):
    operator.model.layers[0].trainable = operator.world_rank == 0


def change_a_flag_within_steps(operator):
    def minimize(*arguments):
        change_a_flag(operator)
        return type(operator).minimize(operator, *arguments)

    operator.minimize = minimize


def change_a_weight(operator):
    kernel = operator.model.layers[0].kernel
    kernel.assign_add(kernel * operator.world_rank)


def undo(operator):
    operator.register_data(**vars(operator).pop("loaders", {}))
    vars(operator).pop("minimize", None)


def reads(name, *sizes):
    """Return a function that registers data of each worker: from its rank on, to one of `sizes`."""

    def register(operator):
        import tensorflow as tf

        first = operator.world_rank * (len(sizes) == 1)
        size = sizes[operator.world_rank % len(sizes)]
        rows = tuple(part[first : first + size] for part in digits()[0])
        data = tf.data.Dataset.from_tensor_slices(rows).batch(16)
        before = operator._train_state.data.registered_loaders
        operator.loaders = {f"{kind}_loader": loader for kind, loader in before.items()}
        operator.register_data(**{name: data.filter(lambda *_: True)})  # of unknown length

    return register


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (change_a_flag, "value 0 of .*'frozen' on worker 1"),
        (change_a_flag_within_steps, "what they train"),
        (change_a_weight, "value 0 of"),
        (reads("train_loader", 64), "samples that they have read"),
        (reads("train_loader", 64, 96), "samples that they have read"),
        (reads("validation_loader", 64), "read different samples"),
    ],
)
def test_what_differs_between_workers_is_an_error(trainer, tmp_path, change, named):
    state = trainer.state_dict()
    trainer.apply_all_operators(change)
    save = functools.partial(trainer.save_model, tmp_path / "model.safetensors")
    compare = save if change is change_a_weight else functools.partial(trainer.train, num_steps=5)
    with pytest.raises(RuntimeError, match=named):
        trainer.validate() if named.startswith("read") else compare()
    trainer.apply_all_operators(undo)
    trainer.load_state_dict(state)
    save()
    trainer.train(num_steps=1)
    assert len(hashes(trainer)) == 1


@pytest.mark.ends_shared
def test_a_validation_is_ended_by_a_shutdown(trainer, tmp_path):
    trainer.apply_all_operators(hold("validate_batch", tmp_path / "held"))
    is_held = (tmp_path / "held").exists
    check_that_shutdown_ends(trainer.validate, trainer, by_timer, is_held, 2)
