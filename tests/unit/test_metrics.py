"""Means and other metrics over batches, segments, and workers."""

import itertools
import math
import pickle
from decimal import Decimal

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raysgd.metrics import (
    AverageMeter,
    AverageMeterCollection,
    MergeableMetric,
    Sums,
    merge_segment_metrics,
    merge_worker_metrics,
)

values = st.floats(-1e6, 1e6)
batches = st.lists(st.tuples(values, st.integers(1, 64)), min_size=1, max_size=30)


def summary_of(batches, name="loss"):
    meters = AverageMeterCollection()
    for value, n in batches:
        meters.update({name: value, "last_one": value}, n=n)
    return meters.summary()


def cut(items, points):
    """Cut a list at the given points; no piece is empty."""
    edges = sorted({0, len(items), *(point % len(items) for point in points)})
    return [items[a:b] for a, b in itertools.pairwise(edges)]


def close(value):
    return pytest.approx(value, rel=1e-9, abs=1e-9)


@given(batches)
def test_mean_is_weighted_by_samples(batches):
    total = sum(n for _, n in batches)
    result = summary_of(batches)
    assert result["loss"] == close(math.fsum(v * n for v, n in batches) / total)
    assert result["last_loss"] == batches[-1][0]
    assert result["num_samples"] == total
    assert result["batch_count"] == len(batches)


@given(batches, st.lists(st.integers(0, 30), max_size=5))
def test_merged_segments_equal_one_pass(batches, points):
    whole = summary_of(batches)
    merged = merge_segment_metrics([summary_of(part) for part in cut(batches, points)])
    assert merged.keys() == whole.keys()
    for key, value in whole.items():
        assert merged[key] == close(value)
    other = summary_of([(7.0, 5)])
    expected = merge_worker_metrics([{**whole}, other])["loss"]
    assert merge_worker_metrics([{**merged}, other])["loss"] == close(expected)


@given(batches, st.lists(st.integers(0, 30), max_size=5))
def test_merged_workers_equal_one_pass(batches, points):
    whole = summary_of(batches)
    parts = cut(batches, points)
    merged = merge_worker_metrics([summary_of(part) for part in parts])
    assert merged["loss"] == merged["last_one"] == close(whole["loss"])
    assert merged["num_samples"] == whole["num_samples"]
    assert merged["last_loss"] == close(sum(part[-1][0] for part in parts) / len(parts))
    assert merged["batch_count"] == close(sum(map(len, parts)) / len(parts))


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=20), st.integers(1, 4))
def test_a_key_that_only_some_batches_have_is_weighted_by_those(keys, num_workers):
    """Each batch has one key: a mean must not be diluted by batches that lack it."""
    meters = [AverageMeterCollection() for _ in range(num_workers)]
    single = AverageMeterCollection()
    for index, key in enumerate(keys):
        meters[index % num_workers].update({key: float(index)}, n=index + 1)
        single.update({key: float(index)}, n=index + 1)
    merged = merge_worker_metrics([m.summary() for m in meters])
    expected = single.summary()
    assert merged.keys() == expected.keys()
    for key in set(keys):
        assert merged[key] == close(expected[key])


@given(batches, st.integers(0, 29))
def test_nan_in_one_batch_makes_the_mean_nan(batches, index):
    index %= len(batches)
    batches[index] = (float("nan"), batches[index][1])
    result = summary_of(batches)
    assert math.isnan(result["loss"])
    assert math.isnan(result["last_loss"]) == (index == len(batches) - 1)
    assert result["num_samples"] == sum(n for _, n in batches)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([], {}),
        ([{"x": 1.0}, {"x": None, "note": "a"}, {"note": "b"}], {"x": 1.0, "note": "a"}),
        (
            [{"num_samples": 1.5, "loss": 1.0}, {"num_samples": 0.5, "loss": 5.0}],
            {"num_samples": 2.0, "loss": 2.0},
        ),
        (
            [{"num_samples": n, "batch_count": n, "last_k": n} for n in (1, 3)],
            {"num_samples": 4, "batch_count": 2, "last_k": 2},
        ),
    ],
)
def test_workers_are_merged_by_the_kind_of_value(parts, expected):
    assert merge_worker_metrics(parts) == expected


@pytest.mark.parametrize("value", ["b", np.str_("cat"), 1j, torch.tensor(1j), Decimal(1)])
def test_the_newest_value_of_a_worker_without_a_mean_counts(value):
    found = summary_of([("first", 1), (value, 1)], "note")
    assert found["note"] == found["last_note"] == value
    assert merge_segment_metrics([{"note": "a"}, {"note": value}])["note"] == value
    assert summary_of([(None, 1), (2.0, 1), (None, 1), (4.0, 1)], "note")["note"] == 3.0


@pytest.mark.parametrize("value", [0.1, float("nan")])
def test_a_batch_without_samples_counts_for_nothing(value):
    """The mean of an empty batch is NaN in PyTorch. It has no weight in any merge."""
    parts = [(value, 0), (1.0, 2)]
    assert summary_of(parts)["loss"] == 1.0
    results = [summary_of([part]) for part in parts]
    assert merge_segment_metrics(results)["loss"] == merge_worker_metrics(results)["loss"] == 1.0
    empty = {"num_samples": 0, "loss": value}
    assert merge_worker_metrics([empty, {"num_samples": 4, "loss": 2.0}])["loss"] == 2.0
    assert math.isnan(merge_worker_metrics([empty, empty])["loss"])
    assert math.isnan(AverageMeter().avg)


@pytest.mark.parametrize(
    "number",
    [
        1,
        True,
        np.float32(1),
        np.int64(1),
        np.array(1.0),
        np.array([1]),
        torch.tensor(1),
        torch.tensor([1.0], requires_grad=True),
        torch.tensor(1.0, dtype=torch.bfloat16),
    ],
    ids=repr,
)
def test_every_kind_of_number_comes_out_as_a_python_number(number):
    result = merge_worker_metrics([summary_of([(number, 2)])])
    assert result["loss"] == result["last_loss"] == 1.0
    assert type(result["loss"]) is float


@pytest.mark.parametrize("kind", [torch.tensor, np.int64])
def test_num_samples_may_be_a_tensor(kind):
    meters = AverageMeterCollection()
    meters.update({"k": 1.0, "num_samples": kind(3)}, n=kind(3))
    meters.update({"k": 5.0, "num_samples": kind(1)}, n=kind(1))
    result = merge_worker_metrics([meters.summary()])
    assert (result["k"], result["num_samples"]) == (2.0, 4)
    assert torch.Tensor not in map(type, result.values())


def test_numbers_in_dicts_are_averaged_as_others_are():
    meters = AverageMeterCollection()
    meters.update({"f1": {"cat": 1.0, "dog": {"big": 2.0}}, "num_samples": 3}, n=3)
    meters.update({"f1": {"cat": 5.0, "dog": {"big": 6.0}}, "num_samples": 1}, n=1)
    merged = merge_worker_metrics([meters.summary(), meters.summary()])
    assert (merged["f1/cat"], merged["f1/dog/big"], merged["last_f1/cat"]) == (2.0, 3.0, 5.0)


@pytest.mark.parametrize("last", [(1.0, 3.0), ("a", "b")])
@pytest.mark.parametrize("names", [("last_lr", "lr"), ("lr", "last_lr")])
def test_an_own_metric_replaces_the_last_value_of_another(names, last):
    meters = AverageMeterCollection()
    for batch in ({"last_lr": last[0], "lr": 5.0}, {"last_lr": last[1], "lr": 7.0}):
        meters.update({name: batch[name] for name in names})
    result = merge_worker_metrics([meters.summary()])
    assert result["lr"] == 6.0
    assert result["last_lr"] == (2.0 if last == (1.0, 3.0) else "b")


def test_batches_do_not_change_the_number_of_batches():
    meters = AverageMeterCollection()
    meters.update({"batch_count": 9, "loss": 1.0})
    meters.update({"batch_count": 7, "loss": 1.0, "sizes": {"batch_count": 3}})
    result = meters.summary()
    assert (result["batch_count"], result["sizes/batch_count"]) == (2, 3.0)
    assert "last_batch_count" not in result


def test_each_element_of_a_tensor_has_its_own_mean():
    parts = [(torch.tensor([1, 2]), 1), (torch.tensor([5, 2]), 3)]
    merged = merge_worker_metrics([summary_of(parts, "k")])
    assert [merged[key] for key in ("k_0", "k_1", "last_k_0")] == [4.0, 2.0, 5.0]
    with pytest.raises(ValueError, match=r"'k' has 1 elements, but had 2 in .* the mean, or"):
        summary_of([*parts, (torch.tensor([3.0]), 1)], "k")  # would count for each element


def test_a_metric_does_not_keep_the_graph_alive():
    meters = AverageMeterCollection()
    meters.update({"loss": torch.ones(1, requires_grad=True) * 2})
    assert not isinstance(meters.latest()["loss"], torch.Tensor)


def test_a_meter_says_value_sum_count_and_mean():
    meter = AverageMeter()
    meter.update(1.0, n=3)
    meter.update(5.0)
    assert (meter.val, meter.sum, meter.count, meter.avg) == (5.0, 8.0, 4, 2.0)
    meter.reset()
    assert (meter.val, meter.sum, meter.count) == (0.0, 0.0, 0)


# ---- metrics that are not means


def perplexity(total, weight):
    return math.exp(total / weight)


def perplexity_of(batch):
    nats, tokens = batch
    return Sums(perplexity, total=nats * tokens, weight=tokens)


def summary_of_perplexities(batches):
    # one sample, of many tokens
    return summary_of([(perplexity_of(batch), 1) for batch in batches], "perplexity")


token_batches = st.lists(st.tuples(st.floats(0, 10), st.integers(1, 64)), min_size=1, max_size=30)


@given(
    token_batches,
    st.lists(st.integers(0, 30), max_size=3),
    st.lists(st.integers(0, 30), max_size=3),
    st.booleans(),
)
def test_mergeable_metrics_equal_one_pass(batches, workers, segments, copied):
    """This holds even if user code copies a result into another dict."""
    parts = [
        merge_segment_metrics([summary_of_perplexities(part) for part in cut(share, segments)])
        for share in cut(batches, workers)
    ]
    merged = merge_worker_metrics([{**part} for part in parts] if copied else parts)
    tokens = sum(n for _, n in batches)
    expected = math.exp(math.fsum(v * n for v, n in batches) / tokens)
    assert merged["perplexity"] == pytest.approx(expected, rel=1e-9)
    assert type(merged["perplexity"]) is float


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
def test_a_merged_value_can_be_merged_after_pickling(pickler):
    parts = [summary_of_perplexities([batch]) for batch in ((0.0, 1), (2.0, 3))]
    twins = [pickler.loads(pickler.dumps(part)) for part in parts]
    assert merge_worker_metrics(twins)["perplexity"] == close(math.exp(1.5))


def test_sums_may_be_tensors_and_arrays_and_are_float64():
    a = torch.full((2,), 0.1).double()
    sums = one = Sums(total_of, a=a, b=np.float32(0.1), c=torch.tensor(1))
    a.zero_()  # as if the next batch uses this buffer
    for _ in range(999):
        sums = sums.merge(one)
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
    assert meters.summary()["last_perplexity"] == close(math.e)
    assert meters.latest() == {"perplexity": close(math.e)}


def test_a_mergeable_metric_and_a_plain_number_merge_as_a_mean():
    parts = [summary_of_perplexities([(0.0, 1)]), {"num_samples": 1, "perplexity": 3.0}]
    assert merge_worker_metrics(parts)["perplexity"] == 2.0
    assert merge_segment_metrics(parts)["perplexity"] == 2.0


class Shares(MergeableMetric):
    """A metric of several numbers that needs at least two samples."""

    def __init__(self, counts):
        self.counts = counts

    def merge(self, other):
        return Shares([a + b for a, b in zip(self.counts, other.counts, strict=True)])

    def compute(self):
        if sum(self.counts) < 2:
            raise ZeroDivisionError("too few")
        return {f"_{i}": count / sum(self.counts) for i, count in enumerate(self.counts)}


def rmse(squares, count):
    return math.sqrt(squares / count)


def merged_of(batches, name):
    return merge_worker_metrics([summary_of([batch], name) for batch in batches])


ERRORS = Sums(rmse, squares=8.0, count=2)


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (3.0, "Sums(total, weight)"),
        (Sums(total_of, squares=1.0, count=2, more=3), "Sums(count, more, squares)"),
        (Shares([1, 2]), "Shares()"),
    ],
)
def test_different_kinds_of_a_metric_are_an_error_that_names_them(other, kind):
    kinds = {kind, "Sums(count, squares)"}
    for values in ([ERRORS, other], [other, ERRORS]):
        for merge in (summary_of, merged_of):
            with pytest.raises(TypeError, match="'val_rmse' is") as caught:
                merge([(value, 1) for value in values], "val_rmse")
            assert all(each in str(caught.value) for each in kinds)


def shares_of(*batches):
    return summary_of([(Shares(counts), 1) for counts in batches], "share")


def test_a_metric_may_compute_several_numbers():
    part = shares_of([1, 0], [1, 2])
    assert (part["share_0"], part["share_1"]) == (0.5, 0.5)
    assert (part["last_share_0"], part["last_share_1"]) == close((1 / 3, 2 / 3))
    merged = merge_worker_metrics(
        [part, merge_segment_metrics([shares_of([0, 3]), shares_of([0, 1])])]
    )
    assert (merged["share_0"], merged["share_1"]) == (0.25, 0.75)
    assert "share" not in merged


@pytest.mark.parametrize("merge", [merge_worker_metrics, merge_segment_metrics])
def test_a_part_too_small_for_any_value_counts_in_the_merged_one(merge):
    small = shares_of([1, 0])
    assert math.isnan(small["share"])
    assert math.isnan(merge_worker_metrics([small], raises=False)["share"])
    for parts in ([small, shares_of([0, 3])], [shares_of([0, 3]), small]):
        merged = merge(parts)
        assert merged["share_0"] == 0.25
        assert "share" not in merged


def counted(counts):
    return counts


@given(st.lists(st.integers(0, 5), min_size=2, max_size=12), st.integers(1, 11))
def test_a_metric_may_compute_an_array(classes, point):
    """The merged array, such as a confusion matrix, equals that of one pass."""

    def summary(part):
        matrices = torch.eye(6)[part].reshape(-1, 2, 3)
        batches = [(Sums(counted, counts=matrix), 1) for matrix in matrices]
        return pickle.loads(pickle.dumps(summary_of(batches, "matrix")))

    parts = [summary(part) for part in cut(classes, [point])]
    counts = np.bincount(classes, minlength=6).reshape(2, 3)
    expected = {f"matrix_{row}_{column}": n for (row, column), n in np.ndenumerate(counts)}
    for merge in (merge_worker_metrics, merge_segment_metrics):
        assert expected.items() <= merge(parts).items()


def test_a_mean_does_not_depend_on_the_order_of_the_batches_and_workers():
    losses = [(-1.0) ** i * 0.1 * 10.0 ** (i * 7 % 31 - 15) for i in range(64)]
    batches = [(loss, 3) for loss in losses]
    parts = [summary_of(batches[::-1][rank::3]) for rank in range(3)]
    sent = [pickle.loads(pickle.dumps(part)) for part in parts]
    assert merge_worker_metrics(sent)["loss"] == summary_of(batches)["loss"]


@pytest.mark.parametrize(
    ("values", "mean"),
    [([1e308, 1e308, -1e308], 1e308 / 3), ([math.inf, 1.0], math.inf), ([1.7e308] * 2, math.inf)],
)
def test_a_mean_of_values_near_the_limit(values, mean):
    meter = AverageMeter()
    for value in values:
        meter.update(value)
    assert meter.avg == mean
