"""TensorFlow's own collectives: the environment of ``MultiWorkerMirroredStrategy``."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raysgd._internal.context import WorkerContext
from raysgd.comm.backend import Backend
from raysgd.comm.connection import Address
from raysgd.comm.network import LOOPBACK, driver_address, is_single_node
from raysgd.comm.rendezvous import StoreClient, StoreServer

__all__ = [
    "TensorflowBackend",
    "TensorflowRendezvous",
    "check_tensorflow",
    "keras_environment",
]

logger = logging.getLogger(__name__)

_CHOICES = ("TF_USE_LEGACY_KERAS", "KERAS_BACKEND")
_LOST = ("AbortedError", "CancelledError", "DeadlineExceededError", "UnavailableError")
_SIGNS = ("Collective", "collective", "peer", "Connection reset", "connect to remote")


@dataclass(frozen=True)
class TensorflowRendezvous:
    """Where the workers of one generation tell each other their addresses."""

    store: Address
    single_node: bool


class TensorflowBackend(Backend):
    """Sets ``TF_CONFIG``, from which ``MultiWorkerMirroredStrategy`` knows the group.

    The strategy itself is made by whoever trains, after `setup`. A process that was in one group
    cannot be in another: TensorFlow's collectives are configured once.
    """

    rejoins = False

    def __init__(self, name: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # on the driver: the choice of Keras that its script was started with holds on all workers
        self._environment = keras_environment()
        self._has_warned = False
        self._server: StoreServer | None = None
        self._held: socket.socket | None = None

    def prepare(self, addresses: Sequence[str]) -> TensorflowRendezvous:
        """Listen for the workers of a new generation."""
        if not self._has_warned and len(addresses) > 1:
            self._has_warned = True
            logger.warning(
                "A MultiWorkerMirroredStrategy starts a server of TensorFlow's in each worker, on "
                "all interfaces, by which whoever reaches it can read and write files as the "
                "worker: keep strangers away by a firewall."
            )
            if self._environment.get("TF_USE_LEGACY_KERAS", "0").lower() not in ("1", "true"):
                logger.warning(
                    "fit() of Keras 3 fails under such a strategy, by a ValueError that names "
                    "PerReplica. Set TF_USE_LEGACY_KERAS=1 in the environment of the driver, for "
                    "fit() of tf_keras, or take your own steps by strategy.run()."
                )
        self.close()
        self._server = StoreServer(driver_address(addresses))
        return TensorflowRendezvous(self._server.address, is_single_node(addresses))

    def setup(self, context: WorkerContext, rendezvous: TensorflowRendezvous | None) -> None:
        """Set the environment that TensorFlow reads when it is imported and the strategy made.

        Raises:
            ImportError: if TensorFlow is not installed.
            RuntimeError: if it is imported already, or `rendezvous` is None.
        """
        check_tensorflow("backend='tensorflow'")
        if "tensorflow" in sys.modules:
            raise RuntimeError(
                "TensorFlow was imported on this worker before TF_CONFIG was set, and it "
                "configures its collectives and its Keras once. Do not import it in "
                "initialization_hook; set what it reads in os.environ there, and import it in the "
                "training function."
            )
        if rendezvous is None:
            raise RuntimeError("A TensorFlow worker cannot set up alone and join a group later.")
        os.environ.update(self._environment)
        host = LOOPBACK if rendezvous.single_node else context.node_ip
        self._held = _held_port()
        address = f"{host}:{self._held.getsockname()[1]}"
        store = StoreClient(rendezvous.store)
        store.set([str(context.world_rank)], [address])
        ranks = [str(rank) for rank in range(context.world_size)]
        workers = store.get(ranks, self._timeout_s)
        os.environ["TF_CONFIG"] = json.dumps(
            {
                "cluster": {"worker": workers},
                "task": {"type": "worker", "index": context.world_rank},
            }
        )

    def interrupt(self) -> None:
        """Make collectives fail, those under way and all later ones."""
        if "tensorflow.python.eager.context" not in sys.modules:
            return
        from tensorflow.python.eager.context import context
        from tensorflow.python.framework import errors_impl

        # waits for an executor where no strategy of several workers was made, nor is being made
        if context()._collective_ops_server_def is not None:
            context().abort_collective_ops(
                errors_impl.UNAVAILABLE, "Collective interrupted by the driver."
            )

    def teardown(self) -> None:
        """Remove ``TF_CONFIG``; the process cannot join another group."""
        os.environ.pop("TF_CONFIG", None)
        held, self._held = self._held, None
        if held is not None:
            held.close()

    def is_communication_error(self, error: BaseException) -> bool:
        """Whether TensorFlow raised `error` because it lost another worker."""
        if isinstance(error, ConnectionError):
            return True
        if "tensorflow" not in sys.modules:
            return False
        from tensorflow import errors

        if not isinstance(error, errors.OpError):
            return False
        return type(error).__name__ in _LOST or any(sign in str(error) for sign in _SIGNS)

    def close(self) -> None:
        """Stop listening."""
        server, self._server = self._server, None
        if server is not None:
            server.close()


def _held_port() -> socket.socket:
    """Return a socket on a free port, on which TensorFlow's server can listen and no other gets.

    It is bound to all addresses, as TensorFlow's will be: one of them might be taken.
    TensorFlow listens when it makes the strategy, seconds after all know the address. Linux gives
    a port that is bound to nobody who asks for any free one, and lets a second socket listen on it
    where both allow that (SO_REUSEADDR, as gRPC's servers do) and the first does not listen.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("0.0.0.0", 0))
    return held


def check_tensorflow(asked_by: str) -> None:
    """Check that TensorFlow can be imported, without importing it.

    Raises:
        ImportError: if it is not installed.
    """
    if "tensorflow" not in sys.modules and importlib.util.find_spec("tensorflow") is None:
        raise ImportError(
            f'{asked_by} needs TensorFlow, which is not installed: pip install "raysgd[tensorflow]"'
        )


def keras_environment() -> dict[str, Any]:
    """Return the environment variables by which this process chooses its Keras.

    Raises:
        ValueError: if Keras is to work on another framework than TensorFlow.
    """
    chosen = {name: os.environ[name] for name in _CHOICES if name in os.environ}
    if (framework := chosen.get("KERAS_BACKEND", "tensorflow")) != "tensorflow":
        raise ValueError(
            f"KERAS_BACKEND={framework!r}: raysgd trains Keras models with TensorFlow. Unset it, "
            "or set it to 'tensorflow'."
        )
    return chosen
