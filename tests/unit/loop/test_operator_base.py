"""Operators as they are made, and mistakes in their classes that are found then."""

import pytest

from raysgd import TrainingOperator
from raysgd.loop.operator_base import warn_of_misspelling
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


def test_a_misspelled_method_causes_a_warning(caplog):
    class Typos(TrainingOperator):
        def setup(self, config):
            pass

        def train_bach(self, batch, batch_info):
            pass

        def valdate_batch(self, batch, batch_info):
            pass

        def helper(self):
            pass

        def _train_batch(self):
            pass

    warn_of_misspelling(Typos, TrainingOperator)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "Typos.train_bach" in said[0]
    assert "Did you mean train_batch?" in said[0]
    assert "Did you mean validate_batch?" in said[1]


def test_ready_made_operators_cause_no_warning(caplog):
    from raysgd import operators

    for name in operators.__all__:
        found = getattr(operators, name)
        if isinstance(found, type) and issubclass(found, TrainingOperator):
            warn_of_misspelling(found, TrainingOperator)
    assert not caplog.records
