"""Data sets and arrays on several workers: no sample is lost or repeated, and order is kept."""

import functools
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

tf = pytest.importorskip("tensorflow")

from raysgd.tf.sources import ArraySource, DatasetSource, _Iteration  # noqa: E402
from raysgd.train.tensorflow import prepare_dataset_shard  # noqa: E402


def stream(num_samples, batch_size, shuffle=False):
    tf.random.set_seed(1)
    data = tf.data.Dataset.range(num_samples)
    if shuffle:
        data = data.shuffle(num_samples)
    return data.batch(batch_size)


def sources(num_workers, num_samples=40, batch_size=8, training=True, shuffle=False, splits=False):
    place = {"training": training, "world_size": num_workers, "divides_batches": splits}
    loaders = [stream(num_samples, batch_size, shuffle) for _ in range(num_workers)]
    return [DatasetSource(loader, rank=rank, **place) for rank, loader in enumerate(loaders)]


def drawn(source, epoch=0, offset=0, num_steps=None):
    return [batch.numpy().tolist() for batch in source.batches(epoch, offset, num_steps)]


@given(st.integers(1, 4), st.integers(1, 40), st.integers(1, 9), st.booleans())
def test_every_worker_trains_in_each_step_and_validates_its_own(workers, samples, size, splits):
    found = [drawn(s) for s in sources(workers, samples, size, splits=splits)]
    assert len({len(batches) for batches in found}) == 1
    assert len(found[0]) == sources(workers, samples, size, splits=splits)[0].steps_left(0)
    everything = [x for batches in found for batch in batches for x in batch]
    assert set(everything) == set(range(samples))
    # samples are repeated only in a step with fewer samples than workers
    assert len(everything) - samples < workers * (len(found[0]) if splits else 1)
    validating = sources(workers, samples, size, training=False, splits=splits)
    found = [drawn(source) for source in validating]
    assert len({source.steps_read for source in validating}) == 1  # also without a batch
    assert sorted(x for batches in found for batch in batches for x in batch) == [*range(samples)]


@pytest.mark.parametrize("splits", [False, True])
def test_parts_of_a_step_follow_the_shares(splits):
    pair = sources(2, splits=splits)
    for source in pair:
        source.change_partition(shares=(3.0, 1.0))
    size = 8 if splits else 16
    for left, right in zip(*map(drawn, pair), strict=True):
        total = len(left) + len(right)
        assert total in (size, 8)
        assert (len(left), len(right)) == (total * 3 // 4, total // 4)
    plans = [next(source.read(0, 0)).plan for source in pair]
    assert [plan.num_samples / plan.total_samples for plan in plans] == [0.75, 0.25]
    assert sorted(x for source in pair for batch in drawn(source) for x in batch) == list(range(40))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["sparse", "ragged"])
@pytest.mark.parametrize("splits", [True, False])
def test_steps_of_uneven_sparse_batches_are_divided(training, kind, splits):
    dense = np.arange(1, 40, dtype="float32").reshape(13, 3) * [[1, 0, 1]]
    rows = tf.sparse.from_dense(dense) if kind == "sparse" else tf.RaggedTensor.from_tensor(dense)
    data = tf.data.Dataset.from_tensor_slices((rows, dense)).batch(4)
    found = []
    for rank in range(2):
        place = {"training": training, "world_size": 2, "rank": rank, "divides_batches": splits}
        for features, target in DatasetSource(data, **place).batches(0, 0):
            own = tf.sparse.to_dense(features) if kind == "sparse" else features.to_tensor()
            np.testing.assert_array_equal(own, target)
            found += target.numpy().tolist()
    assert {tuple(row) for row in found} == set(map(tuple, dense.tolist()))


def test_each_part_of_a_step_has_labeled_and_unlabeled_samples():
    data = tf.data.Dataset.zip(
        tf.data.Dataset.range(24).batch(8), tf.data.Dataset.range(6).batch(2)
    )
    for rank in range(2):
        source = DatasetSource(data, rank=rank, world_size=2, training=True)
        sizes = [len(part) for batch in source.batches(0, 0) for part in batch]
        assert sizes == [8, 2, 4, 1]


def test_results_for_parts_of_uneven_batches_keep_their_order():
    rows = tf.RaggedTensor.from_row_lengths(range(9), [1, 4, 4])
    found = []
    for rank in range(2):
        place = {"training": False, "world_size": 2, "rank": rank, "divides_batches": True}
        source = DatasetSource(tf.data.Dataset.from_tensor_slices(rows), **place)
        found += [(r.group_step, rank, x) for r in source.read(0, 0) for x in r.content.numpy()]
    assert [x for _, _, x in sorted(found)] == [*range(9)]


@pytest.mark.parametrize("second", [range(10), range(9, -1, -1)])
def test_other_samples_after_a_reading_error_are_refused(second):
    orders = iter([range(10), second])

    def generate():
        order = next(orders)
        for x in order:
            if x == 6 and order is not second:
                raise OSError("unreadable")
            yield x

    data = tf.data.Dataset.from_generator(generate, output_signature=tf.TensorSpec((), tf.int64))
    source = DatasetSource(data.batch(1), rank=0, world_size=1, training=True)
    seen = []
    with pytest.raises(tf.errors.OpError, match="unreadable"):
        seen.extend(int(each.content[0]) for each in source.read(0, 0))
    rest = source.read(0, len(seen))
    if second[0]:
        with pytest.raises(RuntimeError, match="now gives other samples"):
            list(rest)
    else:
        assert seen + [int(each.content[0]) for each in rest] == [*range(10)]


def begun(group, epoch, offset):
    """Return the batches of each rank from `offset`, after all ranks have agreed on an order."""
    sent, met = [], threading.Barrier(len(group), timeout=30)

    def all_reduce_min(value):
        sent.append(value)
        met.wait()
        return [min(sent)]

    def begin(source):
        source.agree_on_order(epoch, offset, SimpleNamespace(all_reduce_min=all_reduce_min))
        return source.batches(epoch, offset)

    with ThreadPoolExecutor(len(group)) as threads:
        return list(threads.map(begin, group))


def trained(events, num_epochs=3):
    """Return the samples of each epoch as trained. `events` disturb some of the attempts."""
    group, epoch, offset, attempt = sources(2, 24, 3, shuffle=True), 0, 0, itertools.count()
    seen = [[] for _ in range(num_epochs)]

    def commit(batches):
        nonlocal epoch, offset
        seen[epoch] += [x for batch in batches for x in batch.numpy().tolist()]
        offset = group[0].offset_after(offset, 1)
        if not group[0].steps_left(offset):
            epoch, offset = epoch + 1, 0

    while epoch < num_epochs:
        under_way = epoch
        for batches in zip(*begun(group, epoch, offset), strict=True):
            event = events.get(next(attempt))
            if event is None or event == "ahead":
                commit(batches)
            if event == "ahead" and epoch < num_epochs:
                next(group[0].batches(epoch, offset))  # before the others have finished the step
            if event in ("replaced", "smaller", "larger"):
                del group[1:]
                size = {"replaced": 2, "smaller": 1, "larger": 3}[event]
                group[0].repartition(size, 0, None)
                group += sources(size, 24, 3, shuffle=True)[1:]
                for each in group[1:]:
                    each.load_resume_info(group[0].resume_info(epoch, offset))
            if event is not None or epoch != under_way:
                break
    return seen


undisturbed = functools.cache(lambda: trained({}))
EVENTS = ["raised", "ahead", "replaced", "smaller", "larger"]


@given(st.dictionaries(st.integers(0, 15), st.sampled_from(EVENTS)))
def test_a_shuffled_epoch_keeps_its_order_after_losses_and_joins(events):
    expected = undisturbed()
    assert [sorted(samples) for samples in expected] == [list(range(24))] * 3
    assert expected[0] != expected[1]
    assert trained(events) == expected


def test_an_epoch_continues_with_the_same_samples_only():
    saved, larger, shuffled = (sources(1, 24, *each)[0] for each in ((3,), (6,), (3, True, True)))
    drawn(saved, num_steps=2)
    for other in (larger, shuffled):
        other.load_resume_info(saved.resume_info(0, 2))
        with pytest.raises(RuntimeError, match="epoch 0 after 2 batches"):
            drawn(other, offset=2)


@pytest.mark.parametrize("training", [True, False])
def test_workers_share_one_order_despite_additional_iterations(training):
    group = sources(2, shuffle=True, training=training)
    for _ in range(3):
        next(iter(group[0]))
    parts = [x for batches in begun(group, 0, 0) for batch in batches for x in batch.numpy()]
    assert sorted(parts) == list(range(40))


@pytest.mark.parametrize(("width", "is_placeholder"), [(1, True), (9, False)])
def test_features_are_compared_if_targets_are_placeholders(width, is_placeholder):
    digests = set()
    for features in (np.arange(160), np.arange(160)[::-1]):
        targets = np.outer(np.arange(160), np.ones(width)) > 99 + 100 * is_placeholder
        iteration = _Iteration(tf.data.Dataset.from_tensor_slices((features, targets)).batch(8), 0)
        iteration.read(0, 20)
        digests.add(iteration.digest)
    assert len(digests) == 1 + is_placeholder


# ---- arrays


def source(arrays, **arguments):
    """Return a source for one worker that does not shuffle, unless the arguments differ."""
    given = {"training": True, "world_size": 1, "rank": 0, "batch_size": 2, "shuffle": False}
    return ArraySource(arrays, **{**given, "seed": 5, **arguments})


def test_a_worker_s_share_follows_the_number_of_workers():
    for share, sizes in ((2, [4, 4]), (None, [2, 2, 2, 2])):
        resized = source(np.arange(16), batch_size=2, worker_batch_size=share)
        assert len(resized) == 8
        resized.repartition(2, 1, worker_batch_size=4)
        assert list(map(len, drawn(resized))) == sizes
        assert f"batch size {sizes[0]} on each of 2 workers" in resized.describe()


def test_each_epoch_and_each_seed_has_an_order_of_its_own():
    shuffled = source(np.arange(40), shuffle=True)
    first, second = drawn(shuffled, 0), drawn(shuffled, 1)
    shuffled.reseed(6)
    assert len({str(order) for order in (first, second, drawn(shuffled, 0))}) == 3
    kept = source(np.arange(40), shuffle=True, training=False)
    assert drawn(kept, 3) == [[n, n + 1] for n in range(0, 40, 2)], "validation is not shuffled"
    column = source(pytest.importorskip("pandas").Series(range(4)))
    assert drawn(column) == [[[0], [1]], [[2], [3]]], "as in fit()"


def test_different_data_have_different_fingerprints():
    mine = source((np.arange(8.0), np.arange(8)))
    assert mine.fingerprint() == source((np.arange(8.0), np.arange(8)), rank=0).fingerprint()
    others = [
        source((np.arange(8.0), np.array([1, *range(1, 8)]))),
        source((np.arange(8.0), np.array([*range(7), 9]))),
        source((np.arange(9.0), np.arange(9))),
        source(np.arange(0)),
    ]
    assert len({each.fingerprint() for each in (mine, *others)}) == 5
    words = [source(np.array([str(n) for n in range(100, 104)], object)) for _ in range(2)]
    assert words[0].fingerprint() == words[1].fingerprint()


@pytest.mark.parametrize("arrays", [np.float32(3), (np.ones((4, 2)), np.array(1))])
def test_arrays_without_samples_or_of_other_lengths_are_refused(arrays):
    with pytest.raises(ValueError, match=r"no dimension\. Register arrays"):
        source(arrays)
    with pytest.raises(ValueError, match=r"must have the same length, but they have \[3, 4\]"):
        source((np.ones(3), {"x": np.ones(4)}))
    features = tf.data.Dataset.from_tensors(tf.ones([2, 1]))
    with pytest.raises(ValueError, match=r"must have batches.*Register dataset\.batch"):
        DatasetSource(features.map(lambda x: (x, 1)), training=True, world_size=1, rank=0)
    wide = features.concatenate(tf.data.Dataset.from_tensors(tf.ones([1, 2]))).filter(tf.is_tensor)
    unequal = DatasetSource(wide.map(lambda x: ((x, 1),)), training=True, world_size=2, rank=0)
    assert unequal.steps_left(0) is None
    with pytest.raises(ValueError, match=r"shapes differ: .*\[2, 1\].*\[1, 2\]"):
        list(unequal.batches(0, 0))


def test_tensorflow_does_not_shard_the_data_of_a_function_again():
    options = prepare_dataset_shard(tf.data.Dataset.range(2)).options()
    assert options.experimental_distribute.auto_shard_policy.name == "OFF"
