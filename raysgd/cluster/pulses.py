"""Hosts that vanish without a word: how the driver notices it, and how the worker there does.

The driver has a pulse with each worker. One whose host has confirmed nothing for ``unreachable_s``
is lost, if another worker is heard of; its calls fail, as they do where Ray tells of a death. If
nobody is heard of it is the driver that is cut off, most likely, and it waits.

A worker that hears nothing of the driver stops what it does, so that it works for nobody who has
given it up, and tries to reach the driver again. It ends by itself where the driver has given it
up or is gone, soon where it reaches no other worker either, and after ``driver_grace_s`` at last.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias

from raysgd.comm.connection import Address, Listener, connect
from raysgd.comm.guard import Guard, answers
from raysgd.comm.pulse import BEAT_S, Pulse
from raysgd.elastic.policies import WorkerInfo

__all__ = [
    "MARGIN_S",
    "DriverWatch",
    "EndedError",
    "HostLostError",
    "HostPulse",
    "LostError",
    "PartedError",
    "Pulses",
    "Terms",
]

logger = logging.getLogger(__name__)

MARGIN_S = 0.5
"""By how much longer a worker waits than the driver, which so decides first."""
_LAST_S = 0.05
"""How long before ``unreachable_s`` is over a host is asked for the last time."""
_ALONE_S = 3.0
"""How long a worker that reaches nobody tries to, before it ends."""
_END_S = 1.0
"""How long a worker that is not wanted waits for Ray to end it."""
_RETRY_S = 0.2
_COME_BACK_S = 2.0
"""How long a worker has at least to come back whose connection was closed."""
_CONNECT_S = 5.0
_REACH_S = 0.5
_NUM_REFUSALS = 3
"""How often a worker has to be turned away, as it may be where a thousand come back at once."""
_NUM_ASKED = 2
"""How many other workers are asked for."""


class HostLostError(Exception):
    """The host of a worker has confirmed nothing for ``unreachable_s``."""


class PartedError(HostLostError):
    """The host of a worker does not reach that of another, though the driver reaches both."""


class EndedError(Exception):
    """The kernel of a worker's host has closed its connection: its process has ended."""


LostError: TypeAlias = HostLostError | EndedError


class Terms(NamedTuple):
    """How long driver and workers wait for each other, in seconds."""

    unreachable_s: float
    driver_grace_s: float
    stops: bool
    """Whether a worker that hears nothing of the driver stops its call, which can be repeated."""


class HostPulse:
    """The driver's end of the pulse of one worker.

    Args:
        info: where the worker runs.
        lose: told of the loss, in a thread of the listener's.
        pulses: those of the whole group.
    """

    def __init__(self, info: WorkerInfo, lose: Callable[[LostError], None], pulses: Pulses) -> None:
        self._info = info
        self._lose = lose
        self._terms = pulses.terms
        self._others = pulses.others
        self._listener = pulses.listener_for(info)
        self._connection: socket.socket | None = None
        self._heard_at = 0.0
        self._steady_since: float | None = None
        self._is_closed = False
        self.address = self._listener.expect(self._talk)

    @property
    def silence_s(self) -> float | None:
        """Seconds since the worker's host was heard of; None where it never was."""
        return time.monotonic() - self._heard_at if self._heard_at else None

    def close(self) -> None:
        """Wait for the worker no more, and let it know."""
        self._is_closed = True
        self._listener.forget(self.address)

    async def _talk(self, connection: socket.socket) -> None:
        """Follow the pulse of a worker that has connected, maybe again."""
        pulse: Pulse | None = Pulse(connection)
        peer, num_looks_left = connection.getpeername(), math.inf
        self._connection = connection
        while not self._is_closed and self._connection is connection:
            try:
                if pulse is not None:
                    silence_s = pulse.beat()
                    self._heard_at = max(self._heard_at, time.monotonic() - silence_s)
            except OSError as error:
                if pulse is not None and isinstance(error, ConnectionError):
                    # looks, not seconds: this process may stand still meanwhile
                    num_looks_left = max(self._terms.unreachable_s, _COME_BACK_S) / BEAT_S
                pulse = None  # the worker may come back, if it has not died
            if not self.is_heard:
                self._steady_since = None
            elif self._steady_since is None:
                self._steady_since = time.monotonic()
            num_looks_left -= 1
            may_come_back = 0 < num_looks_left < math.inf
            if num_looks_left <= 0 and await _answers_now(peer):  # Ray tells it sooner
                self.close()
                self._lose(EndedError("its connection to the driver was closed on its host"))
            elif not may_come_back and self._is_lost():
                self.close()
                self._lose(HostLostError(self._cause()))
            elif self.is_heard or pulse is None:
                await asyncio.sleep(BEAT_S)
            elif await _answers_now(peer, self._to_wait_s()):
                self._heard_at = time.monotonic()
                await asyncio.sleep(BEAT_S)

    def _is_lost(self) -> bool:
        silence_s, terms = self.silence_s, self._terms
        if silence_s is None or not self.is_silent:
            return False
        return silence_s >= terms.driver_grace_s or any(
            other is None or (other is not self and other._is_steady) for other in self._others()
        )

    @property
    def is_heard(self) -> bool:
        """Whether the worker's host is there now."""
        silence_s = self.silence_s
        return silence_s is not None and silence_s < self._terms.unreachable_s / 2

    @property
    def is_silent(self) -> bool:
        """Whether nothing was heard of the host for ``unreachable_s``."""
        silence_s = self.silence_s
        return silence_s is not None and silence_s >= self._terms.unreachable_s

    def _to_wait_s(self) -> float:
        """Return for how long to wait for an answer, so that the last wait ends behind the time.

        A host whose link is back answers up to a second later: Linux repeats ARP requests, which
        one whose card had no carrier has to make, once a second.
        """
        left_s = self._terms.unreachable_s - _LAST_S - (self.silence_s or 0.0)
        return left_s if 0 < left_s < BEAT_S else BEAT_S

    @property
    def _is_steady(self) -> bool:
        """Whether it has been there for a while.

        As a driver that was cut off comes back, its workers do not reach it in the same moment.
        """
        since = self._steady_since
        return since is not None and time.monotonic() - since >= self._terms.unreachable_s

    def _cause(self) -> str:
        silence_s = self.silence_s or 0.0
        return (
            f"its host {self._info.node_ip} is unreachable: the driver has heard nothing of it "
            f"since {_time_before(silence_s)}, for {silence_s:.1f} s "
            f"(unreachable_s={self._terms.unreachable_s:g})"
        )


def _time_before(seconds: float) -> str:
    """Return the time of day so many seconds ago."""
    return datetime.fromtimestamp(time.time() - seconds).strftime("%H:%M:%S")


async def _answers_now(address: Any, timeout_s: float = BEAT_S) -> bool:
    """Whether the host of an address answers a new connection, if only to refuse it.

    What is not confirmed is sent again in ever longer intervals. So a link that is up again is
    noticed before.
    """
    loop = asyncio.get_running_loop()
    with socket.socket() as probe:
        probe.setblocking(False)
        try:
            connecting = asyncio.ensure_future(loop.sock_connect(probe, address))
            try:  # a timeout would win over an answer that came while there was no processor
                await asyncio.wait([connecting], timeout=timeout_s)
                if not connecting.done():
                    return False
            finally:
                connecting.cancel()
                await asyncio.wait([connecting])
            connecting.result()
        except ConnectionRefusedError:
            return True
        except OSError:  # at once, as where there is no route
            await asyncio.sleep(timeout_s)
            return False
        return True


class Pulses:
    """The driver's ends of all pulses of a group.

    Args:
        terms: how long to wait.
        listener_for: the listener at which a worker reaches the driver.
        others: pulses of the members of the group, or of those that start to be; None for one that
            needs none, since it runs in the driver's process.
    """

    def __init__(
        self,
        terms: Terms,
        listener_for: Callable[[WorkerInfo], Listener],
        others: Callable[[], Sequence[HostPulse | None]],
    ) -> None:
        self.terms = terms
        self.listener_for = listener_for
        self.others = others

    def of(self, info: WorkerInfo, lose: Callable[[LostError], None]) -> HostPulse | None:
        """Return a pulse that a worker may connect to; None where there can be none."""
        if not Pulse.IS_AVAILABLE:
            return None
        try:
            return HostPulse(info, lose, self)
        except (OSError, RuntimeError):
            return None

    def say_cut_off(self, hosts: Sequence[str], silence_s: float) -> None:
        """Log that nothing was heard of any host, for so long, and what follows."""
        logger.warning(
            "The driver has heard nothing of any worker's host (%s) since %s: its own is cut off, "
            "most likely. They wait for each other for up to %g s (driver_grace_s).",
            ", ".join(dict.fromkeys(hosts)),
            _time_before(silence_s),
            self.terms.driver_grace_s,
        )

    def note(self, told: Future[Any]) -> None:
        """Take note of whether a worker could be told of its pulse, and connect."""
        if told.exception() is None and (why_not := told.result()):
            logger.warning(
                "A worker cannot connect to the driver (%s). Ray alone tells when its host is "
                "lost, which may take a minute.",
                why_not,
            )


class DriverWatch:
    """The worker's end of its pulse, which a thread of its own follows.

    Args:
        address: where the driver listens.
        terms: how long to wait.
        stop: stops what the worker does, in another thread.
        peers: addresses at which other workers listen on other hosts.
    """

    def __init__(
        self,
        address: Address,
        terms: Terms,
        stop: Callable[[], None],
        peers: Callable[[], Sequence[tuple[str, int]]],
    ) -> None:
        self._address = address
        self._terms = terms
        self._stop = stop
        self._peers = peers
        self._guard: Guard | None = None
        self._known_peers: Sequence[tuple[str, int]] = ()

    def start(self) -> str:
        """Connect, and follow the pulse from then on; returns why that cannot be, or nothing."""
        try:
            connection = connect(self._address, _CONNECT_S)
        except OSError as error:
            return str(error)
        if connection.getsockname()[0] != connection.getpeername()[0]:  # not on the driver's host
            with contextlib.suppress(OSError):  # no process can be started
                self._guard = Guard()
        threading.Thread(
            target=self._follow, args=(connection,), name="raysgd-pulse", daemon=True
        ).start()
        return ""

    def _follow(self, connection: socket.socket) -> None:
        while True:
            with connection:  # open until there is another: who closes it has ended
                with contextlib.suppress(OSError):  # closed by the driver, or on the way
                    pulse = Pulse(connection)
                    while pulse.beat() < self._terms.unreachable_s + MARGIN_S:
                        self._tell_guard()
                        time.sleep(BEAT_S)
                found = self._reconnected()
            if found is None:
                _end()
                return
            connection = found

    def _reconnected(self) -> socket.socket | None:
        """Return a connection to the driver; None where this worker is to end."""
        began, num_refusals, why = time.monotonic(), 0, ""
        while not why:
            try:
                return connect(self._address, _CONNECT_S, _REACH_S)
            except (ConnectionRefusedError, ConnectionAbortedError, ConnectionResetError):
                num_refusals += 1
                if num_refusals == _NUM_REFUSALS:
                    why = "the driver has given this worker up, or has ended"
                    self._stop()
                    time.sleep(_END_S)
            except OSError:
                if answers(self._address[:2]):  # its process may be stopped
                    began = time.monotonic()
                elif self._terms.stops:
                    self._stop()
                waited_s = time.monotonic() - began
                if waited_s > self._terms.driver_grace_s:
                    why = f"the driver cannot be reached for {waited_s:.0f} s (driver_grace_s)"
                elif waited_s > _ALONE_S and self._is_alone():
                    why = (
                        f"the driver cannot be reached for {waited_s:.0f} s, and no other worker "
                        "either"
                    )
            time.sleep(_RETRY_S)
        print(f"raysgd: {why}: this worker ends.", file=sys.stderr)
        return None

    def _is_alone(self) -> bool:
        """Whether other workers have other hosts, and none of these can be reached."""
        peers = self._asked_peers()
        return bool(peers) and not any(map(answers, peers))

    def _asked_peers(self) -> Sequence[tuple[str, int]]:
        return self._peers()[:_NUM_ASKED]

    def _tell_guard(self) -> None:
        if self._guard is not None:
            with contextlib.suppress(OSError):  # no descriptor is left, to ask for addresses with
                self._known_peers = self._asked_peers()
            driver, grace_s = self._address[:2], self._terms.driver_grace_s
            self._guard.tell(driver, grace_s, self._known_peers, _ALONE_S)


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)  # whatever the process is in
