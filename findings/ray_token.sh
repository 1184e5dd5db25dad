#!/usr/bin/env bash
# Ray: a driver that names the address of its cluster does not send its own token.
#
# Versions: ray 2.60.0
# Expected: A driver reads the token file of its home, whether it finds the cluster or names it.
# Seen: `ray start --head` requires a token if its home has a token file. A driver of the same user
#   connects without an address. With the address, in the call or in RAY_ADDRESS, it fails after 20
#   s, with a message that names no token. RAY_AUTH_MODE=token lets it in.
# Output:
#   no address: connected
#   address: ConnectionError: Failed to connect to Ray cluster
#   address in RAY_ADDRESS: ConnectionError: Failed to connect to Ray cluster
#   address, RAY_AUTH_MODE=token: connected
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=('ray[client]==2.60.0')
if command -v uv > /dev/null; then
    uv venv --quiet --python 3.11 venv
    timeout 1800 uv pip install --quiet --python venv "${packages[@]}"
else
    "${PYTHON:-python3}" -m venv venv
    timeout 1800 venv/bin/python -m pip install --quiet --no-compile "${packages[@]}"
fi
export HOME=$folder RAY_TMPDIR=$folder
unset RAY_ADDRESS
export PYTHONWARNINGS=ignore RAY_USAGE_STATS_ENABLED=0
cat > check.py <<'PYTHON'
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
    os.environ.pop(name, None)
RAY = str(Path(sys.executable).with_name("ray"))
CONNECT = "import ray, sys; ray.init(*sys.argv[1:], logging_level='ERROR'); print('connected')"


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def connect(*address, **variables):
    done = subprocess.run(
        [sys.executable, "-c", CONNECT, *address],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    return [*done.stdout.splitlines(), *done.stderr.splitlines(), "no output"]


subprocess.run([RAY, "get-auth-token", "--generate"], check=True, capture_output=True)
address = f"127.0.0.1:{free_port()}"
options = [f"--port={address.partition(':')[2]}", f"--ray-client-server-port={free_port()}"]
command = [RAY, "start", "--head", "--block", "--include-dashboard=false", "--num-cpus=1", *options]
seen = {}
with open("head.log", "w") as log:
    head = subprocess.Popen(command, stdout=log, stderr=log)
try:
    for _ in range(120):
        if "Ray runtime started" in Path("head.log").read_text():
            break
        time.sleep(0.5)
    seen["no address"] = connect("auto")
    seen["address"] = connect(address)
    seen["address in RAY_ADDRESS"] = connect(RAY_ADDRESS=address)
    seen["address, RAY_AUTH_MODE=token"] = connect(address, RAY_AUTH_MODE="token")
finally:
    head.send_signal(signal.SIGTERM)  # stops the processes of this cluster only
    head.wait(60)
connected = {case: lines[0] == "connected" for case, lines in seen.items()}
for case, lines in seen.items():
    error = next((line for line in lines if line.startswith("ConnectionError")), "another error")
    print(f"{case}: {lines[0] if connected[case] else error.split(' at ')[0]}")
if list(connected.values()) != [True, False, False, True]:
    sys.exit("The behavior has changed.")
PYTHON
timeout 300 venv/bin/python check.py
