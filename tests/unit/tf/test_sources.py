"""Data shared out over workers: nothing is lost or repeated, and two workers see what one does."""

import functools
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

tf = pytest.importorskip("tensorflow")

from raysgd.tf.loading import DatasetSource  # noqa: E402


def stream(num_samples, batch_size, shuffle=False):
    tf.random.set_seed(1)
    data = tf.data.Dataset.range(num_samples)
    if shuffle:
        data = data.shuffle(num_samples)
    return data.batch(batch_size)


def sources(num_workers, num_samples=40, batch_size=8, training=True, shuffle=False, splits=False):
    return [
        DatasetSource(
            stream(num_samples, batch_size, shuffle),
            training=training,
            world_size=num_workers,
            rank=rank,
            splits=splits,
        )
        for rank in range(num_workers)
    ]


def drawn(source, *where):
    return [batch.numpy().tolist() for batch in source.batches(*(where or (0, 0)))]


@given(st.integers(1, 4), st.integers(1, 40), st.integers(1, 9), st.booleans())
def test_training_gives_every_worker_a_batch_at_every_step(workers, samples, size, splits):
    found = [drawn(s) for s in sources(workers, samples, size, splits=splits)]
    assert len({len(batches) for batches in found}) == 1
    assert len(found[0]) == sources(workers, samples, size, splits=splits)[0].steps_left(0)
    everything = [x for batches in found for batch in batches for x in batch]
    assert set(everything) == set(range(samples))
    # only at an end with fewer samples than workers is one given twice
    assert len(everything) - samples < workers * (len(found[0]) if splits else 1)


@given(st.integers(1, 4), st.integers(1, 40), st.integers(1, 9), st.booleans())
def test_validation_counts_no_sample_twice(workers, samples, size, splits):
    found = [drawn(s) for s in sources(workers, samples, size, training=False, splits=splits)]
    everything = [x for batches in found for batch in batches for x in batch]
    assert sorted(everything) == list(range(samples))


def test_a_step_of_two_workers_is_two_steps_of_one():
    one, (left, right) = sources(1)[0], sources(2)
    alone = drawn(one)
    pairs = [a + b for a, b in zip(drawn(left), drawn(right), strict=True)]
    assert pairs[0] == alone[0] + alone[1]
    assert pairs[1] == alone[2] + alone[3]
    assert sorted(pairs[2]) == alone[4]  # the rest is shared out evenly


@pytest.mark.parametrize("splits", [False, True])
def test_parts_of_a_step_follow_the_shares(splits):
    pair = sources(2, splits=splits)
    for source in pair:
        assert source.weigh((3.0, 1.0))
    size = 8 if splits else 16
    for left, right in zip(*map(drawn, pair), strict=True):
        total = len(left) + len(right)
        assert total in (size, 8)
        assert (len(left), len(right)) == (total * 3 // 4, total // 4)
    places = [source.places(0, 1, False)[0] for source in pair]
    assert [place.share for place in places] == [1.5, 0.5]
    assert sorted(x for source in pair for batch in drawn(source) for x in batch) == list(range(40))


def test_an_epoch_goes_on_in_its_order_in_another_process():
    first, again = sources(2, shuffle=True)[0], sources(2, shuffle=True)[0]
    epochs = [drawn(first, epoch, 0) for epoch in range(3)]
    assert epochs[0] != epochs[1]
    assert drawn(again, 2, 2) == epochs[2][1:]


def test_steps_of_validation_go_on_where_the_last_ended():
    left, right = sources(2, training=False)
    assert [drawn(left, 0, 0, 2), drawn(right, 0, 0, 2)] == [drawn(left)[:2], drawn(right)[:2]]
    assert (len(drawn(left, 0, 4, 1)), len(drawn(right, 0, 4, 1))) == (1, 0)
    assert left.offset_after(4, 1) == 5


def begun(group, epoch, offset):
    """The batches of each rank from there on, after all have agreed on an order."""
    told, met = [], threading.Barrier(len(group), timeout=30)

    def minimum(value):
        told.append(value)
        met.wait()
        return min(told)

    def begin(source):
        source.agree_on_order(epoch, offset, SimpleNamespace(minimum=minimum))
        return source.batches(epoch, offset)

    with ThreadPoolExecutor(len(group)) as threads:
        return list(threads.map(begin, group))


def trained(events, num_epochs=3):
    """What a group trains on in each epoch, in order, where events end some of its steps."""
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
                next(group[0].batches(epoch, offset))  # before the others have done the step
            if event in ("replaced", "smaller", "larger"):
                del group[1:]
                size = {"replaced": 2, "smaller": 1, "larger": 3}[event]
                group[0].reshard(size, 0, None)
                group += sources(size, 24, 3, shuffle=True)[1:]
            if event is not None or epoch != under_way:
                break
    return seen


@functools.cache
def undisturbed():
    return trained({})


EVENTS = ["raised", "ahead", "replaced", "smaller", "larger"]


@given(st.dictionaries(st.integers(0, 15), st.sampled_from(EVENTS)))
def test_a_shuffled_epoch_keeps_its_order_after_losses_and_joins(events):
    expected = undisturbed()
    assert [sorted(samples) for samples in expected] == [list(range(24))] * 3
    assert expected[0] != expected[1]
    assert trained(events) == expected


@pytest.mark.parametrize("training", [True, False])
def test_workers_share_one_order_despite_additional_iterations(training):
    group = sources(2, shuffle=True, training=training)
    for _ in range(3):
        next(iter(group[0]))
    parts = [x for batches in begun(group, 0, 0) for batch in batches for x in batch.numpy()]
    assert sorted(parts) == list(range(40))
