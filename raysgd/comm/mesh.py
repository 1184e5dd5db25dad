"""Reductions of small tensors, sent directly from worker to worker.

gloo wakes several threads in each process for a collective. For a few kilobytes, that takes longer
than the rest of a training step. In a mesh, the waiting thread reads the sockets itself. Each rank
sends its tensor to all others and reduces in the order of ranks, so all results are bitwise equal.

A message is a header of two 64-bit integers (number of earlier reductions, number of bytes) and the
content of the tensor.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import NoReturn

import torch

from raysgd.comm.connection import Address, Listener, connect, exactly
from raysgd.comm.sockets import shut_down

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_HEADER = struct.Struct("=QQ")
_RANK = struct.Struct("=Q")
_CLOSE_S = 5.0
_REACH_S = 5.0
"""Timeout of a TCP connection to another rank."""
_LONGEST_WAIT_S = 3600.0
"""Maximum timeout of `poll`, a C int of milliseconds."""


class Reduction:
    """A running reduction, whose result replaces `tensor`."""

    def __init__(
        self,
        number: int,
        tensor: torch.Tensor,
        combine: Combine,
        others: Sequence[int],
        at_end: Callable[[], None],
    ) -> None:
        self._tensor = tensor
        self._content = tensor.detach().contiguous()
        self._combine = combine
        self.number = number
        self.at_end = at_end
        num_bytes = tensor.numel() * tensor.element_size()
        self._header = _HEADER.pack(number, num_bytes)
        self.missing = {rank: bytearray(_HEADER.size + num_bytes) for rank in others}
        """Buffers of the messages that have not arrived, by rank."""
        self._come: dict[int, bytearray] = {}
        self.done = False

    def message(self) -> bytes:
        return b"".join((self._header, self._content.view(-1).view(torch.uint8).numpy().data))

    def take(self, rank: int, own_rank: int) -> None:
        """Store the message of `rank`. After the last message, reduce all messages."""
        self._come[rank] = self.missing.pop(rank)
        if self.missing:
            return
        if self._content.numel():
            self._reduce(own_rank)
        self.done = True

    def check(self, rank: int) -> None:
        """Raise RuntimeError if the header from `rank` is of a different reduction."""
        message = self.missing[rank]
        if message[: _HEADER.size] != self._header:
            raise RuntimeError(
                "Reduction {} of small tensors has {} bytes on this rank, but rank {} is in "
                "reduction {} with {} bytes. All ranks must call the same collectives in the same "
                "order, with tensors of the same size.".format(
                    *_HEADER.unpack(self._header), rank, *_HEADER.unpack_from(message)
                )
            )

    def _reduce(self, own_rank: int) -> None:
        terms = {own_rank: self._content}
        for rank, message in self._come.items():
            term = torch.frombuffer(message, dtype=self._content.dtype, offset=_HEADER.size)
            terms[rank] = term.view(self._content.shape)
        with torch.no_grad():
            result = functools.reduce(self._combine, (terms[rank] for rank in sorted(terms)))
            self._tensor.detach().copy_(result)


class _Peer:
    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.socket = connection
        self.unsent: collections.deque[memoryview] = collections.deque()
        self.awaited: collections.deque[Reduction] = collections.deque()
        self.num_received = 0
        """Bytes received for the first awaited reduction."""

    def send(self) -> bool:
        """Send without blocking. Return whether bytes were sent."""
        sent = False
        while self.unsent:
            try:
                num_bytes = self.socket.send(self.unsent[0])
            except BlockingIOError:
                break
            sent = True
            if num_bytes == len(self.unsent[0]):
                self.unsent.popleft()
            else:
                self.unsent[0] = self.unsent[0][num_bytes:]
        return sent

    def receive(self, own_rank: int, at_end: Callable[[Reduction], None]) -> bool:
        """Receive without blocking. Call `at_end` for each result. Return whether bytes arrived."""
        received = False
        while self.awaited:
            wanted = self.awaited[0]
            with memoryview(wanted.missing[self.rank]) as message:
                try:
                    num_bytes = self.socket.recv_into(message[self.num_received :])
                except BlockingIOError:
                    break
                if not num_bytes:
                    raise ConnectionResetError("the peer closed it")
                received = True
                self.num_received += num_bytes
                # Check early, because a longer message would never be complete.
                if self.num_received >= _HEADER.size:
                    wanted.check(self.rank)
                if self.num_received < len(message):
                    continue
            self.num_received = 0
            self.awaited.popleft()
            wanted.take(self.rank, own_rank)
            if wanted.done:
                at_end(wanted)
        return received

    @property
    def events(self) -> int:
        return select.POLLIN * bool(self.awaited) | select.POLLOUT * bool(self.unsent)


class Mesh:
    """Connections of one rank to all other ranks. All ranks use the same key.

    Args:
        rank: This rank.
        host: Address of this rank for the others.
        key: Key of the connections.
        timeout_s: Seconds to connect to all ranks.
    """

    def __init__(self, rank: int, host: str, key: str, timeout_s: float) -> None:
        self._rank = rank
        self._key = key
        self._timeout_s = timeout_s
        self._come: SimpleQueue[tuple[int, socket.socket] | None] = SimpleQueue()
        """Ranks that have connected. None means that `interrupt` was called."""
        self._sockets: list[socket.socket] = []
        self._peers: list[_Peer] = []
        self._unended: dict[int, Reduction] = {}
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._reads = False
        """Whether a thread is polling the sockets."""
        self._wakes = socket.socketpair()
        for end in self._wakes:
            end.setblocking(False)
        self._num_started = 0
        self._broken = ""
        self._listener = Listener(host, "raysgd-mesh-listener")
        address = self._listener.expect(self._take, key=key)
        self.address = address.host, address.port

    def connect(self, addresses: Sequence[tuple[str, int]]) -> None:
        """Connect to all ranks, given their hosts and ports by rank. All ranks must call this."""
        ends = time.monotonic() + self._timeout_s
        connections: dict[int, socket.socket] = {}
        try:
            for rank, (host, port) in enumerate(addresses[: self._rank]):
                target, left_s = Address(host, port, self._key), ends - time.monotonic()
                connections[rank] = connect(
                    target, timeout_s=left_s, reach_s=_REACH_S, hold=self._hold
                )
                connections[rank].sendall(_RANK.pack(self._rank))
            while len(connections) < len(addresses) - 1:
                come = self._come.get(timeout=max(0.0, ends - time.monotonic()))
                if come is None:
                    break
                rank, connections[rank] = come
        except OSError as error:
            self._break(
                f"Workers cannot connect to each other: rank {self._rank} to rank {rank}: {error}",
                error,
            )
        except Empty:
            late = sorted(set(range(len(addresses))) - {self._rank, *connections})
            self._break(
                f"Workers cannot connect to each other: timed out, waiting for ranks {late}"
            )
        finally:
            self._listener.close()
        for rank, connection in sorted(connections.items()):
            connection.setblocking(False)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # a stopped rank may stop reading
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
            self._peers.append(_Peer(rank, connection))
        if self._broken:
            self._break(self._broken)  # also closes the new connections

    async def _take(self, connection: socket.socket) -> None:
        (rank,) = _RANK.unpack(await exactly(connection, _RANK.size))
        connection = socket.socket(fileno=connection.detach())
        self._sockets.append(connection)
        self._come.put((rank, connection))

    def _hold(self, connection: socket.socket) -> None:
        self._sockets.append(connection)
        self._check()

    def start(
        self, tensor: torch.Tensor, combine: Combine, at_end: Callable[[], None]
    ) -> Reduction:
        """Start to reduce a CPU tensor over all ranks, in place, without waiting.

        All ranks must start their reductions in the same order. `combine` combines the tensors of
        two ranks. `at_end` is called when the reduction has ended or failed.
        """
        with self._lock:
            self._check()
            others = [peer.rank for peer in self._peers]
            started = Reduction(self._num_started, tensor, combine, others, at_end)
            self._unended[self._num_started] = started
            self._num_started += 1
            message = memoryview(started.message())
            for peer in self._peers:
                peer.awaited.append(started)
                peer.unsent.append(message)
            with contextlib.suppress(RuntimeError):  # `finish` raises the error
                self._advance(receive=False)
            if self._reads:  # the polling thread does not know this reduction yet
                self._wake()
            return started

    def finish(self, wanted: Reduction, timeout_s: float, give_up: bool = True) -> None:
        """Wait until `wanted` is complete and all messages of this rank are sent.

        If several threads wait, one of them reads the sockets for all. Raise RuntimeError if a
        connection broke, after `interrupt`, or after `timeout_s`; `give_up` then breaks the mesh.
        """
        ends = time.monotonic() + timeout_s
        with self._changed:
            while not wanted.done or any(peer.unsent for peer in self._peers):
                self._check()
                rest_s = min(ends - time.monotonic(), _LONGEST_WAIT_S)
                if rest_s <= 0:
                    late = [peer.rank for peer in self._peers if peer.events]
                    reason = f"Timed out after {timeout_s:g} s, waiting for ranks {late}"
                    if give_up:
                        self._break(reason)
                    raise RuntimeError(f"gloo/ {reason}.")
                if self._reads:
                    self._changed.wait(rest_s)
                elif not self._advance():
                    self._poll(rest_s)

    def _poll(self, timeout_s: float) -> None:
        """Wait, without the lock, until a socket is ready."""
        poll = select.poll()
        poll.register(self._wakes[0], select.POLLIN)
        for peer in self._peers:
            if peer.events:
                poll.register(peer.socket, peer.events)
        self._reads = True
        self._lock.release()
        try:
            ready = dict(poll.poll(1000 * timeout_s))
        finally:
            self._lock.acquire()
            self._reads = False
            self._changed.notify_all()
        if self._wakes[0].fileno() in ready:
            self._wakes[0].recv(4096)

    @property
    def broken(self) -> bool:
        return bool(self._broken)

    def look(self) -> None:
        """Make progress without waiting, unless another thread reads the sockets."""
        if self._lock.acquire(blocking=False):
            try:
                # the polling thread would miss these bytes
                if not self._reads:
                    with contextlib.suppress(RuntimeError):  # the waiting thread raises the error
                        self._advance()
            finally:
                self._lock.release()

    def _advance(self, receive: bool = True) -> bool:
        """Send and receive without blocking. Return whether any bytes moved."""
        self._check()
        moved = False
        for peer in self._peers:
            try:
                moved |= peer.send()
                moved |= receive and peer.receive(self._rank, self._end)
            except OSError as error:
                self._break(f"The connection to rank {peer.rank} broke: {error}", error)
            except RuntimeError as error:
                self._break(str(error))
        return moved

    def _end(self, reduction: Reduction) -> None:
        del self._unended[reduction.number]
        reduction.at_end()
        self._changed.notify_all()

    def _wake(self) -> None:
        """Make the polling thread rebuild its poll set."""
        with contextlib.suppress(OSError):  # closed, or already woken
            self._wakes[1].send(b"1")

    def _check(self) -> None:
        if self._broken:
            raise RuntimeError(self._broken)

    def _break(self, reason: str, cause: BaseException | None = None) -> NoReturn:
        self.interrupt(reason)
        raise RuntimeError(self._broken) from cause

    def interrupt(self, reason: str = "The driver interrupted this collective") -> None:
        """Make all current and later calls fail, here and on the other ranks."""
        self._broken = self._broken or f"gloo/ {reason}."
        for connection in list(self._sockets):
            shut_down(connection)
        self._come.put(None)
        self._wake()

    def close(self) -> None:
        self.interrupt()
        with self._lock:
            while self._unended:
                self._unended.popitem()[1].at_end()
            self._changed.wait_for(lambda: not self._reads, _CLOSE_S)
        self._listener.close()
        for opened in (*self._wakes, *self._sockets):
            opened.close()
