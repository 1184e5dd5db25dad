"""The connection of this process to a Ray cluster, and the cluster's resources."""

import contextlib
import logging
import math
import os
import re
import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import ray
from ray._private import services  # Ray 2.60 has no public API for this
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

logger = logging.getLogger(__name__)

_CONNECT_S = 5.0
_HEAD_ANSWER_S = 15.0  # seconds that the Ray head node may take to answer
_ADDRESS = re.compile(r"\w+://\S+|[^\s/]+:\d+")
_ADVICE = "Start the cluster or correct the address. RAY_ADDRESS=local starts Ray here."
_TOKEN_ADVICE = (
    "If the cluster uses tokens, set RAY_AUTH_MODE=token here, and RAY_AUTH_TOKEN to the output of "
    "`ray get-auth-token` on the head node."
)
_ON_EVERY_NODE = ("node:", "ray.io/node-id=", "memory", "object_store_memory")
"""Prefixes of the resources and labels that every node has."""
_WITH_ANOTHER_PYTHON = {"py_executable", "pip", "conda", "uv", "image_uri", "container"}
_SPEED_TEST_S = 1.0
_SPEED_TIMEOUT_S = 60.0


def connect() -> None:
    """Connect to Ray. Start it on this machine if there is no cluster.

    Raise ConnectionError within 31 s if the cluster does not answer.
    """
    if not ray.is_initialized():
        _init(None)


def _init(address: str | None, **options: Any) -> None:
    """Call ``ray.init`` if the cluster answers, because Ray itself retries for minutes."""
    variable = os.environ.get("RAY_ADDRESS")
    if address in (None, "auto"):
        address = variable or address
    origin = repr(address) if address else "the newest cluster of this machine"
    if address and address == variable:
        origin = f"RAY_ADDRESS={address}"
    if address not in (None, "auto", "local") and not _ADDRESS.fullmatch(address):
        raise ValueError(
            f'{origin}: must be "HOST:PORT", "ray://HOST:PORT", "auto", or "local", without spaces.'
        )
    advice = _ADVICE
    try:
        target = address
        if address is None or "://" not in address:
            target = services.canonicalize_bootstrap_address(address)  # type: ignore[arg-type]
            if target not in (None, address):
                origin += f", which is {target}"
        if target is not None:
            _check_listening(target)
            if "://" not in target:
                _load_token(address)
                _check_head(target)
        advice = _TOKEN_ADVICE
        ray.init(address, **options)
    except (OSError, RayError) as error:
        if target is None:  # Ray could not start here
            raise
        if "token" in str(error):
            advice = _TOKEN_ADVICE
        reason = getattr(error, "message", None) or str(error)
        raise ConnectionError(
            f"No answer from a Ray cluster at {origin}: {reason.rstrip('.')}. {advice}"
        ) from error


def check_runtime_env(*keys: str) -> None:
    """Raise RuntimeError if no worker can start with the ``runtime_env`` of the job and `keys`.

    Ray 2.60 passes the path of Python to a shell without quotes, and retries without end.
    """
    if not ray.is_initialized() or ray.util.client.ray.is_connected():
        return
    used = {*ray.get_runtime_context().runtime_env, *keys}
    python, plain = sys.executable, re.fullmatch(r"[\w@%+=:,./-]+", sys.executable)
    if used and not plain and not used & _WITH_ANOTHER_PYTHON:
        raise RuntimeError(
            f"Ray cannot start workers with a runtime_env ({', '.join(sorted(used))}), because the "
            f"path of Python has a space or a quote: {python}. Use an environment in another "
            f"folder, or ray.init(runtime_env={{'py_executable': {shlex.quote(python)!r}}})."
        )


def _check_listening(address: str) -> None:
    """Raise OSError if no server listens at `address`."""
    scheme, _, location = address.rpartition("://")
    host, _, port = location.rpartition(":")
    if scheme in ("", "ray") and host and port.isdecimal():
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S):
            pass


def _load_token(address: str | None) -> None:
    """Load the token as ``ray.init`` does. Without this, `GcsClient` would end the process."""
    try:
        from ray._private.authentication import authentication_token_setup as setup
    except ImportError:  # this Ray has no tokens
        return
    if address in (None, "auto") and hasattr(setup, "maybe_enable_token_auth_if_token_available"):
        setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    setup.ensure_token_if_auth_enabled(None, create_token_if_missing=False)


def _check_head(address: str) -> None:
    """Raise an error if the server at `address` does not answer as the head of a Ray cluster."""
    errors = []

    def ask() -> None:
        try:
            GcsClient(address=address)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_HEAD_ANSWER_S)
    if thread.is_alive():
        raise TimeoutError(f"the server does not answer within {_HEAD_ANSWER_S:g} s")
    if errors:
        raise errors[0]


def resources(address: str) -> dict[str, tuple[float, float]]:
    """Return the total and the free amount of each resource of a cluster."""
    with _connecting(address):
        total, free = ray.cluster_resources(), ray.available_resources()
        return {
            name: (total[name], free.get(name, 0.0))
            for name in sorted(total)
            if not name.startswith("node:")
        }


@contextlib.contextmanager
def _connecting(address: str) -> Iterator[None]:
    _init(address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def free_cpus() -> float:
    """Return the free CPUs of the cluster. Infinity without a cluster."""
    if not ray.is_initialized():
        return math.inf
    return float(ray.available_resources().get("CPU", 0))


def gpus_in_cluster() -> float:
    return float(ray.cluster_resources().get("GPU", 0))


def node_speeds(address: str) -> list[tuple[str, float, set[str]]]:
    """Return the IP address, speed, and traits of each live node of a cluster that has CPUs.

    The speed is the number of matrix products per second, on a GPU if the node has one. Raise
    GetTimeoutError of Ray if a node has no free CPU or GPU.
    """
    with _connecting(address):
        traits = node_traits()
        # Skip nodes without CPUs, often head nodes, because they get no workers.
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        references = []
        for node in nodes:
            at = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            num_gpus = min(1, node["Resources"].get("GPU", 0))
            task = ray.remote(_products_per_s).options(scheduling_strategy=at, num_gpus=num_gpus)
            references.append(task.remote())
        speeds = ray.get(references, timeout=_SPEED_TIMEOUT_S)
    return [
        (node["NodeManagerAddress"], speed, traits[node["NodeID"]])
        for node, speed in zip(nodes, speeds, strict=True)
    ]


def _products_per_s() -> float:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    matrix = torch.randn(512, 512, device=device)
    for _ in range(3):  # the first products are slower
        float((matrix @ matrix).sum())
    began, number = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < _SPEED_TEST_S:
        float((matrix @ matrix).sum())  # waits for the result
        number += 1
    return number / elapsed


def node_traits() -> dict[str, set[str]]:
    """Return the labels, accelerator types, and resources of the live nodes, by node ID."""
    traits = {}
    for node in ray.nodes():
        if node["Alive"]:
            types = [name.removeprefix("accelerator_type:") for name in node["Resources"]]
            labels = [f"{name}={value}" for name, value in node.get("Labels", {}).items()]
            traits[node["NodeID"]] = {
                n for n in (*types, *labels) if not n.startswith(_ON_EVERY_NODE)
            }
    return traits


def is_own_cluster() -> bool:
    """Return whether this process started the cluster. Such a cluster does not grow."""
    with contextlib.suppress(psutil.NoSuchProcess):  # the process may end at this moment
        return any(child.name() == "gcs_server" for child in psutil.Process().children())
    return False
