"""A guard beside a process: ends it where it stands still and its host reaches nobody.

A process that is cut off ends by itself, in a thread of Python. Where Python's lock is held for
minutes no thread can, nor in a process that is stopped. The guard is a process of its own, with
some 6 MB: it imports the standard library alone, and this file is its program.
"""

from __future__ import annotations

import contextlib
import json
import math
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

    def tell(
        self,
        driver: tuple[str, int],
        grace_s: float,
        peers: Sequence[tuple[str, int]],
        alone_s: float,
    ) -> None:
        """Say that the process is at work and hears the driver, and when to end it otherwise.

        Args:
            driver: an address on the driver's host.
            grace_s: for how long that does not answer until the process is to end.
            peers: addresses on other hosts; maybe none.
            alone_s: the same where none of these answers either.
        """
        line = json.dumps([driver, grace_s, peers, alone_s]).encode() + b"\n"
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
    told: list[Any] | None = None
    cut_off_since = alone_since = math.inf
    while True:
        heard = select.select([0], [], [], _STILL_S)[0]
        if os.getppid() != guarded:  # it has ended; its forks may hold the pipe
            return
        if heard:
            read = os.read(0, 65536)
            if not read:
                return
            told = json.loads(read[: read.rfind(b"\n")].rpartition(b"\n")[2])
        if heard or told is None or answers(tuple(told[0])):
            cut_off_since = alone_since = math.inf
            continue
        _, grace_s, peers, alone_s = told
        now = time.monotonic()
        cut_off_since = min(cut_off_since, now)
        is_alone = bool(peers) and not any(answers(tuple(peer)) for peer in peers)
        alone_since = min(alone_since, now) if is_alone else math.inf
        is_over = now - cut_off_since >= grace_s or now - alone_since >= alone_s
        is_still = not select.select([0], [], [], 0)[0]  # others were asked meanwhile
        if is_over and is_still and os.getppid() == guarded:
            os.kill(guarded, signal.SIGKILL)


if __name__ == "__main__":
    _guard(int(sys.argv[1]))
