"""Where workers are placed, how many start, and how long they wait for room."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
import torch
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from raysgd import ElasticConfig, TorchTrainer
from raysgd.cluster import reservation
from raysgd.errors import InsufficientResourcesError
from raysgd.utils import BATCH_SIZE
from tests.conftest import needs_runtime_env, wait_until
from tests.ledger import SlowLedger, ledger_of
from tests.operators import Classifier


@pytest.fixture
def two_cpus_taken(ray_cluster):
    taken = placement_group([{"CPU": 2}])
    assert taken.wait(10)
    yield taken
    remove_placement_group(taken)


def waiting_requests():
    table = placement_group_table()
    return [key for key, group in table.items() if group["state"] == "PENDING"]


@needs_runtime_env
def test_path_of_python_with_a_space_is_an_error_if_the_job_has_a_runtime_env(ray_cluster):
    def train():
        sys.executable = "/home/my env/bin/python"
        with pytest.raises(
            RuntimeError, match=r"runtime_env \(env_vars\).*/home/my env/bin/python"
        ):
            TorchTrainer(training_operator_cls=Classifier, num_workers=2)

    task = ray_cluster.remote(train).options(runtime_env={"env_vars": {"A": "1"}})
    ray_cluster.get(task.remote())


@pytest.mark.slow("two groups of workers start")
def test_a_trainer_uses_the_room_that_another_has_just_given_back(ray_cluster, monkeypatch, caplog):
    """Each of the two trainers needs more than half of the four CPUs."""
    # the blocks of a Ray Dataset are references like this one
    reference = ray_cluster.put({"answer": 42})
    with TorchTrainer(
        training_operator_cls=Classifier,
        num_workers=2,
        num_cpus_per_worker=2,
        resources_per_worker={"memory": 2**20},
        config={"reference": reference},
    ) as trainer:
        assert ray_cluster.available_resources().get("CPU", 0) == 0
        assert trainer.apply_all_workers(torch.get_num_threads) == [2, 2]
        fetched = trainer.apply_all_operators(
            lambda op: ray.get(op.config["reference"], timeout=20)["answer"]
        )
        assert fetched == [42, 42]
    kept = {"training_operator_cls": Classifier, "num_workers": 1, "num_cpus_per_worker": 3}
    with TorchTrainer(**kept) as trainer:
        # one worker has no process group
        assert trainer.apply_all_workers(torch.distributed.is_initialized) == [False]
        assert trainer.apply_all_operators(lambda op: type(op.model).__name__) == ["Sequential"]
        monkeypatch.setenv("SGD_PLACEMENT_GROUP_TIMEOUT_S", "0.5")
        monkeypatch.setattr(reservation, "SETTLE_S", 0.0)  # log the wait immediately
        check_that_it_is_named(kept, caplog)


def check_that_it_is_named(kept, caplog):
    """Check that messages mention trainers that still run, as after a notebook cell runs again."""
    with pytest.raises(InsufficientResourcesError, match=r"that many of up to 2 workers\.") as e:
        TorchTrainer(**{**kept, "num_workers": 2})
    waiting = next(r.message for r in caplog.records if r.message.startswith("Waiting up to"))
    for message in (waiting, str(e.value)):
        assert "until you call shutdown()" in message
    needs = {"num_cpus_per_worker": 5, "resources_per_worker": {"licence": 1}}
    said = r"^No room for 1 worker with 5 CPU, 1 licence each: .* 4 CPU, 0 licence,.*num_cpus_per"
    with pytest.raises(InsufficientResourcesError, match=said):  # immediately
        TorchTrainer(**{**kept, **needs})


def test_reserve_waits_for_room_that_another_thread_holds(ray_cluster, monkeypatch):
    asked = {"bundle": {"CPU": 4}, "num_workers": 1, "min_workers": 1, "timeout_s": 20}
    monkeypatch.setattr(reservation, "SETTLE_S", 0.0)
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(reservation.reserve, **asked).result()
        with pytest.raises(InsufficientResourcesError, match=r"within 0\.2 s.*To wait longer"):
            reservation.reserve(**{**asked, "timeout_s": 0.2})
        given_back = pool.submit(lambda: (wait_until(waiting_requests), theirs.release()))
        reservation.reserve(**asked).release()  # while it waits
        given_back.result()


def test_abandoned_request_is_removed(ray_cluster):
    taken = placement_group([{"CPU": 4}])
    assert taken.wait(10)
    asked = {"bundle": {"CPU": 1}, "num_workers": 2, "min_workers": 1}
    with pytest.raises(InsufficientResourcesError):
        reservation.reserve(**asked, timeout_s=0.2)
    assert not waiting_requests()

    def interrupted():
        assert waiting_requests()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reservation.reserve(**asked, timeout_s=20, is_wanted=interrupted)
    assert not waiting_requests()
    remove_placement_group(taken)


@pytest.mark.slow("a worker starts, and another one when there is room")
def test_training_starts_with_what_fits_and_grows_without_a_retry(two_cpus_taken, caplog):
    with TorchTrainer(
        training_operator_cls=SlowLedger,
        config={"num_samples": 1200, "until_size": 0, BATCH_SIZE: 12},
        num_workers=2,
        num_cpus_per_worker=1.25,
        elastic=ElasticConfig(resize_cooldown_s=0.0),
    ) as trainer:
        assert (trainer.num_workers, trainer.max_workers) == (1, 2)
        assert "with 1 of 2 workers, each with 1.25 CPU. The cluster has 4 CPU" in caplog.text
        trainer.train()
        trainer.train(num_steps=1)
        trainer.apply_all_operators(lambda op: op.config.update(until_size=2))
        remove_placement_group(two_cpus_taken)
        trainer.train(max_retries=0)
        assert trainer.num_workers == 2
        kinds = {event.kind for event in trainer.events}
        assert kinds == {"started", "grown"}
        assert ledger_of(trainer).tolist() == [2] * 1200
