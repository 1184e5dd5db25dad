"""Reductions of small tensors, sent directly from worker to worker.

gloo wakes several threads in each process for a collective. For a few kilobytes, that takes longer
than the rest of a training step. In a mesh, the waiting thread reads the sockets itself. Each rank
sends its tensor to all others and reduces in the order of ranks, so all results are bitwise equal.

A message is a header of two 64-bit integers (number of earlier reductions, number of bytes) and the
content of the tensor.
"""

import concurrent.futures
import functools
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import NoReturn

import torch

from raysgd.comm.connection import Address, Listener, connect, receive_exactly
from raysgd.comm.network import shut_down

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

SAME_COLLECTIVES = "All ranks must call the same collectives in the same order, with equal sizes"
_HEADER = struct.Struct("=QQ")
_RANK = struct.Struct("=Q")
_CLOSE_S = 5.0
_MAX_WAIT_S = 3600.0  # maximum timeout of `poll`, a C int of milliseconds


class PeerMesh:
    """Connections of one rank to all other ranks. All ranks use the same key.

    `timeout_s` limits `connect`.
    """

    def __init__(self, rank: int, host: str, key: str, timeout_s: float) -> None:
        self._rank = rank
        self._key = key
        self._timeout_s = timeout_s
        self._peers: dict[int, socket.socket] = {}
        self._changes: SimpleQueue[None] = SimpleQueue()
        """Has an item for each rank that has connected, and for `interrupt`."""
        self._num_started = 0
        self._newest_reduction: Future[None] | None = None
        self._order_lock = threading.Lock()
        self._break_reason = ""
        self._listener = Listener(host, "raysgd-mesh-listener")
        address = self._listener.expect(self._accept_rank, key=key)
        self.address = address.host, address.port

    def connect(self, addresses: Sequence[tuple[str, int]]) -> None:
        """Connect to all ranks, given their hosts and ports by rank. All ranks must call this."""
        ends = time.monotonic() + self._timeout_s
        try:
            for rank, (host, port) in enumerate(addresses[: self._rank]):
                target, left_s = Address(host, port, self._key), ends - time.monotonic()
                self._peers[rank] = connect(target, timeout_s=left_s)
                self._peers[rank].sendall(_RANK.pack(self._rank))
            while len(self._peers) < len(addresses) - 1 and not self._break_reason:
                self._changes.get(timeout=max(0.0, ends - time.monotonic()))
        except OSError as error:
            self._break(
                f"Workers cannot connect to each other: rank {self._rank} to rank {rank}: {error}",
                error,
            )
        except Empty:
            late = sorted(set(range(len(addresses))) - {self._rank, *self._peers})
            self._break(
                f"Workers cannot connect to each other: timed out, waiting for ranks {late}"
            )
        finally:
            self._listener.close()
        self._peers = dict(sorted(self._peers.items()))
        for connection in self._peers.values():
            connection.setblocking(False)
            # A stopped rank may stop reading.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        if self._break_reason:
            self._break(self._break_reason)  # also closes the new connections

    async def _accept_rank(self, connection: socket.socket) -> None:
        (rank,) = _RANK.unpack(await receive_exactly(connection, _RANK.size))
        self._peers[rank] = socket.socket(fileno=connection.detach())
        self._changes.put(None)

    def all_reduce(
        self, tensor: torch.Tensor, combine: Combine, timeout_s: float, in_thread: bool
    ) -> Future[None]:
        """Reduce a CPU tensor over all ranks, in place, after all earlier reductions.

        All ranks must start their reductions in the same order. `combine` combines the tensors of
        two ranks. The future fails with RuntimeError if a connection broke, after `interrupt`, or
        after `timeout_s`, which breaks the mesh.
        """
        future: Future[None] = Future()
        with self._order_lock:
            number, before = self._num_started, self._newest_reduction
            self._num_started, self._newest_reduction = number + 1, future

        def run() -> None:
            try:
                if before is not None:
                    before.exception()  # wait
                self._all_reduce(number, tensor, combine, timeout_s)
            except BaseException as error:
                self.interrupt(f"A reduction failed: {error}")  # others cannot read the rest
                future.set_exception(error.with_traceback(None))  # frames hold tensors
            else:
                future.set_result(None)

        if in_thread:
            threading.Thread(target=run, name="raysgd-mesh", daemon=True).start()
        else:
            run()
        return future

    def _all_reduce(
        self, number: int, tensor: torch.Tensor, combine: Combine, timeout_s: float
    ) -> None:
        # A copy of a contiguous tensor may keep odd strides or a lazy negation.
        content = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        content.copy_(tensor.detach())
        header = _HEADER.pack(number, content.nbytes)
        message = memoryview(b"".join((header, content.view(-1).view(torch.uint8).numpy().data)))
        received = {rank: bytearray(len(message)) for rank in self._peers}
        unsent = dict.fromkeys(self._peers, message)
        missing = {rank: memoryview(buffer) for rank, buffer in received.items()}
        ends = time.monotonic() + timeout_s
        while True:
            for rank, connection in self._peers.items():
                try:
                    unsent[rank] = _send(connection, unsent[rank])
                    missing[rank] = _receive(connection, missing[rank])
                except OSError as error:
                    self._break(f"The connection to rank {rank} broke: {error}", error)
                # Check early, because a longer message would never be complete.
                begun = len(message) - len(missing[rank]) >= _HEADER.size
                if begun and not received[rank].startswith(header):
                    theirs = _HEADER.unpack_from(received[rank])
                    self._break(
                        f"Reduction {number} of small tensors has {content.nbytes} bytes on this "
                        f"rank, but rank {rank} is in reduction {theirs[0]} with {theirs[1]} "
                        f"bytes. {SAME_COLLECTIVES}"
                    )
            if not (late := [rank for rank in self._peers if unsent[rank] or missing[rank]]):
                break
            poll = select.poll()
            for rank in late:
                events = select.POLLIN * bool(missing[rank]) | select.POLLOUT * bool(unsent[rank])
                poll.register(self._peers[rank], events)
            rest_s = min(ends - time.monotonic(), _MAX_WAIT_S)
            if rest_s <= 0:
                self._break(f"Timed out after {timeout_s:g} s, waiting for ranks {late}")
            poll.poll(1000 * rest_s)
        if content.numel():
            terms = {self._rank: content}
            for rank, buffer in received.items():
                term = torch.frombuffer(buffer, dtype=content.dtype, offset=_HEADER.size)
                terms[rank] = term.view(content.shape)
            with torch.no_grad():
                result = functools.reduce(combine, (terms[rank] for rank in sorted(terms)))
                tensor.detach().copy_(result)

    def _break(self, reason: str, cause: BaseException | None = None) -> NoReturn:
        self.interrupt(reason)
        raise RuntimeError(self._break_reason) from cause

    def interrupt(self, reason: str = "The driver interrupted this collective") -> None:
        """Make all current and later calls fail, here and on the other ranks."""
        self._break_reason = self._break_reason or f"gloo/ {reason}."
        for connection in list(self._peers.values()):
            shut_down(connection)
        self._changes.put(None)

    def local_addresses(self) -> set[tuple[str, int]]:
        """Return the local addresses of the connections."""
        return {connection.getsockname()[:2] for connection in self._peers.values()}

    def close(self) -> None:
        self.interrupt()
        if self._newest_reduction is not None:
            concurrent.futures.wait([self._newest_reduction], _CLOSE_S)
        self._listener.close()
        for connection in self._peers.values():
            connection.close()


def _send(connection: socket.socket, content: memoryview) -> memoryview:
    """Send without blocking, and return the rest."""
    try:
        return content[connection.send(content) :] if content else content
    except BlockingIOError:
        return content


def _receive(connection: socket.socket, space: memoryview) -> memoryview:
    """Receive without blocking, and return the space that is left."""
    try:
        if space and not (num_bytes := connection.recv_into(space)):
            raise ConnectionResetError("the peer closed it")
        return space[num_bytes:] if space else space
    except BlockingIOError:
        return space
