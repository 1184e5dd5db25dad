"""Clusters that other processes have started."""

import os
import subprocess
import sys

import pytest

HEAD = """
import sys, ray
ray.init("local", num_cpus=1, include_dashboard=False)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""
DRIVER = """
from raysgd.cluster import ray_session
ray_session.connect()
"""


@pytest.mark.slow("starts a cluster and a driver")
def test_the_error_of_a_cluster_with_a_token_names_what_lets_a_driver_in():
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "secret",
    }

    def run(script, environment, **streams):
        command = [sys.executable, "-c", script]
        return subprocess.Popen(command, env=environment, text=True, stdout=-1, **streams)

    with run(HEAD, environment, stdin=-1) as head:
        environment["RAY_ADDRESS"] = head.stdout.readline().strip()
        lacking = {k: v for k, v in environment.items() if not k.startswith("RAY_AUTH_")}
        with run(DRIVER, lacking, stderr=-1) as driver:
            _, error = driver.communicate(timeout=60)
        head.stdin.close()
    assert "RAY_AUTH_MODE=token here, and RAY_AUTH_TOKEN to the output" in error
