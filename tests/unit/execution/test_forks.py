"""What a process has forked ends when that one is killed, and lets go of its connections."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from raysgd.execution.forks import end_forks_with_this_process

PARENT = """
import os, socket, sys, time
from raysgd.execution.forks import end_forks_with_this_process

connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
if sys.argv[2] == "ends":
    end_forks_with_this_process()
    end_forks_with_this_process()
if os.fork() == 0:
    if len(sys.argv) > 3 and os.fork():
        os._exit(0)  # as daemons begin; what is left is a child of the parent no more
    connection.sendall(b"%d " % os.getpid())
    time.sleep(60)
time.sleep(60)
"""


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        yield server


def forked(listening, *arguments):
    """Return a process, the id of one that it has forked, and their connection to here."""
    port = str(listening.getsockname()[1])
    parent = subprocess.Popen([sys.executable, "-c", PARENT, port, *arguments])
    connection, _ = listening.accept()
    connection.settimeout(30)
    return parent, int(connection.recv(100)), connection


@pytest.mark.parametrize("daemon", [[], ["daemon"]])
def test_who_waits_for_a_killed_process_does_not_wait_for_what_it_forked(listening, daemon):
    parent, _, connection = forked(listening, "ends", *daemon)
    with connection:
        parent.kill()
        parent.wait()
        assert connection.recv(1) == b""  # all who had it open are gone


def test_without_it_the_connection_stays_open(listening):
    parent, pid, connection = forked(listening, "lives")
    with connection:
        parent.kill()
        parent.wait()
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        os.kill(pid, signal.SIGKILL)


def test_what_has_already_lost_its_parent_ends_at_once():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    script = f"from raysgd.execution import forks; forks._end_with({gone.pid})"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 1


def test_where_the_system_tells_of_no_death_nothing_changes(monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    registered = []
    monkeypatch.setattr(os, "register_at_fork", lambda **hooks: registered.append(hooks))
    end_forks_with_this_process.__wrapped__()
    assert not registered
