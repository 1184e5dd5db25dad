"""Processes that a worker has forked, those of a DataLoader for example, end with it.

They inherit its connections. While one of them has these open, nobody can tell that the worker was
killed: neither Ray nor its peers. A DataLoader's processes look for their parent every 5 s only, so
that all other workers would stand still for so long.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from functools import cache, partial

__all__ = ["end_forks_with_this_process"]


@cache  # once a process is enough, and it cannot be taken back
def end_forks_with_this_process() -> None:
    """Let every process that is forked from this one end within milliseconds of its death.

    Processes that run another program (``subprocess``) are not concerned, since that closes what
    they inherited. Where the system cannot tell of a death (that takes Linux 5.3) nothing changes.
    """
    if not hasattr(os, "pidfd_open"):
        return
    try:
        # opened here, as no child might find this process by its number (another PID namespace)
        death = os.pidfd_open(os.getpid())
    except OSError:
        return
    os.register_at_fork(after_in_child=partial(_end_with, death))


def _end_with(death: int) -> None:
    thread = threading.Thread(target=_await, args=(death,), name="raysgd-parent", daemon=True)
    # what the child blocks it has blocked for all of its threads, but for this one if it could
    held = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _await(death: int) -> None:
    poll = select.poll()
    poll.register(death, select.POLLIN)
    ((_, events),) = poll.poll()
    if events & select.POLLIN:  # otherwise somebody has closed it, as daemons close all they have
        os._exit(1)
