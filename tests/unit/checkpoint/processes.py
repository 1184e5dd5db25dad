"""Children of this process: what a test does in one leaves the test's own process as it was."""

import os
import sys
import traceback
import warnings


def fork(function):
    """Run a function in a child of this process; returns the child's number."""
    with warnings.catch_warnings():
        # newer Pythons warn where there are threads, such as fsspec's; none of them is needed
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        function()
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(code)  # without what the test's process does at its end


def in_child(function):
    """Run a function in a child and wait for it; fails if it fails there."""
    _, status = os.waitpid(fork(function), 0)
    assert status == 0
