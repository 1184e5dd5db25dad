"""Workers on several nodes, while nodes leave and join."""

import json
import os
import subprocess
import sys

import pytest

NODES = """
import json, sys, time
from ray.cluster_utils import Cluster
import ray
# Nodes take seconds to start: the driver's is one of the two, without what nobody looks at.
none = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
node = {"num_cpus": 1, "num_gpus": 2}
cluster = Cluster(initialize_head=True, head_node_args={**node, **none})
other = cluster.add_node(**node)
ray.init(address=cluster.address, log_to_driver=False)

from raysgd import ElasticConfig
from raysgd._internal.worker_status import WorkerStatus
from raysgd.cluster.actor_group import ActorGroup
from raysgd.cluster.group_options import GroupOptions
from raysgd.cluster.reservation import reserve
from raysgd.elastic.call import Call
from raysgd.elastic.controller import Controller

class Places:
    # the execution layer needs no framework: this runner says where it is
    def prepare(self, context): self.context = context
    def setup(self, context): pass
    def rejoin(self, context, leader): self.context = context
    def status(self, acknowledged_step): return WorkerStatus()
    def set_interrupted(self, interrupted): pass
    def pause_at(self, step): return 0
    def teardown(self): pass
    def handle(self, request):
        c = self.context
        return [c.world_rank, c.local_rank, c.node_rank, list(c.visible_gpus), c.gpu_index]


options = GroupOptions(num_workers=4, num_cpus=0.5, num_gpus=1)
controller = Controller(ActorGroup(options), Places(), None, None, 60)
controller.start()
print(json.dumps(controller.run(Call())), flush=True)
controller.shutdown()

# two CPUs would hold three such workers, but each node has room for one
room = reserve({"CPU": 0.6}, num_workers=3, min_workers=1, timeout_s=60)
print(json.dumps([slot.is_ready for slot in room.slots]), flush=True)
room.release()

from raysgd import train
from raysgd.train import Trainer
from raysgd.train.backend import BackendConfig

def function():
    step = begun = (train.load_checkpoint() or {"step": 0})["step"]
    while True:
        step += 1
        time.sleep(0.02)  # the processor is for nodes and workers, which start
        train.report(step=step, size=train.world_size(), begun=begun)
        train.save_checkpoint(step=step)

elastic = ElasticConfig(backoff_initial_s=0.5, backoff_max_s=1.0, resize_cooldown_s=0.0)
trainer = Trainer(BackendConfig(), (1, 2), logdir=sys.argv[1], max_retries=1, elastic=elastic)
trainer.start()
lives, saved = [], 0
for reports in trainer.run_iterator(
    function, checkpoint_strategy=train.CheckpointStrategy(num_to_keep=0)
):
    now = reports[0]
    if not lives or lives[-1]["size"] != now["size"]:
        lives.append({**now, "saved": saved})
    saved = (trainer.latest_checkpoint or {"step": 0})["step"]
    if len(lives) == 1 and now["step"] == 5:
        cluster.remove_node(other)
    elif len(lives) == 2 and now["step"] == lives[1]["step"] + 5:
        other = cluster.add_node(num_cpus=1)
    elif len(lives) == 3 and now["step"] == lives[2]["step"] + 5:
        gcs = ray._raylet.GcsClient(address=cluster.address)
        gcs.drain_node(other.node_id, 2, "tested", 0)
    elif len(lives) == 4:
        break
kinds = [event.kind for event in trainer.events if event.kind != "waiting"]
print(json.dumps({"lives": lives, "kinds": kinds}), flush=True)
trainer.shutdown()

ray.shutdown()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def on_nodes(tmp_path_factory):
    """The three JSON values that `NODES` prints."""
    run = subprocess.run(
        [sys.executable, "-c", NODES, str(tmp_path_factory.mktemp("runs"))],
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    lines = [json.loads(line) for line in run.stdout.splitlines() if line[:1] in ("[", "{")]
    assert len(lines) == 3, run.stderr
    return lines


@pytest.mark.slow("a cluster of several nodes starts, and workers on it again and again")
def test_workers_spread_over_nodes_and_see_the_gpus_of_their_node(on_nodes):
    infos = on_nodes[0]
    assert [info[:3] for info in infos] == [[0, 0, 0], [1, 1, 0], [2, 0, 1], [3, 1, 1]]
    # all workers of a node see its GPUs in the same order, and each uses a different one
    assert all(info[3] == ["0", "1"] for info in infos)
    assert sorted(info[4] for info in infos[:2]) == [0, 1]
    assert sorted(info[4] for info in infos[2:]) == [0, 1]


def test_a_start_reserves_only_what_fits_on_each_node(on_nodes):
    assert on_nodes[1] == [True, True]  # and no request is still pending


def test_function_shrinks_if_a_node_disappears_and_grows_if_one_appears(on_nodes):
    found = on_nodes[2]
    first, alone, again, left = found["lives"]
    assert [life["size"] for life in found["lives"]] == [2, 1, 2, 1]
    assert first["begun"] == 0
    # it resumes from the newest checkpoint, which may be newer than the last report
    assert alone["saved"] <= alone["begun"] <= alone["saved"] + 1
    assert alone["begun"] >= 4
    assert again["begun"] == again["step"] - 1 == again["saved"] + 1
    assert found["kinds"] == ["started", "lost", "restarted", "grown", "draining", "restarted"]
    # at its next checkpoint, the function leaves a draining node
    assert left["begun"] == left["step"] - 1 == left["saved"] + 1
