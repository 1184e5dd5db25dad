"""Whose the files under way are, and which of them nobody will finish."""

import os
import time

import psutil

from raysgd.checkpoint import leftovers
from raysgd.checkpoint.leftovers import is_leftover, temporary_name
from tests.unit.checkpoint.processes import in_child

DAY_S = 86400


def name_of_dead_process(tmp_path):
    in_child(lambda: (tmp_path / "name").write_text(temporary_name()))
    return (tmp_path / "name").read_text()


def test_names_differ():
    assert temporary_name() != temporary_name()


def test_a_file_of_a_living_process_is_not_left_over():
    now = time.time()
    assert not is_leftover(temporary_name(), now, now)
    assert not is_leftover(temporary_name(), now, now + 10 * DAY_S)
    assert not is_leftover(temporary_name(), None, now)


def test_a_file_of_a_dead_process_is_left_over(tmp_path):
    now = time.time()
    for modified in (now, None):
        assert is_leftover(name_of_dead_process(tmp_path), modified, now)


def test_a_file_that_is_older_than_the_process_with_its_number_is_left_over():
    started = psutil.Process(os.getpid()).create_time()
    assert is_leftover(temporary_name(), started - 60, started)
    assert not is_leftover(temporary_name(), started - 5, started)  # clocks differ by so much


def test_a_file_of_another_machine_is_left_over_after_a_day(tmp_path, monkeypatch):
    name, now = name_of_dead_process(tmp_path), time.time()
    monkeypatch.setattr(leftovers, "_machine", lambda: "0123456789ab")
    assert not is_leftover(name, now - DAY_S + 60, now)
    assert is_leftover(name, now - DAY_S - 60, now)
    assert not is_leftover(name, None, now)


def test_a_name_of_an_older_library_is_left_over_after_a_day():
    now = time.time()
    assert not is_leftover(".saving-k3jd81_x", now, now)
    assert is_leftover(".saving-k3jd81_x", now - 2 * DAY_S, now)


def test_no_other_file_is_left_over():
    for name in ("latest", "state.pt", "saving-1", ".savin"):
        assert not is_leftover(name, 0.0, time.time())


def test_numbers_that_no_process_can_have_are_dead():
    name = temporary_name().split("-")
    name[2] = "9" * 30
    assert is_leftover("-".join(name), time.time(), time.time())


def test_a_process_that_may_not_be_looked_at_counts_as_alive(monkeypatch):
    def deny(pid):
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "Process", deny)
    assert not is_leftover(temporary_name(), 0.0, time.time())
