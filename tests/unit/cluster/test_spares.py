"""Processes that wait to take the place of a lost one."""

from concurrent.futures import Future

import pytest

from raysgd.cluster.spares import Spares


class FakeMember:
    def __init__(self, node_id):
        self.node_id = node_id
        self.ready = Future()
        self.imported = None
        self.killed = False
        self.alive = Future()
        self.alive.set_result(None)

    def control(self, method):
        return self.alive

    def work(self, method, modules):
        assert method == "import_ahead"
        self.imported = modules
        return self.ready

    def kill(self):
        self.killed = True


@pytest.fixture
def started():
    return []


@pytest.fixture
def spares(started):
    def start(node_id):
        started.append(FakeMember(node_id))
        return started[-1]

    return Spares(start, ["torch"])


def test_there_is_one_a_node_however_often_it_is_asked_for(spares, started):
    for _ in range(3):
        spares.keep_on(["a", "b"])
    assert [member.node_id for member in started] == ["a", "b"]
    assert [member.imported for member in started] == [["torch"]] * 2
    assert len(spares) == 2


@pytest.mark.parametrize("is_ready", [True, False])
def test_it_is_taken_only_once_also_while_it_still_comes_up(spares, started, is_ready):
    spares.keep_on(["a"])
    if is_ready:
        started[0].ready.set_result(None)
    else:
        started[0].alive = Future()  # it answers nothing yet
    assert spares.take("b") is None
    assert spares.take(None) is None
    assert spares.take("a") is started[0]
    assert spares.take("a") is None
    spares.keep_on(["a"])
    assert len(started) == 2
    assert not started[0].killed


def test_one_that_failed_is_replaced_and_never_taken(spares, started):
    spares.keep_on(["a"])
    started[0].ready.set_exception(RuntimeError("the node is gone"))
    assert spares.take("a") is None
    spares.keep_on(["a"])
    assert started[0].killed
    assert len(started) == 2


@pytest.mark.parametrize("death", ["noticed", "silent"])
def test_one_that_died_after_it_was_ready_is_not_taken(spares, started, death, monkeypatch):
    monkeypatch.setattr("raysgd.cluster.spares._ANSWER_S", 0.01)
    spares.keep_on(["a"])
    started[0].ready.set_result(None)
    started[0].alive = Future()
    if death == "noticed":
        started[0].alive.set_exception(RuntimeError("the process is gone"))
    assert spares.take("a") is None
    assert started[0].killed
    spares.keep_on(["a"])
    assert len(started) == 2


def test_a_node_without_workers_keeps_none(spares, started):
    spares.keep_on(["a", "b"])
    spares.keep_on(["b"])
    assert [member.killed for member in started] == [True, False]


def test_all_end_together(spares, started):
    spares.keep_on(["a", "b"])
    spares.stop()
    assert all(member.killed for member in started)
    assert len(spares) == 0


def test_without_anything_to_import_there_are_none(started):
    Spares(lambda node_id: started.append(node_id), []).keep_on(["a"])
    assert not started
