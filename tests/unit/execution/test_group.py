"""Waiting for workers, and what each of them reserves."""

from concurrent.futures import Future

import pytest

from raysgd.errors import WorkerTimeoutError
from raysgd.execution.group import GroupOptions, WorkerGroup, gather


def done(value):
    future = Future()
    future.set_result(value)
    return future


def test_results_come_in_the_order_of_the_ranks():
    assert gather([done(1), done(2)], 5, "them") == [1, 2]
    assert gather([], 5, "nothing") == []


def test_who_did_not_answer_is_named():
    with pytest.raises(WorkerTimeoutError, match=r"Waited 0.01 s for answers.*workers 1, 2") as e:
        gather([done(1), Future(), Future()], 0.01, "answers")
    assert (e.value.ranks, e.value.waited_s) == ((1, 2), 0.01)


def test_an_error_of_a_worker_is_raised():
    future = Future()
    future.set_exception(KeyError("x"))
    with pytest.raises(KeyError):
        gather([future], 5, "them")


def test_a_bundle_names_only_what_is_needed():
    options = GroupOptions(num_workers=2, num_cpus=2, resources={"special": 0.5})
    assert options.bundle == {"CPU": 2, "special": 0.5}
    assert GroupOptions(num_workers=2, num_gpus=1).bundle == {"CPU": 1, "GPU": 1}


@pytest.mark.parametrize(
    ("num_workers", "use_local", "inline"), [(1, True, True), (1, False, False), (2, True, False)]
)
def test_only_a_local_worker_that_is_alone_is_inline(num_workers, use_local, inline):
    assert GroupOptions(num_workers=num_workers, use_local=use_local).inline == inline


def test_an_inline_group_starts_and_ends_without_anything():
    group = WorkerGroup(GroupOptions(num_workers=1, use_local=True))
    group.start()
    assert len(group.members) == 1
    large = bytes(2**21)
    assert group.shared(large) is large
    group.shutdown()
    assert group.members == []
