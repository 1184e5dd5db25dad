"""Arrays and items, shared out over workers sample by sample."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

tf = pytest.importorskip("tensorflow")

from raysgd.tf.loading import ArraySource  # noqa: E402


def source(arrays, **arguments):
    """The only worker's, in the order of the arrays, unless the arguments say otherwise."""
    given = {"training": True, "world_size": 1, "rank": 0, "batch_size": 2, "shuffle": False}
    return ArraySource(arrays, **{**given, "seed": 5, **arguments})


def drawn(source, epoch=0, offset=0, num_steps=None):
    return [batch.numpy().tolist() for batch in source.batches(epoch, offset, num_steps)]


@given(st.integers(1, 4), st.integers(1, 40), st.integers(1, 9), st.booleans())
def test_arrays_are_shared_out_sample_by_sample(workers, samples, size, training):
    arrays = (np.arange(samples), {"twice": 2 * np.arange(samples)})
    rows = [
        batch
        for rank in range(workers)
        for batch in ArraySource(
            arrays,
            training=training,
            world_size=workers,
            rank=rank,
            batch_size=size,
            shuffle=True,
            seed=5,
        ).batches(1, 0)
    ]
    everything = [x for batch in rows for x in batch[0].numpy().tolist()]
    assert all((batch[1]["twice"].numpy() == 2 * batch[0].numpy()).all() for batch in rows)
    assert set(everything) == set(range(samples))
    assert training or len(everything) == samples


def test_arrays_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match=r"must have the same length, but have \[3, 4\]"):
        source((np.ones(3), {"x": np.ones(4)}))


@given(st.integers(1, 20), st.integers(1, 5), st.integers(0, 3), st.data())
def test_an_epoch_goes_on_after_any_step_in_its_order(samples, size, epoch, data):
    def shuffled():
        return source(np.arange(samples), batch_size=size, shuffle=True)

    whole = drawn(shuffled(), epoch)
    assert sorted(x for batch in whole for x in batch) == list(range(samples))
    steps = data.draw(st.integers(0, len(whole)))
    again = shuffled()
    offset = again.offset_after(0, steps)
    assert again.steps_left(offset) == len(whole) - steps
    assert drawn(again, epoch, 0, steps) + drawn(again, epoch, offset) == whole


def test_each_epoch_and_each_seed_has_an_order_of_its_own():
    shuffled = source(np.arange(40), shuffle=True)
    first, second = drawn(shuffled, 0), drawn(shuffled, 1)
    shuffled.reseed(6)
    assert len({str(order) for order in (first, second, drawn(shuffled, 0))}) == 3
    kept = source(np.arange(40), shuffle=True, training=False)
    assert drawn(kept, 3) == [[n, n + 1] for n in range(0, 40, 2)], "validation is not shuffled"


def test_a_worker_s_share_follows_the_number_of_workers():
    for follows, sizes in ((True, [4, 4]), (False, [2, 2, 2, 2])):
        resized = source(np.arange(16), batch_size=2, follows_share=follows)
        assert len(resized) == 8
        resized.reshard(2, 1, batch_share=4)
        assert list(map(len, drawn(resized))) == sizes
        assert f"batch size {sizes[0]} on each of 2 workers" in resized.describe()


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


@pytest.mark.parametrize("arrays", [np.float32(3), (np.ones((4, 2)), np.array(1))])
def test_an_array_without_samples_is_refused(arrays):
    with pytest.raises(ValueError, match=r"no dimension\. Register arrays"):
        source(arrays)
