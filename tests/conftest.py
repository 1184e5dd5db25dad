"""One Ray cluster for all tests that need one, and a check that none of them leaves a thing."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

NUM_CPUS = 4
RAY_DATAS_OWN = ("AutoscalingCoordinatorActor", "StatsActor")
"""Actors that Ray Data keeps as long as the cluster lives; they take no CPU."""


SOON_S = 2.0
"""Within how many seconds a failure has to reach the caller, or a death the driver."""


def wait_until(condition, timeout_s=20.0):
    """Wait for a condition, which is what tests wait for, never for a time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {condition}"
        time.sleep(0.02)


def own_memory():
    """Return how many bytes this process has allocated, in memory or in swap.

    What else is resident are pages of files, libraries above all. The system takes those back and
    reads them in again as it likes, by hundreds of megabytes.
    """
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return sum(1024 * int(fields[name].split()[0]) for name in ("RssAnon", "VmSwap"))


def free_ports(count):
    """Return ports of this machine on which nobody listens."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in held]


def run_ranks(script, size, *ports):
    """Run a script as each rank of a group, given its rank and `ports`; each must print "good"."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), *map(str, ports)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(size)
    ]
    try:
        assert [rank.communicate(timeout=90)[0] for rank in ranks] == ["good\n"] * size
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def restart_when_created(monkeypatch, supervisor, group):
    """Let workers start anew when a placement group has its room, and not ask at the same time.

    Which of the two Ray would serve is open, and Ray may lose the room of a request that is taken
    back while it is being served.
    """
    start = supervisor._start

    def start_later(*arguments):
        monkeypatch.setattr(supervisor, "_start", start)  # once: the test gives the room back
        assert group.wait(timeout_seconds=60)
        start(*arguments)

    monkeypatch.setattr(supervisor, "_start", start_later)


@pytest.fixture(autouse=True)
def sigint():
    """Ray Tune leaves a handler behind that swallows the next Ctrl-C."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture(scope="session")
def cluster():
    """A local Ray with four CPUs, of which two workers or four take all."""
    import ray

    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init("local", num_cpus=NUM_CPUS, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


def alive_actors():
    """The actors of the cluster that live, but for those that Ray Data keeps."""
    from ray._private.state import actors

    return [
        a
        for a in actors().values()
        if a["State"] != "DEAD" and a["ActorClassName"].lstrip("_") not in RAY_DATAS_OWN
    ]


def _leftovers():
    from ray.util import placement_group_table

    groups = [g for g in placement_group_table().values() if g["state"] != "REMOVED"]
    return alive_actors() + groups


@pytest.fixture
def ray_cluster(cluster):
    """The shared cluster; the test fails if it leaves an actor, a placement group or a CPU."""
    children = {p.pid for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE}
    yield cluster
    wait_until(lambda: not _leftovers())
    wait_until(lambda: cluster.available_resources().get("CPU", 0) == NUM_CPUS)
    left = {p.pid for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE}
    assert left <= children


def pytest_configure():
    """Take SIGINT, here and in child processes: shells ignore it in what runs in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
