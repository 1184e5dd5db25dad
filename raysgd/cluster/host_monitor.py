"""Detects hosts that stop responding, for example after a power or network failure.

The driver and each worker on another machine share an idle TCP connection. Both kernels probe the
connection by keepalive, and close it if no probe is answered. A kernel answers for every process,
so a worker that is stopped, busy, or holds the GIL is never declared lost here.

If a worker's host is silent and the driver reaches another worker, the worker is lost. If the
driver reaches no worker, it assumes that its own host has no network, and waits. A worker that does
not reach the driver interrupts its call and reconnects. It exits if the driver refuses the
connection. Both sides wait for ``driver_grace_s`` at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from raysgd.comm.connection import Address, Listener, connect, keep_alive
from raysgd.comm.network import address_towards, is_single_node, shut_down

logger = logging.getLogger(__name__)

_KEEPALIVE_S = 4  # seconds without an answer after which the kernel closes a connection
_KEEPALIVE = {
    "TCP_KEEPIDLE": 1,
    "TCP_KEEPINTVL": 1,
    "TCP_KEEPCNT": _KEEPALIVE_S - 1,
    # Covers the end of the handshake, when the kernel sends no probes.
    "TCP_USER_TIMEOUT": _KEEPALIVE_S * 1000,
}
_SILENT_AFTER_MS = 1500  # milliseconds without an answer, after which a host counts as silent
_LAST_ACK = slice(56, 60)  # tcpi_last_ack_recv of struct tcp_info in linux/tcp.h, milliseconds
_RECONNECT_S = 3.0  # seconds that a live worker may take to reconnect
_RECONNECT_EVERY_S = 0.25  # seconds between two attempts of a worker, or checks of the driver
_CONNECT_DRIVER_S, _REACH_DRIVER_S = 5.0, 0.5
_NUM_REFUSALS = 3  # refused connections after which a worker exits; a busy driver may refuse one
_KILL_GRACE_S = 1.0  # seconds that Ray may take to kill a refused worker before it exits by itself


class HostError(Exception):
    """A worker's host closed the connection, or does not respond."""


# ---- on the driver


@dataclass(eq=False)
class HostWatch:
    """The driver's end of the connection with one worker."""

    host: str
    fail: Callable[[HostError], None]
    """Called in the listener's thread if the worker is lost."""
    monitor: HostMonitor
    listener: Listener
    is_silent: bool = False  # until the worker reconnects
    _connection: socket.socket | None = None
    _connected_at: float = 0.0
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self.address = self.listener.expect(self._watch)

    @property
    def is_reachable(self) -> bool:
        """Whether the host responds and the worker has been connected for a while."""
        connection = self._connection
        # After a network failure of the driver's host, the workers reconnect at different times.
        if connection is None or time.monotonic() - self._connected_at < _RECONNECT_S:
            return False
        with contextlib.suppress(OSError):  # the socket is closed
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK.stop)
            return int.from_bytes(info[_LAST_ACK], sys.byteorder) < _SILENT_AFTER_MS
        return False

    def close(self) -> None:
        self._is_closed = True
        self.listener.forget(self.address)
        if (connection := self._connection) is not None:
            shut_down(connection)

    async def _watch(self, connection: socket.socket) -> None:
        """Wait until a connection ends, then wait for the worker to reconnect."""
        keep_alive(connection, _KEEPALIVE)
        self._connection, self._connected_at = connection, time.monotonic()
        self.is_silent = is_silent = False
        if self._is_closed:  # another thread has just called `close`
            return
        try:
            await asyncio.get_running_loop().sock_recv(connection, 1)  # the worker sends nothing
        except OSError as error:
            is_silent = not isinstance(error, ConnectionError)
        ended_at = time.monotonic()
        while self._connection is connection and not self._is_closed:
            self.is_silent = is_silent
            waited_s = time.monotonic() - ended_at
            may_return = not is_silent and waited_s < _RECONNECT_S
            is_over = waited_s >= self.monitor.driver_grace_s
            if is_over or (not may_return and self.monitor.is_any_reachable()):
                cause = "its host closed the connection to the driver"
                if is_silent:
                    seconds = _KEEPALIVE_S + waited_s
                    cause = f"its host {self.host} has not answered the driver for {seconds:.1f} s"
                self.close()
                self.fail(HostError(cause))
                return
            await asyncio.sleep(_RECONNECT_EVERY_S)


@dataclass(eq=False)
class HostMonitor:
    """Watches the hosts of a group's workers, except the driver's own host."""

    driver_grace_s: float
    """Seconds that driver and workers wait for each other."""
    interrupts_calls: bool
    """Whether a worker that cannot reach the driver interrupts its call."""
    is_any_reachable: Callable[[], bool]
    """Returns whether the driver reaches any worker, including workers on its own host."""
    _listeners: dict[str, Listener] = field(default_factory=dict)
    _is_cut_off: bool = False

    def watch(self, node_ip: str, fail: Callable[[HostError], None]) -> HostWatch | None:
        """Return a watch for the worker to connect to. None for the driver's own host."""
        if sys.platform != "linux" or is_single_node([node_ip]):
            return None
        try:
            if (own_address := address_towards(node_ip)) not in self._listeners:
                self._listeners[own_address] = Listener(own_address, "raysgd-host-monitor")
            return HostWatch(node_ip, fail, self, self._listeners[own_address])
        except (OSError, RuntimeError):  # no port can be opened, or no thread can start
            return None

    def is_cut_off(self, watches: Sequence[HostWatch | None]) -> bool:
        """Return whether all watches are silent. Log the start of the silence."""
        silent = [watch for watch in watches if watch is not None and watch.is_silent]
        is_cut_off = bool(silent) and len(silent) == len(watches)
        if is_cut_off and not self._is_cut_off:
            logger.warning(
                "No worker's host (%s) answers the driver, so the driver's own host is probably "
                "cut off. Driver and workers wait for each other for up to %g s (driver_grace_s).",
                ", ".join(dict.fromkeys(watch.host for watch in silent)),
                self.driver_grace_s,
            )
        self._is_cut_off = is_cut_off
        return is_cut_off

    def warn_if_unwatched(self, future: Future[Any]) -> None:
        if future.exception() is None and (reason := future.result()):
            logger.warning(
                "A worker cannot connect to the driver (%s). If the host of the "
                "worker fails, raysgd notices it only when Ray does, after up to a minute.",
                reason,
            )

    def close(self) -> None:
        while self._listeners:
            self._listeners.popitem()[1].close()


# ---- on the worker


class DriverWatch:
    """The worker's end of the connection to the driver, which a thread watches.

    The thread reconnects after a failure. While the driver is unreachable, it calls `interrupt`.
    After `driver_grace_s`, it ends the process.
    """

    def __init__(
        self, address: Address, driver_grace_s: float, interrupt: Callable[[], None]
    ) -> None:
        self._address, self._driver_grace_s = address, driver_grace_s
        self._interrupt = interrupt

    def start(self) -> str:
        """Connect and start the thread. Return the reason of a failure, or an empty string."""
        try:
            first = (connect(self._address, _CONNECT_DRIVER_S),)
        except OSError as error:
            return str(error)
        threading.Thread(
            target=self._watch, args=first, name="raysgd-driver-watch", daemon=True
        ).start()
        return ""

    def _watch(self, connection: socket.socket | None) -> None:
        while connection is not None:
            with connection, contextlib.suppress(OSError):
                keep_alive(connection, _KEEPALIVE)
                connection.recv(1)  # the driver sends nothing
            connection = self._reconnect()
        _kill_own_process()

    def _reconnect(self) -> socket.socket | None:
        """Return a new connection. None if this process must exit."""
        began, num_refusals, reason = time.monotonic(), 0, ""
        while not reason:
            try:
                return connect(self._address, _CONNECT_DRIVER_S, _REACH_DRIVER_S)
            except ConnectionError:
                num_refusals += 1
                if num_refusals == _NUM_REFUSALS:
                    reason = "the driver has ended, or has declared this worker lost"
                    self._interrupt()
                    time.sleep(_KILL_GRACE_S)
            except OSError:
                self._interrupt()
                if (waited_s := time.monotonic() - began) > self._driver_grace_s:
                    reason = f"the driver was unreachable for {waited_s:.0f} s (driver_grace_s)"
            time.sleep(_RECONNECT_EVERY_S)
        print(f"raysgd: this worker exits because {reason}.", file=sys.stderr)
        return None


def _kill_own_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)  # other threads may block a normal exit
