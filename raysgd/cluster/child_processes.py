"""Ends the forks of a worker, such as the processes of a DataLoader, when the worker ends.

Forks inherit the connections of the worker. While a fork lives, neither Ray nor other workers
detect that the worker was killed.
"""

from __future__ import annotations

import os
import select
import threading
from functools import cache, partial


@cache
def end_forks_with_this_process() -> None:
    """Make every fork of this process exit when this process ends, on Linux."""
    if hasattr(os, "pidfd_open"):
        death = os.pidfd_open(os.getpid())
        os.register_at_fork(after_in_child=partial(_end_with, death))


def _end_with(death: int) -> None:
    threading.Thread(target=_await, args=(death,), name="raysgd-parent", daemon=True).start()


def _await(death: int) -> None:
    poll = select.poll()
    poll.register(death, select.POLLIN)
    ((_, events),) = poll.poll()
    if events & select.POLLIN:  # otherwise the process has closed the descriptor
        os._exit(1)
