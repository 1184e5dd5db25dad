"""Every sample goes to the same worker, at the same step, as it has since this was written down."""

import pytest

from tests.blackbox.golden.cases import FAMILIES, kept


@pytest.mark.parametrize("family", FAMILIES)
def test_orders_are_those_that_were_written_down(family):
    if family == "keras":
        pytest.importorskip("tensorflow")
    golden = kept(family)
    changed = [name for name, read in FAMILIES[family]() if read() != golden.pop(name)]
    assert changed == []
    assert not golden, "orders that nobody reads any more"
