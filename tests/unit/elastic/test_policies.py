"""How many workers start, who is who, whose state counts, and how long to wait."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd._internal.context import Progress
from raysgd.cluster.group_sizes import start_sizes, workers_that_fit
from raysgd.cluster.worker_info import WorkerInfo
from raysgd.elastic.config import ElasticConfig
from raysgd.elastic.events import Event
from raysgd.elastic.policies import (
    assign_contexts,
    backoff_s,
    choose_leader,
    furthest,
    may_resize,
    pause_step,
)

counts = st.integers(0, 12)


@given(st.integers(1, 12), st.data(), counts, counts)
def test_sizes_to_try_fit_and_end_with_the_fewest(num_workers, data, capacity, free):
    min_workers = data.draw(st.integers(1, num_workers))
    *larger, fewest = sizes = start_sizes(num_workers, min_workers, capacity, free)
    assert fewest == min_workers
    assert all(min_workers < size <= min(num_workers, capacity) for size in larger)
    assert sizes == sorted(set(sizes), reverse=True)
    assert (num_workers in sizes) == (capacity >= num_workers or num_workers == min_workers)
    if min_workers <= (fitting := min(num_workers, capacity, free)):
        assert fitting in sizes


def test_what_is_missing_in_one_resource_limits_all():
    assert workers_that_fit({"CPU": 8, "GPU": 1}, {"CPU": 1, "GPU": 1}) == 1
    assert workers_that_fit({"CPU": 8}, {"CPU": 1, "GPU": 1}) == 0
    assert workers_that_fit({"CPU": 1}, {"CPU": 0.5}) == 2
    assert workers_that_fit({"CPU": 1}, {}) == 0


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=8))
def test_ranks_are_dense_and_local_ranks_count_each_node_from_zero(nodes):
    infos = [WorkerInfo(node_id=node, node_ip=f"ip-{node}") for node in nodes]
    contexts = assign_contexts(infos, generation=3, distributed=True, num_cpus=2)
    assert [c.world_rank for c in contexts] == list(range(len(nodes)))
    for node in set(nodes):
        mine = [c for c, n in zip(contexts, nodes, strict=True) if n == node]
        assert [c.local_rank for c in mine] == list(range(len(mine)))
        assert len({c.node_rank for c in mine}) == 1
    assert {c.node_rank for c in contexts} == set(range(len(set(nodes))))
    for context, node in zip(contexts, nodes, strict=True):
        assert context.node_ip == f"ip-{node}"
        assert (context.world_size, context.generation) == (len(nodes), 3)
        assert context.distributed
        assert context.num_cpus == 2


def test_each_worker_sees_all_gpus_of_its_node_and_knows_its_own():
    infos = [
        WorkerInfo(node_id="a", node_ip="1", gpu_ids=("10",)),
        WorkerInfo(node_id="a", node_ip="1", gpu_ids=("9",)),
        WorkerInfo(node_id="b", node_ip="2", gpu_ids=("0",)),
    ]
    contexts = assign_contexts(infos, generation=1, distributed=True, num_cpus=1)
    # as numbers: as text "10" would come before "9"
    assert [c.visible_gpus for c in contexts] == [("9", "10"), ("9", "10"), ("0",)]
    assert [c.gpu_index for c in contexts] == [1, 0, 0]


def test_gpus_with_names_instead_of_numbers_have_an_order_too():
    infos = [
        WorkerInfo(node_id="a", node_ip="1", gpu_ids=(gpu,))
        for gpu in ("MIG-b", "3", "MIG-a", "20")
    ]
    contexts = assign_contexts(infos, generation=1, distributed=True, num_cpus=1)
    assert contexts[0].visible_gpus == ("3", "20", "MIG-a", "MIG-b")
    assert [c.visible_gpus[c.gpu_index] for c in contexts] == ["MIG-b", "3", "MIG-a", "20"]


def test_without_gpus_there_is_no_index():
    (context,) = assign_contexts(
        [WorkerInfo(node_id="a", node_ip="1", in_driver=True)],
        generation=1,
        distributed=False,
        num_cpus=1,
    )
    assert context.visible_gpus == ()
    assert context.gpu_index is None
    assert context.in_driver


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_the_leader_is_the_lowest_rank_with_most_steps(steps):
    leader = choose_leader([Progress(global_step=step) for step in steps])
    assert leader == steps.index(max(steps))


def test_a_partial_state_leads_only_if_all_are_partial():
    partial, behind = Progress(global_step=5, partial=True), Progress(global_step=4)
    assert choose_leader([partial, behind]) == 1
    assert choose_leader([partial, partial]) == 0


def test_an_event_knows_when_it_happened():
    first = Event(kind="started", generation=1, ranks=(0,))
    second = Event(kind="lost", generation=1, ranks=(0,))
    assert 0 < first.time <= second.time


# ---- whose state counts


@given(st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(0, 99)), min_size=1))
def test_the_group_is_as_far_as_its_leader_with_the_samples_that_most_know_of(workers):
    progress = [
        Progress(global_step=step, num_covered=covered, latest={"loss": float(rank)})
        for rank, (step, covered) in enumerate(workers)
    ]
    group = furthest(progress)
    leader = choose_leader(progress)
    assert (group.global_step, group.latest["loss"]) == (max(s for s, _ in workers), float(leader))
    known = [covered for _, covered in workers if covered is not None]
    assert group.num_covered == (max(known) if known else None)


def test_a_replacement_that_leads_does_not_hide_what_the_others_trained_on():
    replacement, old = (
        Progress(global_step=9, num_covered=8),
        Progress(global_step=8, num_covered=64),
    )
    assert furthest([replacement, old]).num_covered == 64
    assert furthest([replacement, old]).global_step == 9


# ---- waiting

attempts = st.integers(0, 10**6)
draws = st.floats(0.0, 1.0)
configs = st.builds(
    ElasticConfig,
    initial_s=st.floats(0.0, 100.0),
    factor=st.floats(1.0, 10.0),
    max_s=st.floats(0.0, 1000.0),
    jitter=st.floats(0.0, 1.0),
)


def without_jitter(attempt, config):
    return backoff_s(attempt, config, draw=0.5)


@given(attempts, configs, draws)
def test_a_wait_is_never_negative_and_never_beyond_its_cap_but_for_the_jitter(n, config, draw):
    wait = backoff_s(n, config, draw)
    assert 0.0 <= wait <= config.max_s * (1.0 + config.jitter) + 1e-9


@given(attempts, configs, draws)
def test_the_jitter_varies_a_wait_by_its_share(n, config, draw):
    middle, wait = without_jitter(n, config), backoff_s(n, config, draw)
    assert wait == pytest.approx(middle * (1 + config.jitter * (2 * draw - 1)), abs=1e-9)
    assert backoff_s(n, config, 0.0) == pytest.approx(middle * (1 - config.jitter), abs=1e-9)
    assert backoff_s(n, config, 1.0) == pytest.approx(middle * (1 + config.jitter), abs=1e-9)


@given(st.integers(0, 20), configs)
def test_each_wait_is_the_factor_longer_up_to_the_cap(n, config):
    expected = min(config.max_s, config.initial_s * config.factor**n)
    assert without_jitter(n, config) == pytest.approx(expected)


@given(attempts, attempts, configs)
def test_waits_do_not_become_shorter(one, other, config):
    first, second = sorted((one, other))
    assert without_jitter(first, config) <= without_jitter(second, config)


def test_waits_double_by_default_and_end_at_a_minute():
    config = ElasticConfig(jitter=0.0)
    waits = [backoff_s(n, config, 0.9) for n in range(9)]
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


@pytest.mark.parametrize("factor", [1.1, 4.0, 1e10, 1e200])
def test_waits_end_at_the_cap_whatever_the_factor(factor):
    config = ElasticConfig(factor=factor, jitter=0.0)
    assert [backoff_s(n, config, 0.5) for n in (50, 10**6)] == [60.0] * 2


# ---- changes of size

times = st.floats(0.0, 1e6)


@given(times, times, st.floats(0.0, 100.0))
def test_a_successor_joins_at_once_and_others_after_the_cooldown(last, since, cooldown):
    config = ElasticConfig(resize_cooldown_s=cooldown)
    now = last + since
    assert may_resize(now, last, True, config)
    assert may_resize(now, last, False, config) == (now - last >= cooldown)


# ---- pauses

step_times = st.just(0.0) | st.floats(1e-5, 100.0)


@given(
    st.lists(st.tuples(st.integers(0, 1), step_times), min_size=1, max_size=8),
    st.integers(0, 10**6),
    st.floats(0.0, 2.0),
)
def test_a_pause_is_ahead_of_every_worker_by_two_steps_and_the_time_to_hear_of_it(
    workers, reached, notice_s
):
    progress = [Progress(global_step=reached + more, step_s=step_s) for more, step_s in workers]
    first = max(progress, key=lambda p: p.global_step)
    step = pause_step(progress, notice_s)
    assert all(step >= p.global_step + 2 for p in progress)
    ahead = step - 2 - first.global_step
    # not much farther than that: training stands still later, not sooner
    if first.step_s:
        rounding = 1e-9 * (1.0 + first.step_s)
        assert (ahead - 1) * first.step_s - rounding <= notice_s
        assert notice_s <= ahead * first.step_s + rounding
    else:
        assert ahead == 0


def test_a_pause_gives_a_tenth_of_a_second_to_hear_of_it():
    assert pause_step([Progress(global_step=10, step_s=0.01)]) == 22
    assert pause_step([Progress(global_step=10, step_s=0.02), Progress(global_step=9)]) == 17
    assert pause_step([Progress(global_step=10, step_s=5.0)]) == 13
