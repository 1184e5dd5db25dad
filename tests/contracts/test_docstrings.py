"""Examples in docstrings run."""

import doctest

import pytest

from tests.contracts.test_surface import MODULES

FINDER = doctest.DocTestFinder()
EXAMPLES = [test for module in MODULES for test in FINDER.find(module) if test.examples]
assert len(EXAMPLES) > 5


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda test: test.name)
def test_an_example_gives_what_it_says(example, capsys):
    runner = doctest.DocTestRunner()
    runner.run(example)
    assert runner.failures == 0, capsys.readouterr().out
