"""Run functions in forked processes, which cannot change the process of the test."""

import os
import sys
import traceback
import warnings


def fork(function):
    """Run a function in a forked child, and return the process id of the child."""
    with warnings.catch_warnings():
        # Python 3.12 warns if there are threads; the child needs none of them
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
    os._exit(code)  # skip the exit handlers of the test


def in_child(function):
    """Run a function in a forked child, wait for it, and fail if it fails."""
    _, status = os.waitpid(fork(function), 0)
    assert status == 0
