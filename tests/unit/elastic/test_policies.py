"""Policies for the number of workers, ranks, leaders, waits, and pauses."""

from hypothesis import given
from hypothesis import strategies as st

from raysgd._internal.worker_status import Measurements, ReportedPosition, StateStatus, WorkerStatus
from raysgd.cluster.group_options import workers_that_fit
from raysgd.cluster.worker import WorkerLocation
from raysgd.elastic.config import ElasticConfig
from raysgd.elastic.policies import (
    assign_contexts,
    backoff_s,
    choose_leader,
    choose_pause_step,
    newest_status,
)


def test_the_scarcest_resource_limits_the_workers():
    assert workers_that_fit({"CPU": 8, "GPU": 1}, {"CPU": 1, "GPU": 1}) == 1
    assert workers_that_fit({"CPU": 8}, {"CPU": 1, "GPU": 1}) == 0
    assert workers_that_fit({"CPU": 1}, {"CPU": 0.2}) == 5
    assert workers_that_fit({"CPU": 1}, {}) == 0


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=8))
def test_ranks_are_dense_and_local_ranks_count_each_node_from_zero(nodes):
    locations = [WorkerLocation(node_id=node, node_ip=f"ip-{node}") for node in nodes]
    contexts = assign_contexts(locations, generation=3, has_process_group=True, num_cpus=2)
    assert [c.world_rank for c in contexts] == list(range(len(nodes)))
    for node in set(nodes):
        mine = [c for c, n in zip(contexts, nodes, strict=True) if n == node]
        assert [c.local_rank for c in mine] == list(range(len(mine)))
        assert len({c.node_rank for c in mine}) == 1
    assert {c.node_rank for c in contexts} == set(range(len(set(nodes))))
    for context, node in zip(contexts, nodes, strict=True):
        assert context.node_ip == f"ip-{node}"
        assert (context.world_size, context.generation) == (len(nodes), 3)
        assert context.has_process_group
        assert context.num_cpus == 2


def test_each_worker_sees_all_gpus_of_its_node_and_knows_its_own():
    locations = [
        WorkerLocation(node_id="a", node_ip="1", gpu_ids=("10", "11")),
        WorkerLocation(node_id="a", node_ip="1", gpu_ids=("9",)),
        WorkerLocation(node_id="b", node_ip="2", gpu_ids=("0",)),
    ]
    contexts = assign_contexts(locations, generation=1, has_process_group=True, num_cpus=1)
    # sorted as numbers, because the text "10" is smaller than "9"
    assert [c.visible_gpus for c in contexts] == [("9", "10", "11"), ("9", "10", "11"), ("0",)]
    assert [c.gpu_index for c in contexts] == [1, 0, 0]


CONDITIONS = [StateStatus(), StateStatus(condition="damaged")]
STEPS = [
    WorkerStatus(ReportedPosition(0, False, n), state_status=h) for n in (5, 6) for h in CONDITIONS
]


@given(st.lists(st.sampled_from(STEPS), min_size=2, max_size=4), st.frozensets(st.integers(0, 3)))
def test_no_committed_step_is_discarded(statuses, leaving):
    leader, staying = choose_leader(dict(enumerate(statuses)), leaving)
    steps = [each.position.global_step for each in statuses]
    whole = [
        step for step, p in zip(steps, statuses, strict=True) if p.state_status == StateStatus()
    ]
    assert steps[leader] == max(whole or steps)
    assert leader in staying
    assert set(range(len(statuses))) - set(staying) <= leaving


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_the_leader_is_the_lowest_rank_with_most_steps(steps):
    statuses = [WorkerStatus(ReportedPosition(global_step=step)) for step in steps]
    assert newest_status(statuses) is statuses[steps.index(max(steps))]


# ---- waiting


def test_waits_double_by_default_and_end_at_a_minute():
    waits = [backoff_s(n, ElasticConfig()) for n in (*range(7), 10**6)]
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]


# ---- pauses

step_times = st.just(0.0) | st.floats(1e-5, 100.0)


@given(
    st.lists(st.tuples(st.integers(0, 1), step_times), min_size=1, max_size=8),
    st.integers(0, 10**6),
    st.floats(0.0, 2.0),
)
def test_a_pause_is_two_steps_and_the_notice_ahead_of_every_worker(workers, reached, lead_s):
    positions = [ReportedPosition(global_step=reached + more) for more, _ in workers]
    measured = [Measurements(step_s=step_s) for _, step_s in workers]
    pairs = list(zip(positions, measured, strict=True))
    step = choose_pause_step([WorkerStatus(at, measured=speed) for at, speed in pairs], lead_s)
    assert all(step >= at.global_step + 2 for at in positions)
    first, (step_s, *_) = max(pairs, key=lambda pair: pair[0].global_step)
    ahead = step - 2 - first.global_step
    # and no later than necessary
    if step_s:
        rounding = 1e-9 * (1.0 + step_s)
        assert (ahead - 1) * step_s - rounding <= lead_s
        assert lead_s <= ahead * step_s + rounding
    else:
        assert ahead == 0
