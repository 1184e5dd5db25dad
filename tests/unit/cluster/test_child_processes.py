"""What a process has forked ends when that process is killed, and closes its connections."""

import os
import socket
import subprocess
import sys

import pytest

PARENT = """
import os, socket, sys, time
from raysgd.cluster.child_processes import end_forks_with_this_process

connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
end_forks_with_this_process()
if os.fork() == 0:
    connection.sendall(b"x")
    time.sleep(60)
time.sleep(60)
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="not on this system")
def test_forks_end_with_a_killed_process():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        port = str(server.getsockname()[1])
        parent = subprocess.Popen([sys.executable, "-c", PARENT, port])
        connection, _ = server.accept()
    with connection:
        connection.settimeout(30)
        assert connection.recv(1) == b"x"
        parent.kill()
        parent.wait()
        assert connection.recv(1) == b""
