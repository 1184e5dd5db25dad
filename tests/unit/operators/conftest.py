"""Settings of the tests of ready-made operators."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread: with several, such small models are slower, most of all on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
