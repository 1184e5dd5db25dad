"""TensorFlow collectives: the environment of ``MultiWorkerMirroredStrategy``."""

import importlib.util
import json
import logging
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

from raysgd._internal.imports import refuse_triton
from raysgd._internal.runner import WorkerContext
from raysgd.comm.backend import CollectiveBackend
from raysgd.comm.connection import Address
from raysgd.comm.network import driver_address, worker_address
from raysgd.comm.rendezvous import StoreClient, StoreServer

logger = logging.getLogger(__name__)

_CHOICES = ("TF_USE_LEGACY_KERAS", "KERAS_BACKEND")
_LOST = ("AbortedError", "CancelledError", "DeadlineExceededError", "UnavailableError")
_SIGNS = ("Collective", "collective", "peer", "Connection reset", "connect to remote")


class TensorflowBackend(CollectiveBackend):
    """Sets ``TF_CONFIG``, which defines the group for ``MultiWorkerMirroredStrategy``.

    A process can join only one group, because TensorFlow configures its collectives once.
    """

    process_can_rejoin = False

    def __init__(self, name: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # The driver runs this, so its choice of Keras applies to all workers.
        self._environment = keras_environment()
        self._has_warned = False
        self._reserved_port: socket.socket | None = None

    def create_rendezvous(self, addresses: Sequence[str]) -> Address:
        """Return the address of the store where the workers exchange their addresses."""
        if not self._has_warned and len(addresses) > 1:
            self._has_warned = True
            logger.warning(
                "MultiWorkerMirroredStrategy starts a TensorFlow server in each worker, on all "
                "interfaces. Anyone who reaches it can read and write files as the worker. Protect "
                "it with a firewall."
            )
        self.close()
        server = self._server = StoreServer(driver_address(addresses))
        return server.address

    def setup(self, context: WorkerContext, rendezvous: Address | None) -> None:
        """Set the variables that TensorFlow reads on import and when it creates the strategy."""
        check_tensorflow("backend='tensorflow'")
        refuse_triton()
        if "tensorflow" in sys.modules:
            raise RuntimeError(
                "TensorFlow was imported on this worker before TF_CONFIG was set. Import it in the "
                "training function, not in initialization_hook."
            )
        if rendezvous is None:
            raise RuntimeError("A TensorFlow worker cannot set up alone and join a group later.")
        os.environ.update(self._environment)
        for name in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
            if name not in os.environ:
                os.environ[name] = str(max(1, int(context.num_cpus)))
        host = worker_address(rendezvous.host, context.node_ip)
        self._reserved_port = _reserve_port()
        address = f"{host}:{self._reserved_port.getsockname()[1]}"
        store = StoreClient(rendezvous)
        store.request("set", str(context.world_rank), address)
        workers = store.get([*map(str, range(context.world_size))], self._timeout_s)
        os.environ["TF_CONFIG"] = json.dumps(
            {
                "cluster": {"worker": workers},
                "task": {"type": "worker", "index": context.world_rank},
            }
        )

    def interrupt(self) -> None:
        if "tensorflow.python.eager.context" not in sys.modules:
            return
        from tensorflow.python.eager.context import context  # no public API ends collectives

        # Without collectives between workers, aborting would wait for an executor.
        if context()._collective_ops_server_def is not None:
            from tensorflow.errors import UNAVAILABLE

            context().abort_collective_ops(UNAVAILABLE, "Collective interrupted by the driver.")

    def teardown(self) -> None:
        os.environ.pop("TF_CONFIG", None)
        port, self._reserved_port = self._reserved_port, None
        if port is not None:
            port.close()

    def is_communication_error(self, error: BaseException) -> bool:
        """Return whether TensorFlow raised `error` because it lost another worker."""
        if isinstance(error, ConnectionError):
            return True
        if "tensorflow" not in sys.modules:
            return False
        from tensorflow import errors

        if not isinstance(error, errors.OpError):
            return False
        return type(error).__name__ in _LOST or any(sign in str(error) for sign in _SIGNS)

    def advice_for(self, error: BaseException) -> str:
        text = "Keras 3 cannot fit with this strategy. Install tf_keras, and set "
        is_known = isinstance(error, ValueError) and "PerReplica" in str(error)
        return text + "TF_USE_LEGACY_KERAS=1 before the script starts." if is_known else ""


def _reserve_port() -> socket.socket:
    """Return a socket that reserves a free port for TensorFlow's server.

    TensorFlow listens seconds later, on all addresses. Linux lets TensorFlow use the port because
    both sockets set SO_REUSEADDR and this socket does not listen.
    """
    port = socket.socket()
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port.bind(("0.0.0.0", 0))
    return port


def check_tensorflow(asked_by: str) -> None:
    if "tensorflow" not in sys.modules and importlib.util.find_spec("tensorflow") is None:
        raise ImportError(
            f"{asked_by} needs TensorFlow, which is not installed. Run "
            'pip install "raysgd[tensorflow]".'
        )


def keras_environment() -> dict[str, Any]:
    """Return the environment variables that choose the Keras of this process."""
    chosen = {name: os.environ[name] for name in _CHOICES if name in os.environ}
    if (framework := chosen.get("KERAS_BACKEND", "tensorflow")) != "tensorflow":
        raise ValueError(
            f"KERAS_BACKEND={framework!r}: raysgd trains Keras models with TensorFlow. Unset it, "
            "or set it to 'tensorflow'."
        )
    return chosen
