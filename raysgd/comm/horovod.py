"""Horovod over gloo: rendezvous server on the driver, environment variables on the workers."""

import functools
import importlib
import importlib.util
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from raysgd._internal.runner import WorkerContext
from raysgd._internal.tracebacks import is_raised_by_user
from raysgd.comm.backend import CollectiveBackend
from raysgd.comm.network import LOOPBACK, driver_address, interface_of, tcp_sockets, worker_address

_CONNECT_S = 30  # timeout of connecting to workers that are all present
_POLL_S = 0.05  # longest delay until the rendezvous server stops
_SIGNS = ("Horovod has been shut down", "HorovodInternalError", "gloo", "Gloo", "Horovod has not")

_ALONE: Mapping[str, Any] = {
    "hostname": LOOPBACK,
    **dict.fromkeys(("rank", "local_rank", "cross_rank"), 0),
    **dict.fromkeys(("size", "local_size", "cross_size"), 1),
}
_Connection = tuple[tuple[str, int], tuple[str, int]]  # local and remote end of a TCP connection


class HorovodRendezvous(NamedTuple):
    """Address of one generation's rendezvous server, and the ranks as Horovod counts them."""

    host: str
    port: int
    slots: Sequence[Mapping[str, Any]]


class HorovodBackend(CollectiveBackend):
    """One Horovod group per generation.

    Horovod reads its rank from the environment each time it initializes. `timeout_s` is for joining
    a group; Horovod has no timeout for collectives. Without a `framework`, `setup` only sets the
    environment, and further `variables`, for functions that call ``hvd.init()`` themselves.
    """

    def __init__(
        self,
        name: str,
        timeout_s: float,
        framework: Literal["torch", "tensorflow"] | None = "torch",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        check_horovod()
        # TensorFlow cannot reconfigure its collectives, and the groups of a function are unknown.
        self.process_can_rejoin = framework == "torch"
        self._variables = dict(variables or {})
        self._timeout_s = timeout_s
        self._framework = framework
        self._own_connections: set[_Connection] = set()
        self._env: dict[str, str] = {}

    def create_rendezvous(self, addresses: Sequence[str]) -> HorovodRendezvous:
        from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

        self.close()
        host = driver_address(addresses)
        # Horovod's RendezvousServer would listen on all interfaces.
        server = self._server = RendezvousHTTPServer((host, 0), RendezvousHandler, 0)
        server.socket.listen(1024)  # the default backlog is five
        server.daemon_threads = True  # a silent client does not block shutdown
        # The ranks are in the order of hosts.
        hosts = [HostInfo(address, number) for address, number in Counter(addresses).items()]
        slots = get_host_assignments(hosts, len(addresses))
        server.init(slots)
        serve = functools.partial(server.serve_forever, poll_interval=_POLL_S)
        threading.Thread(target=serve, name="raysgd-horovod", daemon=True).start()
        return HorovodRendezvous(host, server.server_port, [vars(slot) for slot in slots])

    def setup(self, context: WorkerContext, rendezvous: HorovodRendezvous | None) -> None:
        check_horovod()
        self._env = horovod_environment(context, rendezvous, self._timeout_s) | self._variables
        os.environ.update(self._env)
        if rendezvous is None:
            for name in ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"):
                os.environ.pop(name, None)
        if self._framework is None:
            return
        hvd = self._horovod()
        before = _connections()
        hvd.init()
        if hvd.size() > 1:
            # gloo has closed its listeners, so its connections are the ones between two workers.
            opened = hvd.allgather_object(_connections() - before)
            self._own_connections = {
                (local, remote) for each in opened for remote, local in each
            } & _connections()

    def release_rendezvous(self) -> None:
        """Stop the rendezvous server, unless functions can still call ``hvd.init()``."""
        if self._framework is not None:
            self.close()

    def _horovod(self) -> Any:
        return importlib.import_module(f"horovod.{self._framework}")

    def interrupt(self) -> None:
        for tcp_socket in tcp_sockets():
            if (tcp_socket.local, tcp_socket.remote) in self._own_connections:
                tcp_socket.shut_down()

    def teardown(self) -> None:
        self._own_connections = set()
        if self._env and self._framework is not None:
            self._horovod().shutdown()
        for name, value in self._env.items():
            if os.environ.get(name) == value:
                del os.environ[name]
        self._env = {}

    def is_communication_error(self, error: BaseException) -> bool:
        from horovod.common.exceptions import HorovodInternalError

        if isinstance(error, HorovodInternalError):
            return True
        raised = isinstance(error, RuntimeError | ValueError) or "tensorflow" in str(type(error))
        has_sign = raised and any(sign in str(error) for sign in _SIGNS)
        return has_sign and not is_raised_by_user(error)

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()


def check_horovod() -> None:
    if importlib.util.find_spec("horovod") is None:
        raise ImportError(
            'backend="horovod" needs Horovod, which is not installed. Run '
            'pip install "raysgd[horovod]". docs/horovod.md has two small edits that its last '
            "release needs for current PyTorch and TensorFlow."
        )


def check_dtypes(names: Sequence[str]) -> None:
    """Raise TypeError if Horovod cannot average tensors of one of these dtypes."""
    if any(name.endswith("bfloat16") for name in names):
        raise TypeError(
            'backend="horovod": a parameter, gradient, or buffer is bfloat16, but Horovod averages '
            'no bfloat16. Use float16 or float32, or backend="gloo". Mixed precision with '
            "bfloat16 works, because parameters stay float32."
        )


def horovod_environment(
    context: WorkerContext, rendezvous: HorovodRendezvous | None, timeout_s: float
) -> dict[str, str]:
    """Return the environment variables that define a worker's rank in its Horovod group."""
    variables = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(int(max(1, min(timeout_s, _CONNECT_S)))),
    }
    if rendezvous is None:
        slot = _ALONE
    else:
        slot = rendezvous.slots[context.world_rank]
        variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = rendezvous.host
        variables["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(rendezvous.port)
        variables["HOROVOD_GLOO_IFACE"] = interface_of(
            worker_address(rendezvous.host, context.node_ip)
        )
    return variables | {f"HOROVOD_{name.upper()}": str(slot[name]) for name in slot}


def _connections() -> set[_Connection]:
    return {(each.local, each.remote) for each in tcp_sockets() if each.remote is not None}
