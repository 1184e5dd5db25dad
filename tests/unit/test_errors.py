"""The errors and their fields. That they pickle is a contract, see tests/contracts."""

import pytest

from raysgd import errors


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("WorkerLostError", RuntimeError),
        ("WorkerTimeoutError", TimeoutError),
        ("CollectiveError", RuntimeError),
        ("InsufficientResourcesError", RuntimeError),
        ("CheckpointError", RuntimeError),
        ("RemoteError", RuntimeError),
    ],
)
def test_an_error_is_caught_as_ours_and_as_the_builtin_that_users_know(name, builtin):
    kind = getattr(errors, name)
    assert issubclass(kind, errors.RaySGDError)
    assert issubclass(kind, builtin)
    assert name in errors.__doc__


def test_fields_say_who_was_lost():
    error = errors.WorkerLostError("gone", rank=3, node_id="abc", cause="killed")
    assert (str(error), error.rank, error.node_id, error.cause) == ("gone", 3, "abc", "killed")


def test_a_timeout_says_who_did_not_answer():
    error = errors.WorkerTimeoutError("late", ranks=[1, 2], waited_s=5.0)
    assert (error.ranks, error.waited_s) == ((1, 2), 5.0)


def test_insufficient_resources_keep_what_was_known_then():
    available = {"CPU": 1.0}
    error = errors.InsufficientResourcesError("full", {"CPU": 2}, {"CPU": 4}, available)
    assert isinstance(error, TimeoutError)
    assert str(error) == "full"
    available["CPU"] = 9.0
    assert error.available == {"CPU": 1.0}
