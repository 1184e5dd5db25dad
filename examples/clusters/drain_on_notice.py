"""Drain this Ray node when the cloud announces that it will take back the machine.

    python drain_on_notice.py aws    # or gcp

Run one copy on each spot machine, after ``ray start``. It needs no packages.
"""

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

EVERY_S = 2.0
URL = {"aws": "http://169.254.169.254", "gcp": "http://metadata.google.internal"}
DEADLINE_S = {"aws": 110, "gcp": 25}
"""Seconds that a machine has left after its notice, minus a margin."""


def read(path: str, method: str = "GET", **headers: str) -> str:
    """Return an entry of the metadata service, or "" if there is none."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(BASE + path, headers=named, method=method)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return ""
        raise


def is_announced() -> bool:
    if CLOUD == "gcp":
        path = "/computeMetadata/v1/instance/preempted"
        return read(path, Metadata_Flavor="Google") == "TRUE"
    token = read("/latest/api/token", "PUT", X_aws_ec2_metadata_token_ttl_seconds="60")
    path = "/latest/meta-data/spot/instance-action"
    return read(path, X_aws_ec2_metadata_token=token) != ""


CLOUD = sys.argv[1]
BASE = os.environ.get("METADATA_URL", URL[CLOUD])
while True:
    try:
        if is_announced():
            break
    except OSError as error:
        print(f"No answer from {BASE}: {error}", flush=True)
    time.sleep(EVERY_S)
drain = [
    *("ray", "drain-node", "--reason", "DRAIN_NODE_REASON_PREEMPTION"),
    *("--reason-message", f"{CLOUD} takes back this machine"),
    *("--deadline-remaining-seconds", str(DEADLINE_S[CLOUD])),
]
sys.exit(subprocess.run(drain, check=False).returncode)
