"""Numbered checkpoints: which stay, and what is found again."""

import os

from raysgd.checkpoint.numbered import NumberedCheckpoints


def filled(folder, *losses, **arguments):
    store = NumberedCheckpoints(folder, attribute="loss", order="min", **arguments)
    for number, loss in enumerate(losses, 1):
        store.save(
            number, b"blob %d." % number, {"loss": loss}, world_size=1, iteration=10 * number
        )
    return store


def test_all_stay_by_default(tmp_path):
    store = filled(tmp_path, 3.0, 1.0, 2.0)
    assert len(os.listdir(tmp_path)) == 3
    assert (store.best.number, store.newest.number) == (2, 3)
    assert [held.number for held in store.by_goodness()] == [2, 3, 1]


def test_what_an_earlier_process_left_is_found_again(tmp_path):
    filled(tmp_path, 3.0, 1.0, 2.0)
    store = NumberedCheckpoints(tmp_path, attribute="loss", order="min")
    newest, blob = store.restore()
    assert (newest.number, newest.iteration, blob) == (3, 30, b"blob 3.")
    assert store.best.number == 2


def test_a_damaged_one_is_passed_over(tmp_path, caplog):
    filled(tmp_path, 3.0, 1.0)
    content = (tmp_path / "checkpoint_000002").read_bytes()
    (tmp_path / "checkpoint_000002").write_bytes(b"x" + content[1:])
    newest, blob = NumberedCheckpoints(tmp_path).restore()
    assert (newest.number, blob) == (1, b"blob 1.")
    assert "checkpoint_000002" in caplog.text


def test_nothing_is_found_where_there_is_nothing(tmp_path):
    assert NumberedCheckpoints(tmp_path / "none").restore() is None


def test_of_equals_the_newer_stays(tmp_path):
    filled(tmp_path, 1.0, 1.0, 1.0, keep=2).finish()
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_000002", "checkpoint_000003"]


def test_a_number_that_comes_again_takes_the_place_of_the_first(tmp_path):
    store = filled(tmp_path, 1.0)
    store.save(1, b"again", {"loss": 2.0}, 1)
    assert [held.numbers for held in store.by_goodness()] == [{"loss": 2.0}]
