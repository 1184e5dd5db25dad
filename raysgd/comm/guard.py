"""A guard beside a process: ends it where it stands still and its host reaches nobody.

A process that is cut off ends by itself, in a thread of Python. Where Python's lock is held for
minutes no thread can, nor in a process that is stopped. The guard is a process of its own, of 6
MB: it imports the standard library alone, and this file is its program.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

__all__ = ["Guard", "answers"]

_REACH_S = 0.5
_STILL_S = 2.0
"""How long nothing is heard of the process until its guard looks around."""


class Guard:
    """Guards this process, as long as it lives."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is not meant for it
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.fileno()
        os.set_blocking(self._pipe, False)

    def tell(self, addresses: Sequence[tuple[str, int]], alone_s: float) -> None:
        """Say that the process is at work, and when to end it once nothing is heard of it.

        Args:
            addresses: at which other hosts may answer.
            alone_s: for how long none of them does until it is to end.
        """
        line = json.dumps([alone_s, *addresses]).encode() + b"\n"
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # the guard may be stopped
            os.write(self._pipe, line)


def answers(address: tuple[str, int]) -> bool:
    """Whether the host of an address answers there at all, if only that nobody listens."""
    try:
        socket.create_connection(address, timeout=_REACH_S).close()
    except ConnectionRefusedError:
        pass
    except OSError:
        return False
    return True


def _guard(guarded: int) -> None:
    alone_s: float = 0.0
    addresses: list[list[Any]] = []
    alone_since: float | None = None
    while True:
        heard = select.select([0], [], [], _STILL_S)[0]
        if os.getppid() != guarded:  # it has ended; its forks may hold the pipe
            return
        if heard:
            told = os.read(0, 65536)
            if not told:
                return
            whole = told[: told.rfind(b"\n")]
            alone_s, *addresses = json.loads(whole.rpartition(b"\n")[2])
        if heard or not addresses or any(answers((host, port)) for host, port in addresses):
            alone_since = None
        elif alone_since is None:
            alone_since = time.monotonic()
        elif time.monotonic() - alone_since >= alone_s and os.getppid() == guarded:
            os.kill(guarded, signal.SIGKILL)


if __name__ == "__main__":
    _guard(int(sys.argv[1]))
