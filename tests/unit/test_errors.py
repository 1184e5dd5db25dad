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


def test_insufficient_resources_keep_what_was_known_then():
    available = {"CPU": 1.0}
    error = errors.InsufficientResourcesError("full", {"CPU": 2}, {"CPU": 4}, available)
    assert isinstance(error, TimeoutError)
    assert str(error) == "full"
    available["CPU"] = 9.0
    assert error.available == {"CPU": 1.0}
