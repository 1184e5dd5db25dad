"""The connection of this process to a Ray cluster, and the cluster's resources."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import time
from collections.abc import Iterator

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

logger = logging.getLogger(__name__)

_PROBE_S = 5.0
_OF_EACH = ("node:", "ray.io/node-id=", "memory", "object_store_memory")
"""Prefixes of the resources and labels that every node has."""
_SPEED_TEST_S = 1.0
_SPEED_TIMEOUT_S = 60.0


def connect() -> None:
    """Connect to Ray. Start it on this machine if there is no cluster."""
    if not ray.is_initialized():
        ray.init()


def _probe(address: str) -> None:
    """Raise OSError if the port of `address` refuses a connection."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    if host and port.isdecimal():
        with socket.create_connection((host, int(port)), timeout=_PROBE_S):
            pass


def overview(address: str) -> dict[str, tuple[float, float]]:
    """Return the total and the free amount of each resource of a cluster."""
    with _connected(address):
        total, free = ray.cluster_resources(), ray.available_resources()
        return {
            name: (total[name], free.get(name, 0.0))
            for name in sorted(total)
            if not name.startswith("node:")
        }


@contextlib.contextmanager
def _connected(address: str) -> Iterator[None]:
    _probe(address)  # Ray itself would retry for minutes
    ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
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


def nodes() -> set[str]:
    """Return the IDs of the live nodes."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def node_speeds(address: str) -> list[tuple[str, float, set[str]]]:
    """Return the IP address, speed, and traits of each live node of a cluster that has CPUs.

    The speed is the number of matrix products per second, on a GPU if the node has one. Raise
    GetTimeoutError of Ray if a node has no free CPU or GPU.
    """
    with _connected(address):
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
    found = {}
    for node in ray.nodes():
        if node["Alive"]:
            types = [name.removeprefix("accelerator_type:") for name in node["Resources"]]
            labels = [f"{name}={value}" for name, value in node.get("Labels", {}).items()]
            found[node["NodeID"]] = {n for n in (*types, *labels) if not n.startswith(_OF_EACH)}
    return found


def is_own_cluster() -> bool:
    """Return whether this process started the cluster. Such a cluster does not grow."""
    with contextlib.suppress(psutil.NoSuchProcess):  # the process may end at this moment
        return any(child.name() == "gcs_server" for child in psutil.Process().children())
    return False
