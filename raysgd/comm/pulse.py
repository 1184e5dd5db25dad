"""Pulses: connections by which the kernels of two hosts tell that they are there.

What a process answers tells nothing of its host: the process may be stopped, or hold Python's lock
for a minute. A kernel confirms what it receives for a process in any of these states. So each end
of a pulse sends a byte now and then, and asks its own kernel since when a byte has been waiting to
be confirmed.

``TCP_USER_TIMEOUT`` would end such a connection by itself, but also that of a process that has been
stopped for so long that nothing more can be received for it. TCP's keepalive does not, but counts
whole seconds, and says nothing while there is something to confirm.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time

from raysgd.comm.sockets import confirmation

__all__ = ["BEAT_S", "Pulse"]

BEAT_S = 0.25
"""How often to call `Pulse.beat`."""


class Pulse:
    """One end of a pulse.

    Args:
        connection: on which nothing else is sent. It stays the caller's.
    """

    IS_AVAILABLE = sys.platform == "linux"
    """Whether the kernel can be asked."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        self._socket = connection
        self._unconfirmed_since: float | None = None

    def beat(self) -> float:
        """Send a byte; return for how long, in seconds, an earlier one has not been confirmed.

        Raises:
            OSError: if the connection has ended.
        """
        with contextlib.suppress(BlockingIOError):
            while self._socket.recv(4096):
                pass
            raise ConnectionAbortedError("closed by the other end")
        now = time.monotonic()
        num_unconfirmed, silent_s, num_retries = confirmation(self._socket)
        if not num_unconfirmed:
            self._unconfirmed_since = None
        elif self._unconfirmed_since is not None:
            # both, as this process may have been stopped since, and the other end with it; without
            # a retry it is only that nothing more can be received there for now
            return min(now - self._unconfirmed_since, silent_s) if num_retries else 0.0
        with contextlib.suppress(BlockingIOError):  # a process that reads nothing for hours
            self._socket.send(b"\0")
        self._unconfirmed_since = now
        return 0.0
