"""Backends by name."""

import pytest

from raysgd import backends
from raysgd.backends import Backend, backend_names, create_backend, register_backend


class Silent(Backend):
    """A backend of a user."""

    def __init__(self, name, timeout_s):
        self.made_with = name, timeout_s

    def prepare(self, addresses):
        return list(addresses)

    def setup(self, context, rendezvous):
        pass

    def interrupt(self):
        pass

    def teardown(self):
        pass

    def is_communication_error(self, error):
        return False


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(backends, "_BACKENDS", dict(backends._BACKENDS))


def test_gloo_and_nccl_are_there():
    assert {"gloo", "nccl"} <= set(backend_names())
    assert backend_names() == sorted(backend_names())


def test_an_unknown_name_is_refused_with_the_list():
    with pytest.raises(ValueError, match=r"backend='mpi': must be one of .*gloo.*nccl"):
        create_backend("mpi", 1)


def test_a_backend_of_the_users_own_is_created_by_its_name(registry):
    register_backend("silent", f"{__name__}:Silent")
    assert "silent" in backend_names()
    assert create_backend("silent", 7.0).made_with == ("silent", 7.0)


def test_a_backend_is_imported_only_when_it_is_used(registry):
    register_backend("missing", "no_such_module:Backend")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        create_backend("missing", 1)
