"""Where workers are placed, how many start, and what each of them knows of its place."""

import itertools
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
import torch
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.utils.data import DataLoader

from raysgd import ElasticConfig, TorchTrainer
from raysgd.cluster import placement, ray_session
from raysgd.errors import InsufficientResourcesError
from raysgd.utils import BATCH_SIZE
from tests.conftest import wait_until
from tests.ledger import Ids, SlowLedger, ledger_of
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


@pytest.mark.slow("two groups of workers start")
def test_a_trainer_uses_the_room_that_another_has_just_given_back(ray_cluster, monkeypatch, caplog):
    """Of four CPUs both need three; what the workers hold beside them is asserted on the way."""
    # the blocks of a Ray Dataset are such references
    reference = ray_cluster.put({"answer": 42})
    with TorchTrainer(
        training_operator_cls=Classifier,
        num_workers=2,
        num_cpus_per_worker=2,
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
        monkeypatch.setenv("SGD_PLACEMENT_GROUP_TIMEOUT_S", "1.5")
        check_that_it_is_named(kept, caplog)


def check_that_it_is_named(kept, caplog):
    """A trainer that was not shut down, as in a notebook whose cell is run again."""
    with pytest.raises(InsufficientResourcesError, match=r"that many of up to 2 workers\.") as e:
        TorchTrainer(**{**kept, "num_workers": 2})
    waiting = next(r.message for r in caplog.records if r.message.startswith("Waiting up to"))
    for message in (waiting, str(e.value)):
        assert "until you call shutdown()" in message
    with pytest.raises(InsufficientResourcesError, match=r"^No room for 1 worker"):
        TorchTrainer(**{**kept, "num_cpus_per_worker": 5})


def test_room_that_another_thread_holds_is_waited_for(ray_cluster):
    asked = {"bundle": {"CPU": 4}, "num_workers": 1, "min_workers": 1, "timeout_s": 20}
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(placement.reserve, **asked).result()
        with pytest.raises(InsufficientResourcesError, match=r"within 0\.2 s.*To wait longer"):
            placement.reserve(**{**asked, "timeout_s": 0.2})
        theirs.release()
    placement.reserve(**asked).release()


def test_abandoned_request_is_removed(ray_cluster):
    taken = placement_group([{"CPU": 4}])
    assert taken.wait(10)
    asked = {"bundle": {"CPU": 1}, "num_workers": 2, "min_workers": 1}
    with pytest.raises(InsufficientResourcesError):
        placement.reserve(**asked, timeout_s=0.2)
    assert not waiting_requests()

    def interrupted():
        assert waiting_requests()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        placement.reserve(**asked, timeout_s=20, is_wanted=interrupted)
    assert not waiting_requests()
    remove_placement_group(taken)


class HiddenOrder:
    """Draws from random numbers of its own, alike on all workers that were there at the start."""

    def __init__(self, size):
        self.size = size
        self.hidden = torch.Generator().manual_seed(0)

    def __len__(self):
        return self.size

    def __iter__(self):
        return iter(torch.randperm(self.size, generator=self.hidden).tolist())


class Growing(SlowLedger):
    """Its batches follow the share of the worker."""

    def make_loader(self, config):
        data = Ids(config["num_samples"])
        return DataLoader(data, config[BATCH_SIZE], sampler=HiddenOrder(len(data)))

    def setup(self, config):
        super().setup(config)
        # twice the share, which is no batch size that follows the share
        data = Ids(config["num_samples"])
        self.register_data(validation_loader=DataLoader(data, batch_size=2 * config[BATCH_SIZE]))
        self.validated = []

    def validate_batch(self, batch, batch_info):
        self.validated += batch.tolist()
        return {"num_samples": len(batch)}


@pytest.mark.slow("a worker starts, and two when there is room")
def test_training_starts_with_what_fits_and_grows_without_a_retry(two_cpus_taken, caplog):
    """New workers take the batches and the order of the first one."""
    num_samples = 1200
    with TorchTrainer(
        training_operator_cls=Growing,
        config={
            "num_samples": num_samples,
            "until_size": 0,
            BATCH_SIZE: 12,
        },
        num_workers=3,
        num_cpus_per_worker=1.25,
        elastic=ElasticConfig(resize_cooldown_s=0.0),
    ) as trainer:
        assert (trainer.num_workers, trainer.max_workers) == (1, 3)
        assert "with 1 of 3 workers, each with 1.25 CPU. The cluster has 4 CPU" in caplog.text
        trainer.train()
        trainer.train(num_steps=1)
        trainer.apply_all_operators(lambda op: op.config.update(until_size=3))
        remove_placement_group(two_cpus_taken)
        trainer.train(max_retries=0)
        assert trainer.num_workers == 3
        assert {event.kind for event in trainer.events} == {"started", "grown"}
        assert ledger_of(trainer).tolist() == [2] * num_samples
        kept = trainer.apply_all_operators(lambda operator: operator._train_state.data.batching())
        assert kept == [{"train": (4, True), "validation": (8, False)}] * 3
        assert trainer.validate()["num_samples"] == num_samples
        validated = trainer.apply_all_operators(lambda operator: operator.validated)
        assert sorted(itertools.chain(*validated)) == list(range(num_samples))


def test_room_that_comes_ends_the_wait(two_cpus_taken, monkeypatch):
    monkeypatch.setattr(placement, "SETTLE_S", 0.0)  # what comes so soon is not waited for

    def give_back():
        wait_until(waiting_requests)
        remove_placement_group(two_cpus_taken)

    with ThreadPoolExecutor(1) as pool:
        given_back = pool.submit(give_back)
        placement.reserve({"CPU": 3}, num_workers=1, min_workers=1, timeout_s=20).release()
        given_back.result()


@pytest.fixture
def gone():
    """The address of a cluster that has ended."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def begun(monkeypatch):
    """What Ray is started with, where it seems not to be."""
    begun = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda *arguments: begun.append(arguments))
    return begun


def test_a_cluster_that_does_not_answer_is_named_at_once(begun, gone, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", gone)
    with pytest.raises(ConnectionError, match=f"RAY_ADDRESS='{gone}'.*'local'"):
        ray_session.connect()
    assert not begun


def test_address_of_an_ended_cluster_is_ignored(begun, gone, monkeypatch, tmp_path, caplog):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    ray_session.connect()
    assert begun == [()]
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(gone + "\n")
    ray_session.connect()
    assert begun == [(), ("local",)]
    assert f"at {gone}, has ended" in caplog.text


def test_inside_of_a_placement_group_its_room_is_used(ray_cluster):
    """Its three bundles hold the caller and two workers, although four are asked for."""

    @ray_cluster.remote(num_cpus=1)
    def count_slots_and_groups():
        asked = {"num_workers": 4, "min_workers": 1, "timeout_s": 20}
        with pytest.raises(InsufficientResourcesError, match="room for 0 next to the caller"):
            placement.reserve({"CPU": 2}, **asked)
        room = placement.reserve({"CPU": 1}, **asked)
        groups = [g for g in placement_group_table().values() if g["state"] != "REMOVED"]
        return len(room.slots), len(groups)

    group = placement_group([{"CPU": 1}] * 3, strategy="PACK")
    strategy = PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=1, placement_group_capture_child_tasks=True
    )
    counting = count_slots_and_groups.options(scheduling_strategy=strategy)
    found = ray_cluster.get(counting.remote(), timeout=120)
    remove_placement_group(group)
    assert found == (2, 1)


def test_resources_of_the_caller_are_subtracted_from_its_bundles():
    bundles = [{"CPU": 1}, {"CPU": 4}, {"CPU": 4, "GPU": 1, "big_group_1_a": 2}]
    assert placement._left_beside(bundles, {}) == bundles
    held = {
        "CPU_group_5f": [(0, 1.5)],
        "CPU_group_1_5f": [(0, 1.5)],
        "GPU_group_2_5f": [(3, 0.5), (4, 0.25)],
        "big_group_1_a_group_2_5f": [(0, 2.0)],
        "bundle_group_5f": [(0, 0.001)],
        "bundle_group_0_5f": [(0, 0.001)],
        "CPU": [(0, 2.0)],
    }
    left = [{"CPU": 1}, {"CPU": 2.5}, {"CPU": 4, "GPU": 0.25, "big_group_1_a": 0}]
    assert placement._left_beside(bundles, held) == left
