"""The samples of each worker: properties for any size, share, and interruption."""

import itertools
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from raysgd.data.partition import EpochPartition, StepLayout, part_bounds

totals = st.integers(0, 120)
batch_sizes = st.integers(1, 12)
world_sizes = st.integers(1, 6)
# segments of an epoch: the number of workers, and for how many steps
courses = st.lists(st.tuples(world_sizes, st.integers(1, 4)), max_size=6)


def group(total, batch_size, world_size, **arguments):
    return [
        EpochPartition(
            epoch_size=total, batch_size=batch_size, world_size=world_size, rank=rank, **arguments
        )
        for rank in range(world_size)
    ]


def run(course, last_world_size, total, batch_size, **arguments):
    """Run an epoch, and return the spans of each step by rank, and the end offset.

    The number of workers changes after each segment. The last segment completes the epoch.
    """
    offset, steps = 0, []
    for world_size, num_steps in [*course, (last_world_size, None)]:
        shards = group(total, batch_size, world_size, **arguments)
        made = [list(shard.spans(offset, num_steps)) for shard in shards]
        left = shards[0].num_steps(offset)
        taken = left if num_steps is None else min(num_steps, left)
        for step in range(taken):
            steps.append([spans[step] if step < len(spans) else None for spans in made])
        assert max(map(len, made)) == taken
        offset = shards[0].offset_after(offset, taken)
    return steps, offset


def samples(steps):
    return Counter(
        sample for step in steps for span in step if span is not None for sample in range(*span)
    )


@given(courses, world_sizes, totals, batch_sizes)
def test_training_sees_every_sample_and_repeats_only_in_the_last_step(
    course, last_world_size, total, batch_size
):
    """Each step is a collective: a worker without a batch would block the others."""
    steps, end = run(course, last_world_size, total, batch_size)
    assert set(samples(steps)) == set(range(total))
    assert samples(steps[:-1]).total() == len(samples(steps[:-1]))
    if steps:
        repeats = samples(steps).total() - total
        assert 0 <= repeats <= len(steps[-1]) - 1
    assert end in (0, total)
    for step in steps:
        sizes = [stop - start for start, stop in step]
        assert all(1 <= size <= batch_size for size in sizes)
        assert max(sizes) - min(sizes) <= 1


@given(world_sizes, totals, batch_sizes, st.booleans())
def test_validation_batches_are_those_of_one_process_dealt_out_in_turn(
    world_size, total, batch_size, drop_last
):
    shards = group(total, batch_size, world_size, training=False, drop_last=drop_last)
    single = list(
        EpochPartition(total, batch_size, 1, 0, training=False, drop_last=drop_last).spans()
    )
    for rank, shard in enumerate(shards):
        assert list(shard.spans()) == single[rank::world_size]


@given(courses, world_sizes, totals, batch_sizes, st.booleans())
def test_drop_last_gives_full_batches_also_after_a_resize(
    course, last_world_size, total, batch_size, training
):
    """BatchNorm fails with one sample, and compiled models need a fixed shape."""
    steps, _ = run(course, last_world_size, total, batch_size, training=training, drop_last=True)
    sizes = {stop - start for step in steps for start, stop in filter(None, step)}
    assert sizes <= {batch_size}


@given(world_sizes, totals, batch_sizes, st.integers(0, 10), st.booleans(), st.booleans())
def test_counts_of_steps_agree_with_the_batches(
    world_size, total, batch_size, num_steps, training, drop_last
):
    shards = group(total, batch_size, world_size, training=training, drop_last=drop_last)
    offset = shards[0].offset_after(0, num_steps)
    assert shards[0].offset_after(0, 0) == 0
    left = shards[0].num_steps(offset)
    assert left == max(len(list(shard.spans(offset))) for shard in shards)
    assert left == max(0, shards[0].num_steps() - num_steps)
    if training:
        assert {len(list(shard.spans(offset))) for shard in shards} == {left}
    assert all(shard.offset_after(offset, left) in (offset, total) for shard in shards)


# ---- steps with a fixed size


full_sizes = st.integers(1, 6)
shares = st.lists(st.floats(0.1, 10), min_size=1, max_size=5).map(tuple)


def shared_group(workers, full_size, *arguments, **others):
    """Return the partitions of workers, given their number or their relative shares."""
    layout = StepLayout(full_size)
    if isinstance(workers, int):
        return group(*arguments, min(workers, full_size), layout=layout, **others)
    workers = workers[:full_size]
    return group(*arguments, len(workers), layout=layout, shares=workers, **others)


@given(
    full_sizes,
    st.lists(st.tuples(world_sizes | shares, st.integers(1, 4)), max_size=6),
    totals,
    batch_sizes,
    st.integers(0, 5),
    st.booleans(),
)
def test_steps_are_the_same_samples_with_any_workers(
    full_size, course, total, batch_size, more, drop_last
):
    """With `more`, the global batch cannot be divided evenly."""
    kept = {"drop_last": drop_last}
    if more:
        kept["requested_global_batch_size"] = batch_size * full_size + min(more, full_size - 1)
    offset, steps = 0, []
    for workers, num_steps in [*course, (1, None)]:
        shards = shared_group(workers, full_size, total, batch_size, **kept)
        made = [list(shard.spans(offset, num_steps)) for shard in shards]
        assert len(set(map(len, made))) == 1, "every worker has a batch in each step"
        for step in zip(*made, strict=True):
            steps.append(set(samples([step])))
            sizes = [stop - start for start, stop in step]
            assert not isinstance(workers, int) or max(sizes) - min(sizes) <= 1
        offset = shards[0].offset_after(offset, len(made[0]))
    (whole,) = shared_group(1, full_size, total, batch_size, **kept)
    assert steps == [set(range(*span)) for span in whole.spans()]


@given(
    full_sizes,
    world_sizes | shares,
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.booleans(),
)
@example(full_size=5, workers=4, sizes=[15], may_split=True)  # a worker has fewer samples
@example(full_size=3, workers=3, sizes=[5, 2], may_split=False)  # a sample of two workers
@example(full_size=4, workers=3, sizes=[4, 1], may_split=True)
def test_means_over_batches_and_parts_add_up_to_the_mean_over_all_samples(
    full_size, workers, sizes, may_split
):
    """Each sample has the same weight, even if two workers have it."""
    max_rows = -(-max(sizes) // full_size)
    options = {"requested_global_batch_size": max(sizes), "may_split": may_split}
    shards = {size: shared_group(workers, full_size, size, max_rows, **options) for size in sizes}
    world_size, weighted = shards[sizes[0]][0].world_size, shards[sizes[0]][0].shares
    plans = [
        EpochPartition(0, max_rows, world_size, rank, shares=weighted, may_split=may_split).plan(
            tuple(sizes)
        )
        for rank in range(world_size)
    ]
    weights = Counter()
    for rank, plan in enumerate(plans):
        start, planned = 0, iter(plan.micro_batches)
        for size in sizes:
            for low, high in shards[size][rank].spans():
                micro_batch = next(planned)
                if weighted is None:
                    first, stop = part_bounds(size, world_size, rank)
                    assert not may_split or high - low <= (4 if max_rows in (2, 3) else max_rows)
                    assert high - low > 1 or max_rows == 1 or stop - first == 1
                for sample in range(start + low, start + high):
                    # the loss is a mean over the batch
                    weights[sample] += micro_batch.num_samples / plan.total_samples / (high - low)
            start += size
        assert next(planned, None) is None
    expected = dict.fromkeys(range(sum(sizes)), 1 / sum(sizes))
    assert weights == pytest.approx(expected, rel=1e-12)
    assert sum(plan.num_samples for plan in plans) == sum(sizes) == plans[0].total_samples
    # forward passes can contain collectives, so all workers run the same number
    assert len({tuple(each.step_index for each in plan.micro_batches) for plan in plans}) == 1
    for plan in plans:
        is_end = [each.ends_step for each in plan.micro_batches]
        steps = [each.step_index for each in plan.micro_batches]
        assert is_end == [now != later for now, later in itertools.pairwise([*steps, None])]
        weights_of_steps = Counter()
        for each in plan.micro_batches:
            assert bool(each.weight) == bool(each.num_samples)  # metrics ignore repeated samples
            weights_of_steps[each.step_index] += each.weight
        assert {round(weight, 9) for weight in weights_of_steps.values()} <= {0, 1}


@given(full_sizes, world_sizes, totals, batch_sizes, st.integers(1, 9))
def test_validation_steps_are_the_same_samples_with_any_workers(
    full_size, world_size, total, batch_size, num_steps
):
    shards = shared_group(world_size, full_size, total, batch_size, training=False)
    spans = [span for shard in shards for span in shard.spans(0, num_steps)]
    end = min(total, num_steps * batch_size * full_size)
    assert sorted(i for span in spans for i in range(*span)) == list(range(end))
    assert {shard.offset_after(0, num_steps) for shard in shards} == {end}


@given(shares, st.integers(1, 100))
def test_parts_follow_the_shares(shares, total):
    spans = [part_bounds(total, len(shares), rank, shares) for rank in range(len(shares))]
    sizes = [stop - first for first, stop in spans]
    assert min(sizes) >= 1
    if total >= len(shares):
        assert [first for first, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
        assert spans[-1][1] == total
    if min(shares) / sum(shares) * total >= 2:
        assert sizes == pytest.approx([total * w / sum(shares) for w in shares], abs=1)
