"""Operators as they are made, and mistakes in their classes that are found then."""

import pytest

from raysgd.testing import run_operator
from tests.unit.recorder import Recorder


class Forgetful(Recorder):
    def __init__(self, config, settings):
        pass


class Selfish(Recorder):
    def __init__(self, width):
        super().__init__({}, None)


class Careful(Recorder):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.mine = 1


@pytest.mark.parametrize("operator_cls", [Forgetful, Selfish])
def test_an_unsuitable_init_is_an_error(operator_cls):
    said = rf"{operator_cls.__name__}.__init__ must take \*args and call super"
    with pytest.raises(TypeError, match=said):
        run_operator(operator_cls, config={"num_samples": 8, "batch_size": 4})


def test_a_suitable_init_is_allowed():
    operator = run_operator(Careful, config={"num_samples": 8, "batch_size": 4})
    assert operator.mine == 1
