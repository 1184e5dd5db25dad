"""torch.distributed process groups: gloo on CPU, NCCL on GPU."""

import contextlib
import datetime
import json
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
import torch.distributed.nn.functional  # noqa: F401  before a group, which its defaults keep
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]

from raysgd._internal.config import env_seconds
from raysgd._internal.runner import WorkerContext
from raysgd._internal.tracebacks import is_raised_by_user
from raysgd.comm.backend import CollectiveBackend
from raysgd.comm.connection import Address, derive_key
from raysgd.comm.gloo import GlooGroup
from raysgd.comm.mesh import PeerMesh
from raysgd.comm.network import (
    LOOPBACK,
    driver_address,
    interface_of,
    interfaces,
    listening_addresses,
    tcp_sockets,
    worker_address,
)
from raysgd.comm.rendezvous import StoreClient, StoreServer

_CONNECT = datetime.timedelta(seconds=5)
"""Timeout of connecting to workers that are all present. If a worker dies in the milliseconds in
which gloo connects, gloo waits five times as long, and cannot be interrupted."""
_NCCL_CONNECT = datetime.timedelta(seconds=60)  # ``TCPStore`` first resolves its address
_MAX_MESHED = 16  # with more workers, gloo is faster than a mesh
_LINKS_EVERY_S, _MIN_BYTES = 3.0, 2**16
"""How often to measure the links, because that takes a millisecond, and by how many bytes."""
_SIGNS = ("gloo/", "pair closure", "NCCL", "ProcessGroup")
"""Parts of the messages of RuntimeErrors from gloo and NCCL, which define no error types."""

_STALE = ("in the world group map", "please create group with", "Invalid process group")
"""Parts of PyTorch's ValueErrors for groups of another generation."""


class TorchStore(Store):
    """Connection of a worker to a store, for torch.distributed.

    Methods raise DistNetworkError after the store was closed or the client was interrupted, and
    DistStoreError if a key is not set in time.
    """

    def __init__(self, address: Address, timeout: datetime.timedelta) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._client = StoreClient(address, dist.DistNetworkError, dist.DistStoreError)

    def interrupt(self) -> None:
        self._client.interrupt()

    def set(self, key: str, value: str | bytes) -> None:
        self._client.request("set", key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def add(self, key: str, value: int) -> int:
        return int(self._client.request("add", key, value))

    def check(self, keys: Sequence[str]) -> bool:
        return self._client.request("get", list(keys), 0) is not None

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        # PyTorch's stubs lack the attribute that set_timeout() sets.
        return self._client.get(keys, self.timeout.total_seconds())  # type: ignore[attr-defined]

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        wait_s = (timeout or self.timeout).total_seconds()  # type: ignore[attr-defined]
        self._client.get(keys, wait_s)


class TorchRendezvous(NamedTuple):
    """Addresses of one generation's stores. Only NCCL uses the ``TCPStore``."""

    store: Address
    tcp_store_port: int | None = None


class TorchCollectiveBackend(CollectiveBackend):
    """One torch.distributed process group per generation, over a new store on the driver.

    `prepare_process` runs at the beginning of each `setup`, with its arguments.
    """

    def __init__(
        self,
        name: str,
        timeout_s: float,
        prepare_process: Callable[[WorkerContext, TorchRendezvous | None], None] | None = None,
    ) -> None:
        self._name, self._prepare_process = name, prepare_process
        self._timeout = datetime.timedelta(
            seconds=env_seconds("NCCL_TIMEOUT_S", timeout_s) if name == "nccl" else timeout_s
        )
        self._tcp_store: TCPStore | None = None
        self._reset()

    def _reset(self) -> None:
        self._client: TorchStore | None = None
        self._listening: set[tuple[str, int]] = set()  # addresses of gloo, of all workers
        self._leaving = contextlib.ExitStack()  # ends what `setup` began
        self._group: GlooGroup | None = None
        self._mesh: PeerMesh | None = None
        self._links: dict[str, float] = {}
        self._sent: dict[str, tuple[int, float]] = {}
        self._links_at = math.inf  # no links within one host

    def create_rendezvous(self, addresses: Sequence[str]) -> TorchRendezvous:
        self.close()
        host = driver_address(addresses)
        self._server = StoreServer(host)
        if self._name != "nccl":
            return TorchRendezvous(self._server.address)
        # By default, ``TCPStore`` listens on all interfaces.
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        self._tcp_store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=self._timeout,
            master_listen_fd=listener.detach(),
        )
        return TorchRendezvous(self._server.address, port)

    def setup(self, context: WorkerContext, rendezvous: TorchRendezvous | None) -> None:
        """Create the default process group, and record which sockets belong to it."""
        if dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is already initialized in this process, but raysgd needs its "
                "own process group. Call torch.distributed.destroy_process_group(), or shut down "
                "the other trainer with use_local=True."
            )
        if self._prepare_process is not None:
            self._prepare_process(context, rendezvous)
        self._leaving.callback(lambda: dist.is_initialized() and dist.destroy_process_group())
        driver_host = LOOPBACK if rendezvous is None else rendezvous.store.host
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            own_address = worker_address(driver_host, context.node_ip)
            os.environ["GLOO_SOCKET_IFNAME"] = interface_of(own_address)
            self._leaving.callback(os.environ.pop, "GLOO_SOCKET_IFNAME", None)
        store: Any = HashStore()
        if rendezvous is not None:
            store = self._client = TorchStore(rendezvous.store, self._timeout)
            if self._name == "gloo" and 1 < context.world_size <= _MAX_MESHED:
                self._mesh = _mesh(context.world_rank, rendezvous.store.key)
        # Wait for all workers here: this wait can be interrupted, and its error names late ranks.
        address = None if self._mesh is None else self._mesh.address
        mesh_addresses = _all_gather(store, "here", context, address)
        before = listening_addresses()
        # The number of the group must be equal on all ranks, but PyTorch counts failed groups too.
        dist.distributed_c10d._world.group_count = 0
        rank, size = context.world_rank, context.world_size
        if self._name == "gloo":
            mesh = self._mesh if all(mesh_addresses) else None
            if mesh is not None:  # its errors name missing ranks
                mesh.connect(mesh_addresses)
            self._group = GlooGroup.init(store, rank, size, min(self._timeout, _CONNECT))
            self._group.mesh = mesh
        else:
            _init_nccl(rendezvous, rank, size, self._timeout)
        assert dist.group.WORLD is not None
        dist.group.WORLD.set_timeout(self._timeout)
        # gloo has connected now. Each connection of gloo has a listener of gloo at one end.
        opened = _all_gather(store, "listening", context, sorted(listening_addresses() - before))
        self._listening = {tuple(address) for of_rank in opened for address in of_rank}
        if driver_host != LOOPBACK:
            self._links_at = 0.0

    def interrupt(self) -> None:
        # The threads of gloo react only to their sockets, not to ``abort``.
        for tcp_socket in tcp_sockets():
            ends = {tcp_socket.local, tcp_socket.remote}
            if tcp_socket.remote is not None and not self._listening.isdisjoint(ends):
                tcp_socket.shut_down()
        for waiting in (self._client, self._mesh, self._group):
            if waiting is not None:
                waiting.interrupt()
        if self._name == "nccl" and dist.is_initialized():
            # The public `abort` of a group spares the groups of user code.
            dist.distributed_c10d._abort_process_group()

    def current_collective(self) -> int | None:
        group = self._group
        return None if group is None else group.current_collective()

    def link_speeds(self) -> Mapping[str, float]:
        now = time.monotonic()
        if now >= self._links_at + _LINKS_EVERY_S:
            self._links_at = now
            with contextlib.suppress(OSError):  # another thread closes the connections
                self._measure_links()
        return dict(self._links)

    def _measure_links(self) -> None:
        meshed = () if self._mesh is None else self._mesh.local_addresses()
        sent: dict[str, tuple[int, float]] = {}
        for each in tcp_sockets():
            ends = (each.local, each.remote)
            is_ours = each.local in meshed or not self._listening.isdisjoint(ends)
            if is_ours and each.remote is not None and each.remote[0] != each.local[0]:
                (num_bytes, seconds), before = each.count_sent(), sent.get(each.remote[0], (0, 0.0))
                sent[each.remote[0]] = before[0] + num_bytes, before[1] + seconds
        for host, (num_bytes, seconds) in sent.items():
            old_bytes, old_s = self._sent.get(host, (0, 0.0))
            if num_bytes - old_bytes >= _MIN_BYTES and seconds > old_s:
                self._links[host] = (num_bytes - old_bytes) / (seconds - old_s)
        self._sent = sent

    def teardown(self) -> None:
        if self._mesh is not None:
            self._mesh.close()
        if self._group is not None:
            self._group.release()
        self._leaving.close()
        self._reset()

    def is_communication_error(self, error: BaseException) -> bool:
        if not isinstance(error, RuntimeError) or isinstance(error, dist.DistError):
            return isinstance(error, dist.DistError)
        return any(sign in str(error) for sign in _SIGNS) and not is_raised_by_user(error)

    def advice_for(self, error: BaseException) -> str:
        if not isinstance(error, ValueError) or not any(sign in str(error) for sign in _STALE):
            return ""
        return (
            "This process group ended when workers were lost or joined. Call "
            "torch.distributed.new_group in the operator's on_world_change(self) instead of setup."
        )

    def close(self) -> None:
        super().close()
        self._tcp_store = None


def _all_gather(store: Any, purpose: str, context: WorkerContext, value: Any) -> list[Any]:
    """Publish a value, wait for the values of all workers, and return these by rank."""
    keys = [f"{purpose}/{rank}" for rank in range(context.world_size)]
    store.set(keys[context.world_rank], json.dumps(value))
    return [json.loads(text) for text in store.multi_get(keys)]


def _mesh(rank: int, key: str) -> PeerMesh | None:
    """Return a mesh on the interface that gloo uses. None if the interface has no IPv4 address."""
    chosen = os.environ["GLOO_SOCKET_IFNAME"].split(",")[0]
    for address, name in interfaces().items():
        if name == chosen:
            return PeerMesh(rank, address, derive_key(key, "mesh"), 3 * _CONNECT.total_seconds())
    return None


def _init_nccl(
    rendezvous: TorchRendezvous | None, rank: int, size: int, timeout: datetime.timedelta
) -> None:
    """Create the default group. Its gloo carries batch counts, Python objects, and CPU tensors."""
    store: Any = HashStore()
    if rendezvous is not None and (port := rendezvous.tcp_store_port) is not None:
        # The C++ threads of NCCL cannot use our Python client.
        store = TCPStore(rendezvous.store.host, port, is_master=False, timeout=_NCCL_CONNECT)
        # The ranks of NCCL wait for each other in the store during the first collective.
        store.set_timeout(timeout)
    # In PyTorch 2.15, "nccl" is another implementation, which connects here and not in its first
    # collective. Then `interrupt` could not end the wait for a lost worker.
    nccl = "nccl-legacy" if hasattr(dist, "ProcessGroupNCCL2") else "nccl"
    backends, connect_timeout = f"cpu:gloo,cuda:{nccl}", min(timeout, _CONNECT)
    dist.init_process_group(
        backends, store=store, rank=rank, world_size=size, timeout=connect_timeout
    )
