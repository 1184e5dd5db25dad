"""Names of Ray Train 1.13."""

import pytest

from raysgd import train
from raysgd.train.torch import TorchAccelerator
from tests.unit.train.conftest import run

__all__ = ["run"]


def test_the_accelerator_has_the_functions_of_the_module(run):
    run()
    accelerator = TorchAccelerator(amp=True)
    with pytest.raises(RuntimeError, match="has to be called once"):
        train.torch.accelerate()
    assert accelerator.get_device() == train.torch.get_device()
