"""TFTrainer on real workers: both Kerases, exact steps, restarts after losses."""

import numpy as np
import pytest

from raysgd import ElasticConfig, TFTrainer
from raysgd.callbacks import LearningRateLogger
from raysgd.errors import CheckpointError
from raysgd.testing import chaos
from tests.conftest import restart_when_created, wait_until
from tests.tf_operators import Digits, digits, pid, replica_hash, weights

QUICK = ElasticConfig(initial_s=0.2, max_s=2.0, resize_cooldown_s=0.0)


def make_trainer(config=None, **arguments):
    given = {"num_workers": 2, "elastic": QUICK, "timeout_s": 120, **arguments}
    return TFTrainer(training_operator_cls=Digits, config=config or {}, **given)


def hashes(trainer):
    return set(trainer.apply_all_operators(replica_hash))


def labels_in_order(operator):
    stream = iter(operator.train_loader.loader)
    return [label for _ in range(3) for label in next(stream)[1].numpy().tolist()]


@pytest.mark.parametrize("keras", ["keras", "tf_keras"])
def test_two_workers_learn_the_digits_and_stay_identical(keras, ray_cluster, tmp_path):
    config = {"keras": keras, "data": "tf"}
    with make_trainer(config, callbacks=[LearningRateLogger()]) as trainer:
        for epoch in range(1, 7):
            trained, validated = trainer.train(), trainer.validate()
            assert trained["epoch"] == epoch
            assert trained["num_samples"] == 1440
            assert trained["lr"] == pytest.approx(0.01)
            assert validated["num_samples"] == 357  # 12 batches over two workers, the last of 5
            assert len(hashes(trainer)) == 1
        assert validated["val_accuracy"] > 0.9  # 0.93 to 0.98, by the order of the samples
        model = trainer.get_model()
        (_, _), (images, labels) = digits()
        own = (model.predict(images, verbose=0).argmax(axis=1) == labels).mean()
        assert validated["val_accuracy"] == pytest.approx(own, abs=1e-6)

        path = trainer.save(tmp_path / "state")
        state = trainer.state_dict()
        trainer.train(num_steps=3)
        trainer.load(path)
        assert trainer.global_step == state["global_step"]
        (held,) = hashes(trainer)
        trainer.train(num_steps=2)
        assert hashes(trainer) != {held}
        orders = trainer.apply_all_operators(labels_in_order)
        assert orders[0] == orders[1]  # though the data set shuffles without a seed
        # last, since all workers start anew after an exception
        with pytest.raises(CheckpointError, match="models"):
            trainer.load_state_dict({**state, "models": []})


def test_k_steps_of_two_workers_are_those_of_one_with_twice_the_batch(ray_cluster):
    settings = {"shuffle": False, "optimizer": "SGD", "lr": 0.1}
    results = {}
    for num_workers, batch_size in ((2, 16), (1, 32)):
        for data in ("arrays", "tf"):
            config = {**settings, "batch_size": batch_size, "data": data}
            config["own_step"] = data == "tf"  # by self.criterion
            with make_trainer(
                config, num_workers=num_workers, use_local=num_workers == 1
            ) as trainer:
                before = trainer.apply_all_operators(weights)[0]
                trainer.train(num_steps=20)
                results[num_workers, data] = trainer.apply_all_operators(weights)[0]
                assert np.abs(results[num_workers, data] - before).max() > 0.01
    for data in ("arrays", "tf"):
        np.testing.assert_allclose(results[2, data], results[1, data], atol=1e-5)


def test_a_lost_worker_costs_no_finished_step(ray_cluster):
    with make_trainer({"data": "tf"}) as trainer:
        trainer.train(num_steps=3)
        before = trainer.apply_all_operators(pid)
        with chaos.Chaos(trainer, [chaos.Fault(kind="kill", rank=1, step=10)]):
            result = trainer.train()
        assert (result["epoch"], trainer.global_step) == (1, 23)
        assert trainer.train()["epoch"] == 2
        assert len(hashes(trainer)) == 1
        kinds = [event.kind for event in trainer.events]
        assert kinds.count("lost") == kinds.count("restarted") == 1
        restarted = next(event for event in trainer.events if event.kind == "restarted")
        lost = next(event for event in trainer.events if event.kind == "lost")
        assert restarted.step >= lost.step - 1
        assert not set(before) & set(trainer.apply_all_operators(pid))

        # all are lost: back to the snapshot of this epoch's begin
        chaos.kill(trainer, 0)
        chaos.kill(trainer, 1)
        assert trainer.train()["epoch"] == 3
        assert trainer.global_step == 3 * 23

        # a user's error: the last committed step is kept, and no retry is spent
        trainer.apply_all_operators(fail_at_the_60th)
        with pytest.raises(ValueError, match="bad batch"):
            trainer.train()
        step = trainer.global_step
        assert trainer.train(max_retries=0)["epoch"] == 4
        assert step >= 69


def fail_at_the_60th(operator):
    operator.config["fail_at"] = (1, operator.global_step + 3)


def test_only_one_fits_after_a_loss_and_two_again_later(ray_cluster, monkeypatch):
    from ray.util.placement_group import placement_group, remove_placement_group

    with make_trainer({"data": "tf"}, num_cpus_per_worker=2) as trainer:
        trainer.train()
        taken = placement_group([{"CPU": 2}])  # gets the room that a restart lets go
        try:
            restart_when_created(monkeypatch, trainer._supervisor, taken)
            chaos.kill(trainer, 1)
            assert trainer.train()["epoch"] == 2
            assert trainer.num_workers == 1
        finally:
            remove_placement_group(taken)

        def grown():
            trainer.train(num_steps=20)
            return trainer.num_workers == 2

        wait_until(grown, timeout_s=90)
        assert trainer.events[-1].kind == "grown"
        assert len(hashes(trainer)) == 1


def test_horovod_takes_the_place_of_the_strategy(ray_cluster):
    pytest.importorskip("horovod")
    config = {"batch_size": 16, "shuffle": False, "optimizer": "SGD", "lr": 0.1}
    found = []
    with make_trainer(config, backend="horovod") as trainer:
        trainer.train(num_steps=20)
        assert len(hashes(trainer)) == 1
        found.append(trainer.apply_all_operators(weights)[0])
        chaos.kill(trainer, 1)
        assert trainer.train()["epoch"] == 1
        assert trainer.global_step == 45
        assert len(hashes(trainer)) == 1
    with make_trainer({**config, "batch_size": 32}, num_workers=1, use_local=True) as trainer:
        trainer.train(num_steps=20)
        found.append(trainer.apply_all_operators(weights)[0])
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)


def import_tensorflow():
    import tensorflow  # noqa: F401


def test_tensorflow_must_not_be_imported_before_the_environment_is_set(ray_cluster):
    with pytest.raises(RuntimeError, match=r"imported on this worker before TF_CONFIG"):
        make_trainer(initialization_hook=import_tensorflow)


def test_trials_of_tune_find_the_better_learning_rate(ray_cluster, tmp_path):
    from ray import tune

    trainable = TFTrainer.as_trainable(training_operator_cls=Digits, num_workers=2, elastic=QUICK)
    results = tune.Tuner(
        trainable,
        param_space={"lr": tune.grid_search([0.01, 1e-6])},
        tune_config=tune.TuneConfig(metric="val_accuracy", mode="max"),
        run_config=tune.RunConfig(
            name="run", storage_path=str(tmp_path), stop={"training_iteration": 2}, verbose=0
        ),
    ).fit()
    assert not results.errors
    assert len(results) == 2
    best = results.get_best_result()
    assert best.config["lr"] == 0.01
    assert best.metrics["val_accuracy"] > 0.8
    assert best.metrics["training_iteration"] == 2
