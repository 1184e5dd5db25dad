"""Signals, forks, and the role of a worker's process."""

import contextlib
import functools
import os
import select
import signal
import sys
import threading
from collections.abc import Callable

is_worker = False
"""Whether this process belongs to a worker."""


def catch_sigterm(on_signal: Callable[[], None]) -> None:
    """Make SIGTERM call `on_signal` in a thread instead of ending the process, except in forks.

    Python handles signals in the main thread, but the main thread of an actor waits in C++ code of
    Ray.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def listen() -> None:
        while os.read(read_end, 1) != bytes([signal.SIGTERM]):
            pass
        on_signal()

    def restore() -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    os.register_at_fork(after_in_child=restore)
    threading.Thread(target=listen, name="raysgd-sigterm", daemon=True).start()


@functools.cache
def end_forks_with_this_process() -> None:
    """Make every fork of this process exit when this process ends, on Linux.

    Forks, such as the processes of a DataLoader, inherit the connections of the worker. While a
    fork lives, neither Ray nor other workers detect that the worker was killed.
    """
    if not hasattr(os, "pidfd_open"):
        return
    death = os.pidfd_open(os.getpid())

    def wait() -> None:
        poll = select.poll()
        poll.register(death, select.POLLIN)
        ((_, events),) = poll.poll()
        if events & select.POLLIN:  # otherwise the process has closed the descriptor
            os._exit(1)

    def watch() -> None:
        threading.Thread(target=wait, name="raysgd-parent", daemon=True).start()

    os.register_at_fork(after_in_child=watch)


def end_wandb(failed: bool = False) -> None:
    """Write the runs of Weights & Biases, which a process of Ray no longer does at its exit."""
    teardown = getattr(sys.modules.get("wandb"), "teardown", None)
    if teardown is not None:
        with contextlib.suppress(Exception):
            teardown(exit_code=int(failed))
