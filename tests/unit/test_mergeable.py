"""Metrics that are no means, over batches, segments and workers."""

import math
import pickle

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raysgd.metrics import (
    AverageMeterCollection,
    Computed,
    MergeableMetric,
    Sums,
    merge_segments,
    merge_workers,
)
from tests.unit.test_metrics import close, cut


def perplexity(total, weight):
    return math.exp(total / weight)


def perplexity_of(batch):
    nats, tokens = batch
    return Sums(perplexity, total=nats * tokens, weight=tokens)


def summary_of_perplexities(batches):
    meters = AverageMeterCollection()
    for batch in batches:
        meters.update({"perplexity": perplexity_of(batch)}, n=1)  # one sample, of many tokens
    return meters.summary()


token_batches = st.lists(st.tuples(st.floats(0, 10), st.integers(1, 64)), min_size=1, max_size=30)


@given(
    token_batches,
    st.lists(st.integers(0, 30), max_size=3),
    st.lists(st.integers(0, 30), max_size=3),
    st.booleans(),
)
def test_mergeable_metrics_equal_one_pass(batches, workers, segments, copied):
    """Also where user code copies a result into another dict."""
    parts = [
        merge_segments([summary_of_perplexities(part) for part in cut(share, segments)])
        for share in cut(batches, workers)
    ]
    merged = merge_workers([{**part} for part in parts] if copied else parts)
    tokens = sum(n for _, n in batches)
    expected = math.exp(math.fsum(v * n for v, n in batches) / tokens)
    assert merged["perplexity"] == pytest.approx(expected, rel=1e-9)
    assert type(merged["perplexity"]) is float


def test_a_merged_value_is_a_number_to_everyone_who_asks():
    value = summary_of_perplexities([(0.0, 1)])["perplexity"]
    assert isinstance(value, float)
    assert isinstance(value, Computed)
    assert (value, f"{value:.2f}", value + 1) == (1.0, "1.00", 2.0)
    assert type(value + 1) is float


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
def test_a_merged_value_can_be_merged_after_pickling(pickler):
    parts = [summary_of_perplexities([batch]) for batch in ((0.0, 1), (2.0, 3))]
    twins = [pickler.loads(pickler.dumps(part)) for part in parts]
    assert merge_workers(twins)["perplexity"] == close(math.exp(1.5))


def test_sums_may_be_tensors_and_arrays_and_are_float64():
    sums = Sums(total_of, a=torch.full((2,), 0.1), b=np.float32(0.1), c=torch.tensor(1))
    for _ in range(999):
        sums = sums.merge(
            Sums(total_of, a=torch.full((2,), 0.1), b=np.float32(0.1), c=torch.tensor(1))
        )
    assert sums.sums["a"].dtype == torch.float64
    assert sums.sums["a"].tolist() == pytest.approx([1000 * float(np.float32(0.1))] * 2, rel=1e-12)
    assert type(sums.sums["c"]) is float
    assert sums.compute() == pytest.approx(3000 * float(np.float32(0.1)) + 1000, rel=1e-12)


def total_of(a, b, c):
    return a.sum() + b + c


def test_last_of_a_mergeable_metric_is_the_value_of_the_newest_batch():
    meters = AverageMeterCollection()
    meters.update({"perplexity": perplexity_of((0.0, 1))})
    meters.update({"perplexity": perplexity_of((1.0, 1))})
    assert meters.last("perplexity") == meters.summary()["last_perplexity"] == close(math.e)


def test_a_plain_number_of_one_worker_makes_it_a_mean():
    parts = [summary_of_perplexities([(0.0, 1)]), {"num_samples": 1, "perplexity": 3.0}]
    assert merge_workers(parts)["perplexity"] == 2.0
    assert merge_segments(parts)["perplexity"] == 2.0


def test_a_custom_metric_is_merged_by_its_rule():
    class Largest(MergeableMetric):
        def __init__(self, value):
            self.value = value

        def merge(self, other):
            return Largest(max(self.value, other.value))

        def compute(self):
            return self.value

    meters = [AverageMeterCollection() for _ in range(2)]
    for index, value in enumerate([3, 9, 1, 4]):
        meters[index % 2].update({"largest": Largest(value)}, n=1)
    assert merge_workers([m.summary() for m in meters])["largest"] == 9.0


class Shares(MergeableMetric):
    """Several numbers, which a part of one sample is too little for."""

    def __init__(self, counts):
        self.counts = counts

    def merge(self, other):
        return Shares([a + b for a, b in zip(self.counts, other.counts, strict=True)])

    def compute(self):
        if sum(self.counts) < 2:
            raise ZeroDivisionError("too few")
        return {f"_{i}": count / sum(self.counts) for i, count in enumerate(self.counts)}


def shares_of(*batches):
    meters = AverageMeterCollection()
    for counts in batches:
        meters.update({"share": Shares(counts)}, n=1)
    return meters.summary()


def test_a_metric_may_compute_several_numbers():
    part = shares_of([1, 0], [1, 2])
    assert (part["share_0"], part["share_1"]) == (0.5, 0.5)
    assert (part["last_share_0"], part["last_share_1"]) == close((1 / 3, 2 / 3))
    merged = merge_workers([part, merge_segments([shares_of([0, 3]), shares_of([0, 1])])])
    assert (merged["share_0"], merged["share_1"]) == (0.25, 0.75)
    assert "share" not in merged


@pytest.mark.parametrize("merge", [merge_workers, merge_segments])
def test_a_part_too_small_for_any_value_counts_in_the_merged_one(merge):
    small = shares_of([1, 0])
    assert math.isnan(small["share"])
    for parts in ([small, shares_of([0, 3])], [shares_of([0, 3]), small]):
        merged = merge(parts)
        assert merged["share_0"] == 0.25
        assert "share" not in merged


def counted(counts):
    return counts


@given(st.lists(st.integers(0, 5), min_size=2, max_size=12), st.integers(1, 11), st.booleans())
def test_a_metric_may_compute_an_array_of_any_shape(classes, point, copied):
    """Such as a confusion matrix, the same over batches, segments and workers as in one pass."""

    def summary(part):
        meters = AverageMeterCollection()
        for index in part:
            matrix = torch.zeros(2, 3)
            matrix.view(-1)[index] = 1
            meters.update({"matrix": Sums(counted, counts=matrix)}, n=1)
        return pickle.loads(pickle.dumps(meters.summary()))

    parts = [summary(part) for part in cut(classes, [point])]
    merged = merge_workers([{**part} for part in parts] if copied else parts)
    expected = np.bincount(classes, minlength=6).reshape(2, 3)
    assert np.asarray(merged["matrix"]).tolist() == expected.tolist()
    assert np.asarray(merge_segments(parts)["matrix"]).tolist() == expected.tolist()
