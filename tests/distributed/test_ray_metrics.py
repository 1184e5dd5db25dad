"""The gauges of raysgd in the metrics that Ray exports for Prometheus."""

import importlib.util
import subprocess
import sys

import pytest

EXPORT = """
import socket, urllib.request
import ray
from raysgd.cluster.ray_metrics import export
from tests.conftest import wait_until

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
ray.init("local", num_cpus=1, include_dashboard=False, _metrics_export_port=port)
export("raysgd_phase_seconds", "Mean seconds", ("rank", "phase"), [(0.5, 1, "data")])

def exported():
    try:
        answer = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)
    except OSError:  # not started yet
        return []
    lines = answer.read().decode().splitlines()
    return [line for line in lines if line.startswith("ray_raysgd_phase_seconds{")]

wait_until(exported, 60)
print(*exported())
"""


@pytest.mark.skipif(importlib.util.find_spec("aiohttp_cors") is None, reason='needs "ray[default]"')
@pytest.mark.slow("starts Ray, which collects metrics every few seconds")
def test_ray_exports_the_gauges():
    command = [sys.executable, "-c", EXPORT]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    line = run.stdout.splitlines()[-1]
    assert 'phase="data"' in line
    assert 'rank="1"' in line
    assert line.endswith(" 0.5")
