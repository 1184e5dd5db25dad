"""Weighted shares of the workers: properties over every size and every interruption."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.data.partition import EpochPartition, micro_batches_of, part_of

shares = st.lists(st.floats(0.1, 10), min_size=1, max_size=5).map(tuple)
courses = st.lists(st.tuples(shares, st.integers(1, 4)), min_size=1, max_size=4)
totals = st.integers(0, 120)
FULL_SIZE = 5


def group(weights, total, batch_size, **arguments):
    return [
        EpochPartition(
            total, batch_size, len(weights), rank, full_size=FULL_SIZE, shares=weights, **arguments
        )
        for rank in range(len(weights))
    ]


@given(shares, st.integers(1, 100))
def test_parts_follow_the_shares(weights, total):
    spans = [part_of(total, len(weights), rank, weights) for rank in range(len(weights))]
    sizes = [stop - first for first, stop in spans]
    assert min(sizes) >= 1
    if total >= len(weights):
        assert [first for first, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
        assert spans[-1][1] == total
    if min(weights) / sum(weights) * total >= 2:
        assert sizes == pytest.approx([total * w / sum(weights) for w in weights], abs=1)


@given(courses, totals, st.integers(1, 6))
def test_steps_have_the_same_samples_with_any_shares(course, total, batch_size):
    """The shares and the number of workers change at the steps of the course."""
    offset, steps = 0, []
    for weights, num_steps in [*course, ((1.0,), None)]:
        shards = group(weights, total, batch_size)
        made = [list(shard.batches(offset, num_steps)) for shard in shards]
        assert len(set(map(len, made))) == 1, "every worker has a batch in each step"
        for step in zip(*made, strict=True):
            steps.append({sample for span in step for sample in range(*span)})
        offset = shards[0].offset_after(offset, len(made[0]))
    whole = EpochPartition(total, batch_size, 1, 0, full_size=FULL_SIZE)
    assert steps == [set(range(*span)) for span in whole.batches()]


@given(shares, st.lists(st.integers(1, 40), min_size=1, max_size=3), st.booleans())
def test_means_are_over_all_samples_with_any_shares(weights, sizes, in_parts):
    at_once = -(-max(sizes) // FULL_SIZE)
    found, start_of = Counter(), [sum(sizes[:step]) for step in range(len(sizes))]
    for rank in range(len(weights)):
        own = micro_batches_of(tuple(sizes), len(weights), rank, at_once, in_parts, weights)
        spans = []
        for step, size in enumerate(sizes):
            (shard,) = group(weights, size, at_once, global_batch=max(sizes))[rank : rank + 1]
            spans += [
                (start_of[step] + a, start_of[step] + b) for a, b in shard.batches(0, 1, in_parts)
            ]
        for place, (low, high) in zip(own, spans, strict=True):
            for sample in range(low, high):
                mean = place.size / max(1, place.total) * place.share / len(weights)
                found[sample] += mean / (high - low)
    expected = dict.fromkeys(range(sum(sizes)), 1 / sum(sizes))
    assert found == pytest.approx(expected, rel=1e-12)


@given(shares, totals, st.integers(1, 6), st.integers(1, 9))
def test_validation_counts_each_sample_once_with_any_shares(weights, total, batch_size, num_steps):
    shards = group(weights, total, batch_size, even=False)
    spans = [span for shard in shards for span in shard.batches(0, num_steps)]
    end = min(total, num_steps * batch_size * FULL_SIZE)
    assert sorted(i for span in spans for i in range(*span)) == list(range(end))


def test_validation_batches_follow_the_shares():
    first, second = group((3.0, 1.0), total=80, batch_size=2, even=False)
    assert (len(list(first.batches())), len(list(second.batches()))) == (30, 10)
