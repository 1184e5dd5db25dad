"""How many workers start, who is who, and whose state counts."""

from hypothesis import given
from hypothesis import strategies as st

from raysgd.context import Progress
from raysgd.elastic.events import Event
from raysgd.elastic.policies import (
    Place,
    assign_contexts,
    choose_leader,
    start_sizes,
    workers_that_fit,
)

counts = st.integers(0, 12)


@given(st.integers(1, 12), st.data(), counts, counts)
def test_sizes_to_try_lie_between_min_and_num_workers_and_fit(num_workers, data, capacity, free):
    min_workers = data.draw(st.integers(1, num_workers))
    sizes = start_sizes(num_workers, min_workers, capacity, free)
    assert all(min_workers <= size <= min(num_workers, capacity) for size in sizes)
    assert sizes == sorted(set(sizes), reverse=True)
    assert (num_workers in sizes) == (capacity >= num_workers)
    if min_workers <= min(capacity, free):
        assert sizes


def test_what_is_missing_in_one_resource_limits_all():
    assert workers_that_fit({"CPU": 8, "GPU": 1}, {"CPU": 1, "GPU": 1}) == 1
    assert workers_that_fit({"CPU": 8}, {"CPU": 1, "GPU": 1}) == 0
    assert workers_that_fit({"CPU": 1}, {"CPU": 0.5}) == 2
    assert workers_that_fit({"CPU": 1}, {}) == 0


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=8))
def test_ranks_are_dense_and_local_ranks_count_each_node_from_zero(nodes):
    places = [Place(node_id=node, node_ip=f"ip-{node}") for node in nodes]
    contexts = assign_contexts(places, generation=3, distributed=True, num_cpus=2)
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
    places = [
        Place(node_id="a", node_ip="1", gpu_ids=("10",)),
        Place(node_id="a", node_ip="1", gpu_ids=("9",)),
        Place(node_id="b", node_ip="2", gpu_ids=("0",)),
    ]
    contexts = assign_contexts(places, generation=1, distributed=True, num_cpus=1)
    # as numbers: as text "10" would come before "9"
    assert [c.visible_gpus for c in contexts] == [("9", "10"), ("9", "10"), ("0",)]
    assert [c.gpu_index for c in contexts] == [1, 0, 0]


def test_gpus_with_names_instead_of_numbers_have_an_order_too():
    places = [
        Place(node_id="a", node_ip="1", gpu_ids=(gpu,)) for gpu in ("MIG-b", "3", "MIG-a", "20")
    ]
    contexts = assign_contexts(places, generation=1, distributed=True, num_cpus=1)
    assert contexts[0].visible_gpus == ("3", "20", "MIG-a", "MIG-b")
    assert [c.visible_gpus[c.gpu_index] for c in contexts] == ["MIG-b", "3", "MIG-a", "20"]


def test_without_gpus_there_is_no_index():
    (context,) = assign_contexts(
        [Place(node_id="a", node_ip="1", in_driver=True)],
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


def test_an_event_knows_when_it_happened():
    first = Event(kind="started", generation=1, ranks=(0,))
    second = Event(kind="lost", generation=1, ranks=(0,))
    assert 0 < first.time <= second.time
