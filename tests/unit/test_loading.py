"""The garbage collector rests while a worker's process loads libraries, and lets them be."""

import gc

import pytest

from raysgd.loading import loading


@pytest.fixture(autouse=True)
def _as_before():
    was_enabled = gc.isenabled()
    yield
    gc.unfreeze()
    gc.enable() if was_enabled else gc.disable()


def test_it_rests_meanwhile_and_passes_by_what_was_loaded():
    assert gc.isenabled()
    with loading():
        assert not gc.isenabled()
        loaded = [{} for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= len(loaded)
    looked_through = {id(thing) for thing in gc.get_objects()}
    assert not looked_through & {id(thing) for thing in loaded}


def test_it_goes_on_where_loading_fails():
    with pytest.raises(ImportError), loading():
        raise ImportError
    assert gc.isenabled()


def test_it_stays_off_where_the_user_has_turned_it_off():
    gc.disable()
    with loading():
        pass
    assert not gc.isenabled()
