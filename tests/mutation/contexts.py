"""A plugin of pytest: coverage records which test executes each line."""

import coverage


def pytest_runtest_protocol(item):
    coverage.Coverage.current().switch_context(item.nodeid)
