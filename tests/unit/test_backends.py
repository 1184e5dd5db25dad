"""Backends by name."""

import pytest

from raysgd.backends import create_backend


def test_an_unknown_name_is_refused_with_the_list():
    with pytest.raises(ValueError, match=r"backend='mpi': must be one of .*gloo.*nccl"):
        create_backend("mpi", 1)
