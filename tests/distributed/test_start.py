"""Where workers are placed, how many start, and what each of them knows of its place."""

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raysgd import TorchTrainer
from raysgd.errors import InsufficientResourcesError
from raysgd.execution import placement
from tests.conftest import wait_until
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


def test_a_request_for_room_keeps_its_place_from_one_try_to_the_next(ray_cluster):
    taken = placement_group([{"CPU": 4}])
    assert taken.wait(10)
    queue, found = placement.Queue(), []
    asked = {"num_workers": 2, "min_workers": 1, "queue": queue}
    for _ in range(2):
        with pytest.raises(InsufficientResourcesError):
            placement.reserve({"CPU": 1}, timeout_s=0.2, **asked)
        found += waiting_requests()
    assert len(found) == 2
    assert len(set(found)) == 1
    remove_placement_group(taken)
    reservation = placement.reserve({"CPU": 1}, timeout_s=30, **asked)
    # and one more, for which there is room as well
    first, second = [slot.strategy.placement_group.id.hex() for slot in reservation.slots]
    assert first == found[0] != second
    assert not queue
    reservation.release()


def test_ctrl_c_while_further_room_is_asked_for_leaves_none_behind(ray_cluster, monkeypatch):
    taken = placement_group([{"CPU": 4}])
    assert taken.wait(10)
    asked = {"num_workers": 4, "min_workers": 1, "queue": placement.Queue()}
    with pytest.raises(InsufficientResourcesError):
        placement.reserve({"CPU": 1}, timeout_s=0.2, **asked)
    granted, waits = placement._granted, []

    def interrupted(group, *arguments, **keywords):
        waits.append(group)
        if len(waits) == 3:  # the first is for the fewest, the second for one more
            # Ray may lose the room of a request that is taken back while it is being served
            wait_until(lambda: not waiting_requests())
            raise KeyboardInterrupt
        return granted(group, *arguments, **keywords)

    remove_placement_group(taken)
    wait_until(lambda: ray.available_resources().get("CPU", 0) >= 3)  # one may be given already
    monkeypatch.setattr(placement, "_granted", interrupted)
    with pytest.raises(KeyboardInterrupt):
        placement.reserve({"CPU": 1}, timeout_s=30, **asked)
    wait_until(lambda: ray.available_resources().get("CPU") == 4)
    assert not waiting_requests()


def test_a_trainer_that_was_not_shut_down_is_named_at_once(ray_cluster):
    """As in a notebook, whose cell is run again."""
    kept = {"training_operator_cls": Classifier, "num_workers": 1, "num_cpus_per_worker": 3}
    with TorchTrainer(**kept):
        with pytest.raises(InsufficientResourcesError, match=r"^No room for") as caught:
            TorchTrainer(**kept)
        assert "not shut down hold 3 CPU: call their shutdown()" in str(caught.value)
        # what the cluster never has is not their fault
        with pytest.raises(InsufficientResourcesError, match="No room for 1 worker") as caught:
            TorchTrainer(**{**kept, "num_cpus_per_worker": 5})
        assert "not shut down" not in str(caught.value)
        with pytest.raises(InsufficientResourcesError, match=r"the least .* of up to 2 workers\."):
            TorchTrainer(**{**kept, "num_workers": 2})


def test_room_that_another_thread_holds_is_waited_for(ray_cluster):
    asked = {"bundle": {"CPU": 4}, "num_workers": 1, "min_workers": 1, "timeout_s": 20}
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(placement.reserve, **asked).result()
        with pytest.raises(InsufficientResourcesError, match=r"within 0\.2 s.*wait longer"):
            placement.reserve(**{**asked, "timeout_s": 0.2})
        theirs.release()
    placement.reserve(**asked).release()


def test_a_request_that_is_given_up_is_taken_back(ray_cluster):
    taken = placement_group([{"CPU": 4}])
    assert taken.wait(10)
    queue = placement.Queue()
    for queue_or_none in (queue, None):
        with pytest.raises(InsufficientResourcesError):
            placement.reserve(
                {"CPU": 1}, num_workers=1, min_workers=1, timeout_s=0.2, queue=queue_or_none
            )
        assert len(waiting_requests()) == bool(queue)
        queue.clear()
        assert not waiting_requests()
    remove_placement_group(taken)


def test_training_starts_with_what_fits(two_cpus_taken, caplog):
    with TorchTrainer(training_operator_cls=Classifier, num_workers=4) as trainer:
        assert (trainer.num_workers, trainer.max_workers) == (2, 4)
        assert "with 2 of 4 workers, each with 1 CPU: the cluster has 4 CPU, and no" in caplog.text
        assert trainer.apply_all_operators(lambda op: op.world_size) == [2, 2]
        assert trainer.train()["num_samples"] == 1003


def test_no_room_for_min_workers_is_an_error_that_says_what_there_is(two_cpus_taken, monkeypatch):
    monkeypatch.setenv("SGD_PLACEMENT_GROUP_TIMEOUT_S", "1")
    with pytest.raises(InsufficientResourcesError) as caught:
        TorchTrainer(training_operator_cls=Classifier, num_workers=4, min_workers=3)
    assert "3 workers with 1 CPU each" in str(caught.value)
    assert "the cluster has 4 CPU, of which 2 CPU are free" in str(caught.value)
    assert caught.value.requested == {"CPU": 1}


def test_room_that_comes_ends_the_wait(two_cpus_taken, monkeypatch):
    monkeypatch.setattr(placement, "_SETTLE_S", 0.0)  # what comes so soon is not waited for

    def give_back():
        wait_until(waiting_requests)
        remove_placement_group(two_cpus_taken)

    asked = {"num_workers": 2, "min_workers": 2, "num_cpus_per_worker": 2}
    with ThreadPoolExecutor(1) as pool:
        given_back = pool.submit(give_back)
        with TorchTrainer(training_operator_cls=Classifier, **asked) as trainer:
            assert given_back.done()  # so it waited
            assert trainer.num_workers == 2
        given_back.result()


def test_a_trainer_uses_the_room_that_another_has_just_given_back(ray_cluster):
    for _ in range(2):
        with TorchTrainer(
            training_operator_cls=Classifier, num_workers=2, num_cpus_per_worker=2
        ) as trainer:
            assert trainer.num_workers == 2


def test_threads_are_the_cpus_of_a_worker(ray_cluster):
    import torch

    with TorchTrainer(
        training_operator_cls=Classifier, num_workers=1, num_cpus_per_worker=2
    ) as trainer:
        assert trainer.apply_all_workers(torch.get_num_threads) == [2]
        assert ray_cluster.available_resources()["CPU"] == 2


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
        placement.connect()
    assert not begun


def test_what_is_left_of_a_cluster_that_has_ended_is_in_nobodys_way(
    begun, gone, monkeypatch, tmp_path, caplog
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    placement.connect()
    assert begun == [()]
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(gone + "\n")
    placement.connect()
    assert begun == [(), ("local",)]
    assert f"at {gone}, is gone" in caplog.text


def test_references_to_what_ray_holds_can_be_in_a_config(ray_cluster):
    """The blocks of a Ray Dataset are such."""
    reference = ray_cluster.put({"answer": 42})
    with TorchTrainer(
        training_operator_cls=Classifier, num_workers=2, config={"reference": reference}
    ) as trainer:
        fetched = trainer.apply_all_operators(
            lambda op: ray.get(op.config["reference"], timeout=20)["answer"]
        )
    assert fetched == [42, 42]


def test_a_trainer_inside_of_a_placement_group_uses_its_room(ray_cluster):
    @ray_cluster.remote(num_cpus=1)
    def trial():
        with TorchTrainer(training_operator_cls=Classifier, num_workers=2) as trainer:
            groups = [g for g in placement_group_table().values() if g["state"] != "REMOVED"]
            return trainer.train()["num_samples"], trainer.num_workers, len(groups)

    group = placement_group([{"CPU": 1}] * 3, strategy="PACK")
    strategy = PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
    )
    found = ray_cluster.get(trial.options(scheduling_strategy=strategy).remote(), timeout=120)
    remove_placement_group(group)
    assert found == (1003, 2, 1)


def test_a_placement_group_with_fewer_bundles_starts_fewer_workers(ray_cluster):
    @ray_cluster.remote(num_cpus=1)
    def trial():
        with pytest.raises(InsufficientResourcesError, match="its bundles hold 0 beside the"):
            TorchTrainer(training_operator_cls=Classifier, num_workers=1, num_cpus_per_worker=2)
        with TorchTrainer(training_operator_cls=Classifier, num_workers=3) as trainer:
            return trainer.num_workers, trainer.max_workers

    group = placement_group([{"CPU": 1}] * 2, strategy="PACK")
    strategy = PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=1, placement_group_capture_child_tasks=True
    )
    found = ray_cluster.get(trial.options(scheduling_strategy=strategy).remote(), timeout=120)
    remove_placement_group(group)
    assert found == (1, 3)


def test_one_worker_has_no_process_group(ray_cluster):
    import torch.distributed as dist

    with TorchTrainer(training_operator_cls=Classifier, num_workers=1) as trainer:
        assert trainer.apply_all_workers(dist.is_initialized) == [False]
        assert type(trainer.get_model()).__name__ == "Sequential"
        assert trainer.apply_all_operators(lambda op: type(op.model).__name__) == ["Sequential"]


NODES = """
import json, os, sys
from ray.cluster_utils import Cluster
import ray
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
nodes = [cluster.add_node(num_cpus=2, num_gpus=2) for _ in range(2)]
ray.init(address=cluster.address, log_to_driver=False)

from raysgd import ElasticConfig, TorchTrainer
from raysgd.context import Progress
from raysgd.execution.group import GroupOptions, WorkerGroup
from raysgd.execution.placement import reserve
from raysgd.execution.supervisor import Supervisor
from tests.operators import Classifier


class Places:
    # the execution layer needs no framework: this runner says where it is
    imports = ()
    def prepare(self, context): self.context = context
    def setup(self, context): pass
    def rejoin(self, context, leader): self.context = context
    def progress(self): return Progress()
    def request_stop(self, requested): pass
    def pause_at(self, step): return 0
    def teardown(self): pass
    def where(self):
        c = self.context
        return [c.world_rank, c.local_rank, c.node_rank, list(c.visible_gpus), c.gpu_index]


supervisor = Supervisor(
    WorkerGroup(GroupOptions(num_workers=4, num_gpus=1)), Places(), None, None, 60)
supervisor.start()
print(json.dumps({"places": [o.value() for o in supervisor.call("where")]}), flush=True)
supervisor.shutdown()

with TorchTrainer(
    training_operator_cls=Classifier, num_workers=2, use_gpu=False,
    elastic=ElasticConfig(grow=False),
) as trainer:
    spread = len({node for event in trainer.events for node in event.nodes})
    trainer.train(num_steps=3)
    held = reserve({"CPU": 1}, num_workers=2, min_workers=2, timeout_s=60)
    lost_node = trainer.events[0].nodes[1]
    cluster.remove_node(next(n for n in nodes if n.node_id == lost_node))
    metrics = trainer.train()
    result = {"spread": spread, "left": trainer.num_workers, "samples": metrics["num_samples"]}
    print(json.dumps(result), flush=True)
    print(json.dumps({"ready": [slot.is_ready for slot in held.slots]}), flush=True)
    held.release()
ray.shutdown()
cluster.shutdown()
"""


def test_workers_spread_over_nodes_see_their_gpus_and_survive_a_node(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", NODES],
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 3, run.stderr
    places = lines[0]["places"]
    assert [place[:3] for place in places] == [[0, 0, 0], [1, 1, 0], [2, 0, 1], [3, 1, 1]]
    # all workers of a node see its GPUs in the same order, and each has one of its own
    assert all(place[3] == ["0", "1"] for place in places)
    assert sorted(place[4] for place in places[:2]) == [0, 1]
    assert sorted(place[4] for place in places[2:]) == [0, 1]
    assert lines[1] == {"spread": 2, "left": 1, "samples": 1003 - 3 * 64}
    assert sorted(lines[2]["ready"]) == [False, True]  # what is on the other node stays
